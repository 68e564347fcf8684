"""Papers and words: each has what it takes to be found, and is found where it stands."""

from __future__ import annotations

import re
import subprocess
import sys

from moeq.papers import PAPERS, TERMS, Paper, named, papers_in, terms_in


def every() -> list[Paper]:
    return [*PAPERS.values(), *(term.paper for term in TERMS if term.paper is not None)]


def test_every_paper_has_title_authors_year_and_link() -> None:
    assert list(PAPERS) == ["000", "001", "002", "003", "004"]
    for paper in every():
        found = re.fullmatch(r"https://arxiv\.org/abs/(\d\d)(\d\d)\.\d{5}", paper.link)
        assert found, paper.link
        assert 2000 + int(found[1]) == paper.year
        assert len(paper.authors.split(", ")) >= 3
    assert len({paper.title for paper in every()}) == len({paper.link for paper in every()})


def test_numbers_stand_with_names() -> None:
    assert named("paper 000, Table 2") == "Fan et al. 2025 (paper 000), Table 2"
    assert named("recipes/paper-000-figures.yaml and paper 7") == "recipes/paper-000-figures.yaml and paper 7"


def test_words_are_found_as_words() -> None:
    assert [term.name for term in terms_in("MoNDE (bandwidth rule) on the NDP")] == ["NDP", "MoNDE", "bandwidth rule"]
    assert not list(terms_in("SKL, KLM, gptqmodel, ndp"))
    assert [paper.number for paper in papers_in("Fan et al. 2025, Figure 4; MoPEQ; paper 004")] == ["000", "003", "004"]
    assert not list(papers_in("paper-000 and MoPEQ-like"))


def test_it_is_light() -> None:
    code = "import sys, moeq.papers; sys.exit(any(name in sys.modules for name in ('torch', 'numpy', 'pydantic')))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
