"""Builds the bundled corpus: calibration and evaluation text, and the four-way items made of the latter.

  python tests/bundled/build_corpus.py OUT_DIR --training-text DIR
  python tests/bundled/build_corpus.py OUT_DIR --no-training-check

DIR holds what the tiny models were trained on (`python.txt`, `wikitext2/train.txt`, `shakespeare.txt`,
`gsm8k_train.jsonl`). The check never changes what is written; it stops the build when a line of the corpus is in
the training text. The text is that of CPython 3.11.7, so another Python is refused. The files in
moeq/bundled/corpus are frozen: everyone uses those, and this script is the record of how they came about.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import platform
import random
import re
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from continuation_items import domain_items
from cpython_text import CREDITS, docstring_documents, module_documents, topic_documents
from math_problems import load_templates, word_problem

from moeq.bundled import bundled_path
from moeq.errors import CorpusError, MoeqError

PYTHON_VERSION = "3.11.7"
DOMAINS = ("python", "prose", "math")
MATH_CHARACTERS = {"calibration": 144_000, "evaluation": 68_000}
SEEDS = {"calibration": 11, "evaluation": 12, "items": 13}
LONG_LINE = 60  # a line of more characters, or WINDOW characters from a line's start on, may be in one split only
WINDOW = 64

Row = dict[str, str]


def fingerprints(text: str) -> set[str]:
    """Long lines, and the `WINDOW` characters from the start of every line on; white space at line ends is ignored."""
    lines = [line for line in (line.strip() for line in text.splitlines()) if line]
    joined, marks, start = "\n".join(lines), set(), 0
    for line in lines:
        if len(line) > LONG_LINE:
            marks.add(line)
        if len(window := joined[start : start + WINDOW]) == WINDOW:
            marks.add(window)
        start += len(line) + 1
    return marks


def math_documents(split: str, taken: set[str]) -> list[tuple[str, str]]:
    """(text, source) of word problems, the same number of each template; `taken` fingerprints are avoided."""
    rng, templates = random.Random(SEEDS[split]), load_templates(split)
    documents: list[tuple[str, str]] = []
    size = 0
    while size < MATH_CHARACTERS[split]:
        for template in rng.sample(templates, len(templates)):
            text = word_problem(template, rng)
            while fingerprints(text) & taken:
                text = word_problem(template, rng)
            taken |= fingerprints(text)
            documents.append((text, f"moeq math template {template.name}"))
            size += len(text)
    return documents


def split_rows(split: str, taken: set[str]) -> list[Row]:
    """Rows of one split in a fixed, mixed order."""
    by_domain = {
        "python": module_documents(split),
        "prose": topic_documents(split) + docstring_documents(split),
        "math": math_documents(split, taken),
    }
    rows = [
        {"text": text, "domain": domain, "source": source} for domain in DOMAINS for text, source in by_domain[domain]
    ]
    random.Random(SEEDS[split]).shuffle(rows)
    return rows


def training_fingerprints(directory: Path) -> set[str]:
    """Fingerprints of what the tiny models were trained on, cut as their training script cut it."""
    try:
        modules = (directory / "python.txt").read_text("utf-8")
        plain = [(directory / name).read_text("utf-8") for name in ("wikitext2/train.txt", "shakespeare.txt")]
        problems = (directory / "gsm8k_train.jsonl").read_text("utf-8").splitlines()
    except OSError as error:
        raise CorpusError(
            f"cannot read the training text: {error}", do="name its directory or pass --no-training-check"
        ) from error
    files = [text for text in re.split(r"(?m)^(?=# file: Lib/)", modules) if text.strip()]
    texts = plain + files[: int(len(files) * 0.9)]
    texts += [f"Question: {row['question']}\nAnswer: {row['answer']}\n" for row in map(json.loads, problems)]
    return set().union(*map(fingerprints, texts))


def _row_fingerprints(rows: Iterable[Row]) -> dict[str, str]:
    return {mark: row["source"] for row in rows for mark in fingerprints(row["text"])}


def _refuse_shared(marks: Mapping[str, str], others: Iterable[str], where: str) -> None:
    shared = sorted(marks.keys() & set(others))
    if shared:
        raise CorpusError(f"{len(shared)} pieces of text are shared, one is {shared[0]!r}", where=where)


def check_rows(splits: Mapping[str, list[Row]], training: set[str]) -> None:
    """Raises CorpusError unless all text is ASCII, free of licences, and neither shared nor in the training text."""
    for split, rows in splits.items():
        for row in rows:
            if not row["text"].isascii() or CREDITS.search(row["text"]):
                raise CorpusError("the text is not ASCII, or names a licence or an author", where=row["source"])
        _refuse_shared(_row_fingerprints(rows), training, f"{split} and training text")
    calibration = _row_fingerprints(splits["calibration"])
    _refuse_shared(_row_fingerprints(splits["evaluation"]), calibration, "evaluation and calibration")


def four_way_items(splits: Mapping[str, list[Row]], tokenizer: Any) -> list[dict[str, Any]]:
    """All items, the domains mixed."""
    rng = random.Random(SEEDS["items"])
    items = []
    for domain in DOMAINS:
        texts = {split: [row["text"] for row in rows if row["domain"] == domain] for split, rows in splits.items()}
        items += domain_items(domain, texts["evaluation"], texts["calibration"], tokenizer, rng)
    rng.shuffle(items)
    return items


def build_splits() -> dict[str, list[Row]]:
    """Both splits, calibration first, because the evaluation's problems avoid what it holds."""
    taken: set[str] = set()
    return {split: split_rows(split, taken) for split in ("calibration", "evaluation")}


