"""Text that CPython 3.11.7 carries: library modules, reference documentation and docstrings, cut into documents.

Which files go where is written down here, so that the corpus does not depend on any other text being at hand.
No file named here is among the modules that the tiny models saw (training or held-out part).
"""

from __future__ import annotations

import ast
import re
import sysconfig
from pathlib import Path

EXCERPT_CHARACTERS = 6500
SECTION_CHARACTERS = 3000  # a long topic is cut at headings into documents of at least this size
DOCSTRING_CHARACTERS = 600  # shorter docstrings are notes rather than prose

MODULES = {
    "calibration": [
        "asyncio/queues",
        "asyncio/streams",
        "asyncio/tasks",
        "asyncio/unix_events",
        "colorsys",
        "ctypes/macholib/dyld",
        "curses/textpad",
        "distutils/text_file",
        "email/generator",
        "hashlib",
        "idlelib/format",
        "idlelib/grep",
        "idlelib/hyperparser",
        "idlelib/pyshell",
        "idlelib/squeezer",
        "lib2to3/fixer_base",
        "lib2to3/fixes/fix_map",
        "lib2to3/fixes/fix_metaclass",
        "lib2to3/pgen2/pgen",
        "multiprocessing/connection",
        "multiprocessing/reduction",
        "tabnanny",
        "tomllib/_parser",
        "unittest/main",
        "xml/dom/__init__",
        "xml/sax/saxutils",
    ],
    "evaluation": [
        "_threading_local",
        "datetime",
        "idlelib/iomenu",
        "idlelib/query",
        "lib2to3/fixes/fix_has_key",
        "lib2to3/fixes/fix_next",
        "linecache",
        "locale",
        "multiprocessing/queues",
        "shutil",
        "tracemalloc",
        "wsgiref/handlers",
        "zoneinfo/_common",
        "zoneinfo/_zoneinfo",
    ],
}
TOPICS = {
    "calibration": ["specialnames", "assignment", "calls", "raise", "objects", "subscriptions", "binary"],
    "evaluation": ["typesmapping", "execmodel", "comparisons", "import"],
}
DOCSTRINGS = {
    "calibration": ["argparse", "configparser", "inspect", "logging/__init__", "optparse", "turtle", "typing"],
    "evaluation": ["difflib", "http/cookiejar", "ipaddress", "pickle", "ssl", "subprocess", "threading"],
}

CREDITS = re.compile(
    r"copyright|licen[cs]|author|all rights|permission is|written by|contributed|\b[\w.]+@[\w-]+\.\w+"
    r"|^#.*\bby [A-Z]\w+ [A-Z]",
    re.IGNORECASE | re.MULTILINE,
)
ASCII_TYPOGRAPHY = str.maketrans(
    {"\u2018": "'", "\u2019": "'", "\u201c": '"', "\u201d": '"', "\u2013": "-", "\u2014": "--", "\u2026": "..."}
)
COMMENT_BLOCK = re.compile(r"(?m)((?:^[ \t]*#.*\n)+)")
HEADING = re.compile(r"(?m)^(?=[^\n]+\n(?:={4,}|-{4,}|\*{4,})$)")


def library_file(module: str) -> Path:
    """Path of a module of the running CPython's standard library."""
    return Path(sysconfig.get_path("stdlib")) / f"{module}.py"


def without_credits(source: str) -> str:
    """Source without the comment blocks that name licences, authors or addresses."""
    blocks = COMMENT_BLOCK.split(source)
    return "".join(block for block in blocks if not (block.lstrip().startswith("#") and CREDITS.search(block)))


def excerpt(source: str) -> str:
    """The first `EXCERPT_CHARACTERS` of a module, cut between top-level definitions where that keeps enough of it."""
    if len(source) <= EXCERPT_CHARACTERS:
        return source
    cut = source.rfind("\n\n\n", 0, EXCERPT_CHARACTERS)
    if cut < EXCERPT_CHARACTERS // 2:
        cut = source.rfind("\n\n", 0, EXCERPT_CHARACTERS)
    return source[: cut + 1]


def ascii_prose(text: str) -> str:
    """Text with plain quotation marks and dashes, without the paragraphs that still are not ASCII or name authors."""
    paragraphs = re.split(r"\n[ \t]*\n", text.translate(ASCII_TYPOGRAPHY))
    kept = [p for p in paragraphs if p.isascii() and not CREDITS.search(p)]
    return "\n\n".join(kept).strip("\n") + "\n"


def module_documents(split: str) -> list[tuple[str, str]]:
    """(text, source) of each module of the split."""
    return [
        (excerpt(without_credits(library_file(name).read_text("utf-8"))).strip("\n") + "\n", f"Lib/{name}.py")
        for name in MODULES[split]
    ]


def _sections(text: str) -> list[str]:
    """Pieces of a topic, cut before headings, each at least `SECTION_CHARACTERS` long where there is that much."""
    pieces = [""]
    for section in HEADING.split(text):
        if len(pieces[-1]) >= SECTION_CHARACTERS:
            pieces.append("")
        pieces[-1] += section
    if len(pieces) > 1 and len(pieces[-1]) < SECTION_CHARACTERS:
        pieces[-2:] = [pieces[-2] + pieces[-1]]
    return pieces


def topic_documents(split: str) -> list[tuple[str, str]]:
    """(text, source) of the documentation topics of the split, long ones cut at headings."""
    from pydoc_data.topics import topics

    return [
        (ascii_prose(piece), f"Lib/pydoc_data/topics.py {name}")
        for name in TOPICS[split]
        for piece in _sections(topics[name])
    ]


def docstring_documents(split: str) -> list[tuple[str, str]]:
    """(text, source) of the long docstrings without interpreter sessions, one document a module."""
    documents = []
    for name in DOCSTRINGS[split]:
        nodes = ast.walk(ast.parse(library_file(name).read_text("utf-8")))
        owners = [n for n in nodes if isinstance(n, ast.Module | ast.ClassDef | ast.FunctionDef)]
        texts = [text for text in map(ast.get_docstring, owners) if text]
        long = [text for text in dict.fromkeys(texts) if len(text) >= DOCSTRING_CHARACTERS and ">>>" not in text]
        documents.append((ascii_prose("\n\n".join(long)), f"Lib/{name}.py docstrings"))
    return documents
