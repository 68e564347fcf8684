"""Sections of a recipe, and the values and checks that several of them share."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from fractions import Fraction
from functools import cache
from typing import Annotated, Any, Self, get_args

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    TypeAdapter,
    ValidationError,
    WithJsonSchema,
    model_validator,
)
from pydantic.fields import FieldInfo

from moeq.bounded import shown
from moeq.errors import RecipeError

MOST = 2**63 - 1
SIZE = re.compile(r"((?:[0-9]{1,24}(?:\.[0-9]{0,24})?|\.[0-9]{1,24})(?:[eE][-+]?[0-9]{1,2})?)\s{0,8}([A-Za-z]{0,24})")
RATIONAL = re.compile(
    r"\s*[-+]?[0-9_.]{1,24}(?:[eE][-+]?[0-9]{1,2})?(?:/[0-9]{1,24})?\s*"
)  # 1e999999999 is a number, too
_SIZES = {
    "": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
    "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40,
}  # fmt: skip


def _parse_bytes(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    if (match := SIZE.fullmatch(value.strip())) is None:
        raise ValueError("must be a number of bytes such as 2000000000 or 2GB")
    unit = match[2].upper()
    if unit not in _SIZES:
        raise ValueError(f"unknown unit {match[2]!r}; use B, KB, MB, GB, TB, KiB, MiB, GiB or TiB")
    return int(float(match[1]) * _SIZES[unit])


def _parse_rational(value: Any) -> str:
    """2.5, "2.5" and "5/2" all become "5/2": exact, since floats err in budgets."""
    if isinstance(value, int | float | str) and not isinstance(value, bool):
        with suppress(ValueError, ZeroDivisionError):
            if RATIONAL.fullmatch(str(value)):
                return str(Fraction(str(value)))
    raise ValueError("must be a number such as 2.5 or 5/2")


SPEED = re.compile(r"\s*(\d{1,12}(?:\.\d{0,9})?|\.\d{1,9})\s*(?:tok(?:en)?s?\s*/\s*s(?:ec(?:ond)?)?)?\s*")


def _parse_speed(value: Any) -> Any:
    """Tokens a second of 20, "20" or "20tok/s"."""
    if not isinstance(value, str):
        return value
    match = SPEED.fullmatch(value)
    if match is None:
        raise ValueError("must be tokens a second, such as 20 or 20tok/s")
    return float(match[1])


_NUMBER = r"[-+]?[0-9_.]+([eE][-+]?[0-9]+)?"
Speed = Annotated[
    float,
    BeforeValidator(_parse_speed),
    Field(gt=0, lt=1e9),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1e9},
                {"type": "string", "pattern": rf"^{SPEED.pattern}$"},
            ]
        }
    ),
]
Bytes = Annotated[
    int,
    BeforeValidator(_parse_bytes),
    Field(gt=0, le=MOST),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "integer", "exclusiveMinimum": 0},
                {"type": "string", "pattern": r"^\s*[0-9.]+([eE][-+]?[0-9]+)?\s*([KMGTkmgt]?[iI]?[Bb])?\s*$"},
            ]
        }
    ),
]
Rational = Annotated[
    str,
    BeforeValidator(_parse_rational),
    WithJsonSchema({"anyOf": [{"type": "number"}, {"type": "string", "pattern": rf"^\s*{_NUMBER}(/[0-9]+)?\s*$"}]}),
]


def bytes_of(text: str, where: str) -> int:
    """A size such as 2GB, given on a command line; RecipeError for what is none."""
    try:
        return TypeAdapter(Bytes).validate_python(text)
    except ValidationError:
        raise RecipeError(f"no size: {shown(text)}", where=where, do="give a number of bytes, such as 2GB") from None


def check_group_size(size: int | None) -> None:
    if size is not None and size != -1 and size < 8:
        raise ValueError("group_size must be -1 (whole rows) or at least 8")


def repeats(values: Sequence[object]) -> bool:
    """Whether a value is there twice."""
    return len(set(values)) < len(values)


def check_named(name: str, values: Sequence[object]) -> None:
    if not values or repeats(values):
        raise ValueError(f"{name} must name at least one value and none twice")


def _fits(value: Any) -> bool:
    """Whether whole numbers, those of lists and mappings included, are of 64 bits."""
    if isinstance(value, list | dict):
        return all(map(_fits, value.values() if isinstance(value, dict) else value))
    return not isinstance(value, int) or -MOST <= value <= MOST


class _Word(str):
    """true or false where a number has to be: a text that is none, in messages without quotes."""

    def __repr__(self) -> str:
        return str(self)


def _worded(value: Any) -> Any:
    """true and false as words, in lists and mappings, too."""
    if isinstance(value, bool):
        return _Word("true" if value else "false")
    if isinstance(value, list):
        return [_worded(one) for one in value]
    return {key: _worded(one) for key, one in value.items()} if isinstance(value, dict) else value


def _scalars(kind: Any) -> Iterator[type]:
    """The types that a type is made of, those of a literal's values among them."""
    parts = get_args(kind)
    yield from (one for part in parts for one in _scalars(part))
    if not parts:
        yield kind if isinstance(kind, type) else type(kind)


class Section(BaseModel):
    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        allow_inf_nan=False,
        defer_build=True,  # a command that reads one section does not wait for all
    )

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """pydantic's, which keeps what is no field as nobody reads it: with such keys all are validated."""
        if update is None or update.keys() <= type(self).model_fields.keys():
            return super().model_copy(update=update, deep=deep)
        return self.model_validate({**self.model_dump(exclude_unset=True), **update})

    @classmethod
    def every_key(cls) -> dict[str, FieldInfo]:
        """What a recipe may have here."""
        return dict(cls.model_fields)

    @classmethod
    @cache
    def _numbers(cls) -> set[str]:
        """The keys that take numbers, and neither true nor false."""
        kinds = {key: set(_scalars(field.annotation)) for key, field in cls.model_fields.items()}
        return {key for key, found in kinds.items() if found & {int, float} and bool not in found}

    @model_validator(mode="before")
    @classmethod
    def _true_is_no_number(cls, given: Any) -> Any:
        """YAML has true for yes and on, which pydantic takes for 1."""
        if not isinstance(given, dict):
            return given
        return {key: _worded(value) if key in cls._numbers() else value for key, value in given.items()}

    @model_validator(mode="after")
    def _check_sizes(self) -> Self:
        """Whole numbers that were written as text have no bound of their own."""
        for name in type(self).model_fields:
            if not _fits(getattr(self, name)):
                raise ValueError(f"{name} is larger than 64 bits hold")
        return self
