"""HTML from strings: everything is escaped unless it is `Raw`."""

from __future__ import annotations

import html
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

_UNHOLDABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]")


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


@dataclass(frozen=True)
class Section:
    """One section of the page: anchor, heading, and its parts in order."""

    anchor: str
    title: str
    parts: Sequence[Raw]


def plain(text: str) -> str:
    """Text without the characters that neither HTML nor XML can hold."""
    return _UNHOLDABLE.sub("\N{REPLACEMENT CHARACTER}", text)


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


def lead(text: str) -> Raw:
    """What a page or a section begins with."""
    return paragraph(text, kind="lead")


def items(texts: Iterable[str]) -> Raw:
    return element("ul", *(element("li", text) for text in texts))


def table(reading: str, head: Sequence[str], rows: Sequence[Sequence[str] | Row], *, texts: int = 1) -> Raw:
    """A sentence on how to read a table, and the table, which scrolls inside its own box.

    The first `texts` columns are text, the others figures.
    """
    top = (element("th", name, scope="col", **_alignment(index, texts)) for index, name in enumerate(head))
    body = element("tbody", *(_row(row, texts) for row in rows))
    inner = element("table", element("thead", element("tr", *top)), body)
    box = element("div", inner, class_="scroll", tabindex="0", role="region", aria_label=reading)
    return join([paragraph(reading, kind="reading"), box])


def _alignment(index: int, texts: int) -> dict[str, str]:
    return {} if index < texts else {"class_": "number"}


def _row(row: Sequence[str] | Row, texts: int) -> Raw:
    name, *figures = row.cells if isinstance(row, Row) else row
    cells = (element("td", value, **_alignment(index, texts)) for index, value in enumerate(figures, 1))
    attributes = {"class_": row.kind} if isinstance(row, Row) else {}
    return element("tr", element("th", name, scope="row"), *cells, **attributes)


def figure(drawing: Drawing, caption: str) -> Raw:
    """A figure as wide as its drawing, which scrolls inside its own box where the page is narrower."""
    box = element("div", Raw(drawing.svg), class_="scroll", tabindex="0")
    return element("figure", box, element("figcaption", caption), style=f"width:{drawing.width:g}px")


def details(summary: str, *content: str, **attributes: str) -> Raw:
    return element("details", element("summary", summary), *content, **attributes)
