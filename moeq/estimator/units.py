"""Quantities with units in hardware files: text such as "512 GB/s" to a number in the unit of its field.

`units.txt` beside this module defines them. pint is imported on first use only, since it is slow to import.
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
_QUANTITY = re.compile(r"([+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)\s*(.*)")
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
