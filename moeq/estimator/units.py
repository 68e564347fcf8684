"""Quantities with units in hardware files: text such as "512 GB/s" to a number in the unit of its field.

`units.txt` beside this module defines them, and pint reads it. pint takes longer to import than the rest of an estimate
to work out: the units of the files that come with moeq are in USUAL, which a test holds against pint.
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from tokenize import TokenError
from typing import TYPE_CHECKING, Any

from moeq.bounded import shortened

if TYPE_CHECKING:
    from pint import UnitRegistry

MOST_CHARACTERS = 64  # of a quantity
USUAL = {  # of a field's unit: the number that one of a unit as people write it stands for, to the last bit as in pint
    "byte": {"MB": 1e6, "GB": 1e9, "TB": 1e12, "MiB": 2.0**20, "GiB": 2.0**30, "TiB": 2.0**40, "Kibit": 128.0},
    "byte/second": {"MB/s": 1e6, "GB/s": 1e9, "TB/s": 1e12},
    "flop/second": {"GFLOP/s": 1e9, "TFLOP/s": 1e12, "TFLOPS": 1e12, "TOPS": 1e12, "PFLOPS": 1e15},
    "hertz": {"MHz": 1e6, "GHz": 1e9},
    "second": {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9},
    "watt": {"W": 1.0},
    "joule/byte": {"pJ/bit": 8e-12, "pJ/byte": 1e-12},
    "joule/mac": {"pJ/MAC": 1e-12},
}
_QUANTITY = re.compile(r"([+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)\s*(.*)")
_THOUSANDTHS = re.compile(  # of what comes in whole ones
    r"(?:milli|m|micro|u|µ|μ|nano|n|pico|p|femto|f)(?:bytes?|B|bits?|b|flops?|FLOP[sS]?|OPS|Hz|hertz)\b"
)
_FACTOR = r"(?:1|[^\W\d_]+\s*(?:(?:\*\*|\^)\s*-?\d)?)"  # pint works out any power, however large
_UNIT = re.compile(rf"{_FACTOR}(?:(?:\s*[*/]\s*|\s+){_FACTOR})*")


@cache
def _registry() -> UnitRegistry[Any]:
    import pint

    return pint.UnitRegistry(Path(__file__).with_name("units.txt"))


def parse_quantity(text: str, unit: str) -> float:
    """The number that `text` ("512 GB/s") stands for in `unit` ("byte/second").

    Raises ValueError with one clause that says what is wrong: not a number, no unit, an unknown unit, a wrong
    dimension.
    """
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
    if _THOUSANDTHS.match(unit_text):
        raise ValueError(f"{text!r} is in fractions of a unit that has none: M is mega, m is milli")
    factor = USUAL.get(unit, {}).get(unit_text)
    return float(number) * factor if factor is not None else _by_pint(text, float(number), unit_text, unit)


def _by_pint(text: str, number: float, unit_text: str, unit: str) -> float:
    """A number of `unit_text` in `unit`; ValueError, which tells of `text`, where it is none."""
    import pint

    registry = _registry()
    try:
        return float(registry.Quantity(number, registry.parse_units(unit_text)).to(unit).magnitude)
    except pint.UndefinedUnitError as error:
        raise ValueError(f"{text!r} has an unknown unit {unit_text!r}") from error
    except pint.DimensionalityError as error:
        raise ValueError(f"{text!r} has the wrong dimension") from error
    except (pint.PintError, ValueError, TypeError, TokenError, SyntaxError) as error:
        raise ValueError(f"{text!r} has a unit that cannot be read") from error
