"""An HTML document around sections: one file that asks for nothing else."""

from __future__ import annotations

from collections.abc import Sequence

from moeq.reporting.html import Raw, Section, element, join, section
from moeq.reporting.style import CSS


def document(title: str, heading: str, lead: Sequence[str], sections: Sequence[Section]) -> str:
    """A page of sections below a heading, what it is about and links to them; bytes depend only on what is given."""
    head = join(
        [
            Raw('<meta charset="utf-8">'),
            Raw('<meta name="viewport" content="width=device-width, initial-scale=1">'),
            Raw('<meta name="color-scheme" content="light dark">'),
            element("title", title),
            element("style", Raw(CSS)),
        ]
    )
    links = element("nav", *(element("a", one.title, href=f"#{one.anchor}") for one in sections))
    top = element("header", element("h1", heading), *lead, links)
    main = element("main", top, *(section(one) for one in sections))
    return f'<!DOCTYPE html>\n<html lang="en"><head>{head}</head>\n<body>{main}</body></html>\n'
