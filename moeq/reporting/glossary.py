"""Papers and words of the field, explained at the head of the section where a page has them first."""

from __future__ import annotations

import html
import re
from collections.abc import Iterable
from dataclasses import replace

from moeq.papers import Paper, papers_in, terms_in
from moeq.reporting.html import Raw, Section, details, element, join

_HIDDEN = re.compile(r"<pre>.*?</pre>|<[^>]*>", re.DOTALL)


def explained(sections: Iterable[Section]) -> list[Section]:
    """The sections, each with what it is the first to name: what a word means, and whose it is."""
    known: set[str] = set()
    result = []
    for section in sections:
        text = html.unescape(" ".join([section.title, *(_HIDDEN.sub(" ", part) for part in section.parts)]))
        terms = [term for term in terms_in(text) if term.name not in known]
        known |= {term.name for term in terms}
        papers = [paper for paper in papers_in(text) if paper.short not in known]
        known |= {paper.short for paper in papers}
        if not papers and not terms:
            result.append(section)
            continue
        entries = [
            _entry(paper.short, join([cited(paper), f". Called paper {paper.number} in moeq."])) for paper in papers
        ]
        for term in terms:
            own = [] if term.paper is None else [" (", cited(term.paper), ")"]
            entries.append(_entry(term.name, join([term.meaning, *own])))
        names = ", ".join([*(term.name for term in terms), *(paper.short for paper in papers)])
        listed = details(f"Terms: {names}", element("dl", *entries), class_="terms")
        result.append(replace(section, parts=[listed, *section.parts]))
    return result


def _entry(name: str, meaning: str) -> Raw:
    return join([element("dt", name), element("dd", meaning)])


def cited(paper: Paper) -> Raw:
    """Title, authors, year, and a link that a reader may follow."""
    return join([element("a", paper.title, href=paper.link, rel="noreferrer"), f", {paper.authors}, {paper.year}"])
