"""An HTML document around sections: one file that asks for nothing else."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Sequence
from hashlib import sha256

from moeq.reporting.glossary import explained
from moeq.reporting.html import Raw, Section, element, escape, join
from moeq.reporting.style import CSS

_SHEET = f"'sha256-{b64encode(sha256(CSS.encode()).digest()).decode()}'"
POLICY = "; ".join(  # what a browser may do for the page, whatever a name in it has become: no scripts, no network
    (
        "default-src 'none'",
        "img-src data:",  # the grounds of maps
        "style-src 'unsafe-inline'",  # for browsers that do not know the two below
        f"style-src-elem {_SHEET}",  # the page's one sheet
        "style-src-attr 'unsafe-inline'",  # widths of figures, and whatever matplotlib draws
        "base-uri 'none'",
        "form-action 'none'",
    )
)


def document(
    title: str, heading: str, lead: Sequence[str], sections: Sequence[Section], *, refresh: int | None = None
) -> str:
    """A page of sections below a heading, what it is about and links to them; bytes depend only on what is given.

    refresh: seconds after which a browser reads it again.
    """
    head = join(
        [
            Raw('<meta charset="utf-8">'),
            Raw(f'<meta http-equiv="Content-Security-Policy" content="{escape(POLICY)}">'),
            Raw('<meta name="viewport" content="width=device-width, initial-scale=1">'),
            Raw('<meta name="color-scheme" content="light dark">'),
            *([] if refresh is None else [Raw(f'<meta http-equiv="refresh" content="{refresh}">')]),
            element("title", title),
            element("style", Raw(CSS)),
        ]
    )
    links = element("nav", *(element("a", section.title, href=f"#{section.anchor}") for section in sections))
    top = element("header", element("h1", heading), *lead, links)
    main = element("main", top, *map(_section, explained(sections)))
    return f'<!DOCTYPE html>\n<html lang="en"><head>{head}</head>\n<body>{main}</body></html>\n'


def _section(section: Section) -> Raw:
    return element("section", element("h2", section.title), *section.parts, id=section.anchor)
