"""Quantities with units in hardware files: text such as "512 GB/s" to a number in the unit of its field.

The registry is a small one of its own: in pint's default registry a bit is dimensionless, so that "1 GHz" would pass
as a bandwidth. pint is imported on first use only, since it is slow to import.
"""

from __future__ import annotations

import re
from functools import cache
from tokenize import TokenError
from typing import TYPE_CHECKING, Any

from moeq.bounded import shortened

if TYPE_CHECKING:
    from pint import UnitRegistry

_DEFINITIONS = (
    "femto- = 1e-15 = f-",
    "pico- = 1e-12 = p-",
    "nano- = 1e-9 = n-",
    "micro- = 1e-6 = u- = µ- = μ-",
    "milli- = 1e-3 = m-",
    "kilo- = 1e3 = k- = K-",
    "mega- = 1e6 = M-",
    "giga- = 1e9 = G-",
    "tera- = 1e12 = T-",
    "peta- = 1e15 = P-",
    "kibi- = 1024 = Ki-",
    "mebi- = 1048576 = Mi-",
    "gibi- = 1073741824 = Gi-",
    "tebi- = 1099511627776 = Ti-",
    "second = [time] = s = sec",
    "minute = 60 * second = min",
    "hertz = 1 / second = Hz",
    "byte = [information] = B",
    "bit = byte / 8",
    "flop = [operation] = FLOP = FLOPs = flops",
    "joule = [energy] = J",
    "mac = 2 * flop = MAC = MACs",
)
MOST_CHARACTERS = 64  # of a quantity
_QUANTITY = re.compile(r"([+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)\s*(.*)")
_FACTOR = r"(?:1|[^\W\d_]+\s*(?:(?:\*\*|\^)\s*-?\d)?)"  # pint works out any power, however large
_UNIT = re.compile(rf"{_FACTOR}(?:(?:\s*[*/]\s*|\s+){_FACTOR})*")


@cache
def _registry() -> UnitRegistry[Any]:
    import pint

    registry: UnitRegistry[Any] = pint.UnitRegistry(None)
    for definition in _DEFINITIONS:
        registry.define(definition)
    return registry


def parse_quantity(text: str, unit: str) -> float:
    """The number that `text` ("512 GB/s") stands for in `unit` ("byte/second").

    Raises ValueError with one clause that says what is wrong: not a number, no unit, an unknown unit, a wrong
    dimension.
    """
    import pint

    if len(text) > MOST_CHARACTERS:
        raise ValueError(f"{shortened(text)!r} is longer than a number with a unit")
    match = _QUANTITY.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"{text!r} is not a number with a unit")
    number, unit_text = match.groups()
    if not unit_text:
        raise ValueError(f"{text!r} has no unit")
    if _UNIT.fullmatch(unit_text) is None:
        raise ValueError(f"{text!r} has a unit that cannot be read")
    registry = _registry()
    try:
        return float(registry.Quantity(float(number), registry.parse_units(unit_text)).to(unit).magnitude)
    except pint.UndefinedUnitError as error:
        raise ValueError(f"{text!r} has an unknown unit {unit_text!r}") from error
    except pint.DimensionalityError as error:
        raise ValueError(f"{text!r} has the wrong dimension") from error
    except (pint.PintError, ValueError, TypeError, TokenError, SyntaxError) as error:
        raise ValueError(f"{text!r} has a unit that cannot be read") from error
