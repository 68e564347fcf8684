"""The reference of a recipe's keys, in Markdown, from the pydantic models alone."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import yaml
from annotated_types import Ge, Gt, Le, Lt
from pydantic import BaseModel, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from moeq.recipe.types import Section

SCALARS = {bool: "true or false", int: "whole number", float: "number", str: "text"}
BOUNDS = {Ge: ("ge", "at least"), Gt: ("gt", "above"), Le: ("le", "at most"), Lt: ("lt", "below")}
SPELLED = ((2**20, "1MiB", "bytes, such as 12GiB"), ("5/2", 2.5, "number, such as 2.5 or 5/2"))  # kept, given, in words
TOP = "Top level"


def reference(recipe: type[Section]) -> str:
    """A heading and a table for every section: its keys, what they take, their defaults and what they mean."""
    known: dict[type[Section], str] = {}
    return "\n".join(_section(path, model, known) for path, model in sections(recipe))


def sections(model: type[Section], path: str = "") -> Iterator[tuple[str, type[Section]]]:
    """Every section of a recipe with its dotted path, the outer before the inner."""
    yield path or TOP, model
    for name, field in model.model_fields.items():
        inner = _model_in(field.annotation)
        if inner is not None:
            yield from sections(inner, f"{path}.{name}" if path else name)


def _model_in(kind: Any) -> type[Section] | None:
    """The model that a type is, may be, or lists."""
    if inspect.isclass(kind) and issubclass(kind, Section):
        return kind
    return next((found for one in get_args(kind) if (found := _model_in(one)) is not None), None)


def _section(path: str, model: type[Section], known: dict[type[Section], str]) -> str:
    """One section; known: those above by their paths, of which what is inherited is only named."""
    base = next((one for one in model.__mro__ if one in known), None)
    known.setdefault(model, path)
    inherited = {} if base is None else base.every_key()
    rows = [_row(path, name, field) for name, field in model.every_key().items() if name not in inherited]
    text = [f"## {path}\n"]
    if model.__doc__ and path != TOP:
        text.append(f"{inspect.cleandoc(model.__doc__)}\n")
    if base is not None:
        text.append(f"Every key of {_link(known[base], known[base])}{', and' if rows else '.'}\n")
    if rows:
        text.append("\n".join(["| key | takes | default | |", "|---|---|---|---|", *rows]) + "\n")
    return "\n".join(text)


def _link(words: str, path: str) -> str:
    return f"[{words}](#{path.replace('.', '')})"


def _row(path: str, name: str, field: FieldInfo) -> str:
    words = takes(field.annotation, tuple(field.metadata))
    if _model_in(field.annotation) is not None:
        words = _link(words, name if path == TOP else f"{path}.{name}")
    cells = [f"`{name}`", words, _default(field), field.description or ""]
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def takes(kind: Any, limits: tuple[Any, ...] = ()) -> str:
    """What a type takes, in words; limits: what pydantic keeps beside a type."""
    origin, inner = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return takes(inner[0], (*inner[1:], *limits))
    if origin in (Union, UnionType):
        words = " or ".join(takes(one, limits) for one in inner if one is not NoneType)
        return words if NoneType not in inner else f"{words}{',' * (', ' in words)} or none"
    if origin is Literal:
        return ", ".join(f"`{_yaml(one)}`" for one in inner)
    if origin is list:
        return "list of sections" if _model_in(kind) else f"list: {takes(inner[0])}"
    if origin is dict:
        return f"{{{takes(inner[0])}: {takes(inner[1])}}}"
    if _model_in(kind) is not None:
        return "section"
    return _spelled(kind, limits) or ", ".join([SCALARS[kind], *_bounds(limits)])


def _spelled(kind: Any, limits: tuple[Any, ...]) -> str | None:
    """How a scalar is written that takes more than it keeps: bytes with a unit, fractions."""
    for kept, given, words in SPELLED:
        try:
            if TypeAdapter(Annotated[kind, *limits, None]).validate_python(given) == kept:
                return words
        except ValidationError:
            continue
    return None


def _bounds(limits: tuple[Any, ...]) -> list[str]:
    """`at least 1` and the like."""
    flat = [one for limit in limits for one in (limit.metadata if isinstance(limit, FieldInfo) else [limit])]
    known = [(*BOUNDS[type(one)], one) for one in flat if type(one) in BOUNDS]
    return [f"{words} {getattr(one, name):,}" for name, words, one in known]


def _default(field: FieldInfo) -> str:
    value = field.get_default(call_default_factory=True)
    if value is PydanticUndefined:
        return "required"
    if value is None:
        return "none"
    if isinstance(value, BaseModel):
        return "its own defaults"
    if isinstance(value, list) and value and isinstance(value[0], BaseModel):
        return ", ".join(f"`{_yaml(one.model_dump(mode='json', exclude_unset=True))}`" for one in value)
    return f"`{_yaml(value)}`"


def _yaml(value: Any) -> str:
    """A value as a recipe writes it, on one line."""
    text = yaml.safe_dump(value, default_flow_style=True, width=10_000, sort_keys=False)
    return text.removesuffix("...\n").strip()
