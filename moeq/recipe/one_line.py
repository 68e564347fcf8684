"""Options that a command takes in one line, `name=value,name=value`: read, and refused by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Self

from pydantic import BaseModel, ConfigDict, ValidationError

from moeq.errors import RecipeError, hint
from moeq.recipe.wording import refusal_of


class OneLine(BaseModel):
    """A subclass declares its options as fields. option: of the command; example: what may be written there; earlier:
    {a name that an older moeq took: the one of today}."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    option: ClassVar[str]
    example: ClassVar[str]
    earlier: ClassVar[Mapping[str, str]] = {}

    @classmethod
    def of(cls, given: Mapping[str, Any], where: str | None = None) -> Self:
        """Options by name; RecipeError naming the option that is unknown or cannot be."""
        where = where or cls.option
        try:
            return cls.model_validate(dict(given))
        except ValidationError as error:
            found = refusal_of(error, dict(given))
            name = ".".join(map(str, found.path))
        if found.unknown:
            now = cls.earlier.get(name)
            do = f"write {now}" if now is not None else hint(name, cls.model_fields, "known are ")
            raise RecipeError(f"unknown option {name!r}", where=where, do=do)
        raise RecipeError(found.sentence(), where=where, do=found.do)

    @classmethod
    def parse(cls, text: str) -> Self:
        """Options as they are written; RecipeError for what is not."""
        given: dict[str, str] = {}
        for part in filter(None, map(str.strip, text.split(","))):
            name, equals, value = part.partition("=")
            if not equals:
                raise RecipeError(f"{part!r} is not OPTION=VALUE", where=cls.option, do=cls.example)
            if (name := name.strip()) in given:
                raise RecipeError(f"{name} is there twice", where=cls.option, do="name every option once")
            given[name] = value.strip()
        return cls.of(given)
