"""Which fields of a row hold its text or its conversation, and text made of several by a template."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Literal

from moeq.bounded import is_number
from moeq.errors import CorpusError
from moeq.recipe import SourceSection, template_parts


@dataclass(frozen=True, kw_only=True)
class Fields:
    """Which fields of a row hold what, and whether rows are conversations; template: makes text of several fields."""

    text: str = "text"
    messages: str = "messages"
    prompt: str = "prompt"
    response: str = "response"
    image: str | None = None
    chat: bool | Literal["auto"] = False
    template: str | None = None

    def of(self, own: SourceSection | None) -> Fields:
        """These, but for what a source says itself: its field or template is text, its conversations are such."""
        if own is None:
            return self
        if own.field is not None or own.template is not None:
            return replace(self, text=own.field or self.text, template=own.template, chat=False)
        if own.converses:
            return replace(
                self,
                messages=own.messages_field or self.messages,
                prompt=own.prompt_field or self.prompt,
                response=own.response_field or self.response,
                chat=True,
            )
        return self

    def text_of(self, row: dict[str, Any], where: str) -> str | None:
        """A row's text; None where its field holds none. CorpusError for a field of a template that it lacks."""
        if self.template is not None:
            return filled(self.template, row, where)
        text = row.get(self.text)
        return text if isinstance(text, str) else None


def filled(template: str, row: dict[str, Any], where: str) -> str:
    """A template with the fields of a row, each as it stands: what a field holds is not read as a template again.

    Text, numbers and true or false are taken. CorpusError for a field that is not there, is null, or holds more fields.
    """
    return "".join(_written(row, part, where) if is_field else part for part, is_field in _parts(template))


@cache
def _parts(template: str) -> tuple[tuple[str, bool], ...]:
    return tuple(template_parts(template))


def _written(row: dict[str, Any], name: str, where: str) -> str:
    value = _value(row, name)
    if isinstance(value, str):
        return value
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return str(value)
    if value is None:
        there = ", ".join(map(str, row)) or "no fields"
        what = f"field {name!r} of the template is not in it (there are: {there})"
        if name in row:
            what = f"field {name!r} of the template is null"
        raise CorpusError(what, where=where, do="correct the source's template, or the row")
    inner = ", ".join(map(str, value)) if isinstance(value, dict) else f"{len(value)} of them" if value else "none"
    what = f"field {name!r} of the template is no text but {type(value).__name__} ({inner})"
    raise CorpusError(what, where=where, do=f"name one of it, such as {{{name}.{_example(value)}}}")


def _value(row: dict[str, Any], name: str) -> Any:
    """What a field holds; a dotted name that is no field leads into fields and, by number, lists. None: nothing."""
    if name in row:
        return row[name]
    here: Any = row
    for step in name.split("."):
        if isinstance(here, dict):
            here = here.get(step)
        elif isinstance(here, list) and is_number(step) and int(step) < len(here):
            here = here[int(step)]
        else:
            return None
    return here


def _example(value: Any) -> str:
    return str(next(iter(value), "field")) if isinstance(value, dict) else "0"