def report(name: str, path: Path, rows: list[Row] | None, tokenizer: Any) -> None:
    """Prints bytes, SHA-256 and, for text, characters and tokens a domain."""
    data = path.read_bytes()
    print(f"{name}: {len(data)} bytes, sha256 {hashlib.sha256(data).hexdigest()}")
    for domain in DOMAINS if rows else ():
        texts = [row["text"] for row in rows or () if row["domain"] == domain]
        tokens = sum(len(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]) for text in texts)
        print(f"  {domain}: {len(texts)} documents, {sum(map(len, texts))} characters, {tokens} tokens")


def build(out_dir: Path, training_text: Path | None) -> None:
    """Writes the three files to `out_dir`; without `training_text` the training check is left out."""
    if platform.python_version() != PYTHON_VERSION or platform.python_implementation() != "CPython":
        raise CorpusError(
            f"this is {platform.python_implementation()} {platform.python_version()}, whose library text differs",
            do=f"run it with CPython {PYTHON_VERSION}, or use the frozen files",
        )
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast.from_pretrained(bundled_path("tiny-mixtral"))
    splits = build_splits()
    check_rows(splits, training_fingerprints(training_text) if training_text else set())
    contents: dict[str, list[Any]] = {**splits, "continuation_4way": four_way_items(splits, tokenizer)}
    out_dir.mkdir(parents=True, exist_ok=True)
    for name, rows in contents.items():
        path = out_dir / f"{name}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8", newline="\n")
        report(path.name, path, splits.get(name), tokenizer)


def main(arguments: list[str] | None = None) -> int:
    """Command line; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python tests/bundled/build_corpus.py", description="Builds the corpus that moeq bundles."
    )
    parser.add_argument("out_dir", type=Path, metavar="OUT_DIR")
    check = parser.add_mutually_exclusive_group(required=True)
    check.add_argument("--training-text", type=Path, metavar="DIR", help="what the tiny models were trained on")
    check.add_argument("--no-training-check", action="store_true", help="when that text is not at hand")
    options = parser.parse_args(arguments)
    try:
        build(options.out_dir, options.training_text)
    except MoeqError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
