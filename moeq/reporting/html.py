"""HTML from strings: everything is escaped unless it is `Raw`."""

from __future__ import annotations

import html
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


class Raw(str):
    """Text that is HTML already."""


@dataclass(frozen=True, kw_only=True)
class Drawing:
    """SVG and the width, in points (CSS pixels), that it is meant to have."""

    svg: str
    width: float


@dataclass(frozen=True, kw_only=True)
class Row:
    """A table row with a class (exported, group)."""

    cells: Sequence[str]
    kind: str


@dataclass(frozen=True, kw_only=True)
class Section:
    """One section of the page: anchor, heading, and its parts in order."""

    anchor: str
    title: str
    parts: Sequence[Raw]


def plain(text: str) -> str:
    """Text without control characters, which neither HTML nor XML can hold."""
    return "".join("\N{REPLACEMENT CHARACTER}" if _is_control(letter) else letter for letter in text)


def _is_control(letter: str) -> bool:
    return (letter not in "\n\t" and unicodedata.category(letter) in ("Cc", "Cs")) or letter in "\ufffe\uffff"


def escape(text: str) -> Raw:
    """HTML of a string; `Raw` stays as it is."""
    return text if isinstance(text, Raw) else Raw(html.escape(plain(text), quote=True))


def join(parts: Iterable[str]) -> Raw:
    return Raw("".join(escape(part) for part in parts))


def element(tag: str, *content: str, **attributes: str) -> Raw:
    """An element; `class_` stands for class and `aria_label` for aria-label."""
    pairs = ((name.rstrip("_").replace("_", "-"), value) for name, value in attributes.items())
    opening = "".join(f' {name}="{escape(value)}"' for name, value in pairs)
    return Raw(f"<{tag}{opening}>{join(content)}</{tag}>")


def paragraph(*content: str, kind: str = "") -> Raw:
    return element("p", *content, class_=kind) if kind else element("p", *content)


def items(texts: Iterable[str]) -> Raw:
    return element("ul", *(element("li", text) for text in texts))


def table(caption: str, head: Sequence[str], rows: Sequence[Sequence[str] | Row], *, texts: int = 1) -> Raw:
    """A table that scrolls inside its own box. The first `texts` columns are text, the others figures."""

    def cells(values: Sequence[str]) -> Raw:
        parts = []
        for index, value in enumerate(values):
            attributes = {} if index < texts else {"class_": "number"}
            tag = "th" if index == 0 else "td"
            parts.append(element(tag, value, **attributes, **({"scope": "row"} if tag == "th" else {})))
        return join(parts)

    top = [
        element("th", name, scope="col", **({} if index < texts else {"class_": "number"}))
        for index, name in enumerate(head)
    ]
    body = [
        element("tr", cells(row.cells), class_=row.kind) if isinstance(row, Row) else element("tr", cells(row))
        for row in rows
    ]
    inner = element(
        "table", element("caption", caption), element("thead", element("tr", *top)), element("tbody", *body)
    )
    return element("div", inner, class_="scroll", tabindex="0")


def figure(drawing: Drawing, caption: str) -> Raw:
    """A figure as wide as its drawing, which scrolls inside its own box where the page is narrower."""
    box = element("div", Raw(drawing.svg), class_="scroll", tabindex="0")
    return element("figure", box, element("figcaption", caption), style=f"width:{drawing.width:g}px")


def details(summary: str, *content: str) -> Raw:
    return element("details", element("summary", summary), *content)


def section(one: Section) -> Raw:
    return element("section", element("h2", one.title), *one.parts, id=one.anchor)
