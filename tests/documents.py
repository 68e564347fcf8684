"""What the pages of the documentation hold: code blocks with what stands above them, links, and headings' anchors."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
FRONT = ROOT / "README.md"
PAGES = [FRONT, *sorted((ROOT / "docs").glob("*.md"))]
BESIDE = [ROOT / name for name in ("benchmarks/RESULTS.md", "CHANGELOG.md", "SECURITY.md", "THIRD_PARTY.md")]
ALL = [*PAGES, *sorted((ROOT / "moeq").rglob("*.md")), *BESIDE]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
NOT_RUN = re.compile(r"<!-- not run: (.+) -->$")
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
SPAN = re.compile(r"`[^`\n]+`")
FILE = re.compile(r"(?<![\w./-])(?:benchmarks|docs|moeq|recipes|tests)/[\w./-]+\.\w+")


@dataclass(frozen=True)
class Block:
    """A code block. place: page and line; reason: why it is not run, where a comment above it says so."""

    place: str
    language: str
    text: str
    reason: str | None


def blocks(page: Path) -> list[Block]:
    """The code blocks of a page, in order."""
    text, found = page.read_text("utf-8"), []
    for fence in FENCE.finditer(text):
        before = text[: fence.start()]
        above = NOT_RUN.search(before.rstrip("\n").rpartition("\n")[2])
        place = f"{page.relative_to(ROOT)}:{before.count(chr(10)) + 1}"
        found.append(Block(place, fence[1], fence[2], above[1] if above else None))
    return found


def commands(block: Block) -> list[str]:
    """The command lines of a shell block, those that go on after a backslash as one."""
    lines = block.text.replace("\\\n", " ").splitlines()
    return [line for line in map(str.strip, lines) if line and not line.startswith("#")]


def prose(page: Path) -> str:
    """A page without its code blocks."""
    return FENCE.sub("", page.read_text("utf-8"))


def links(page: Path) -> list[str]:
    """Targets of the links and pictures of a page that lead into the repository."""
    found = LINK.findall(SPAN.sub("", prose(page)))
    return [target for target in found if not re.match(r"\w+:", target)]


def anchors(page: Path) -> set[str]:
    """What the headings of a page can be linked by."""
    found: set[str] = set()
    for heading in re.findall(r"^#+ (.+)$", prose(page), re.MULTILINE):
        plain = re.sub(r"[^\w\- ]", "", LINK.sub("", heading).lower()).strip().replace(" ", "-")
        number = 1
        while (name := plain if number == 1 else f"{plain}-{number - 1}") in found:
            number += 1
        found.add(name)
    return found


def named_files(page: Path) -> list[str]:
    """Files of the repository that a page names in its text, comments included."""
    return FILE.findall(prose(page))
