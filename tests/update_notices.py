"""Writes THIRD_PARTY.md, what moeq runs on and whose it is: `make notices`, from the metadata of what is installed."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from email.message import Message
from importlib.metadata import PackageNotFoundError, metadata
from pathlib import Path

from packaging.version import Version
from update_lock import Pin, read

ROOT = Path(__file__).parents[1]
NOTICES = ROOT / "THIRD_PARTY.md"
HEAD = """# Third-party notices
Made by `make notices`: not to be edited. moeq itself is under the [Apache License 2.0](LICENSE).

## In the package
- The text of `moeq/bundled/corpus`, domains python and prose: Copyright (c) 2001-2023 Python Software Foundation; All
  Rights Reserved. PSF-2.0, `moeq/bundled/LICENSE.PSF-2.0.txt`. Excerpts, changed as `moeq/bundled/README.md` says.
- `moeq/bundled/tiny-moe-vit` and `tiny-moe-vit-65`, Apache-2.0: trained for moeq on scikit-learn's digits, "Optical
  Recognition of Handwritten Digits", E. Alpaydin and C. Kaynak, UCI Machine Learning Repository, CC BY 4.0.
- `moeq/bundled/tiny-mixtral`: trained for moeq on WikiText-2 (CC BY-SA 3.0), tinyshakespeare (public domain), GSM8K
  (MIT) and modules of CPython (PSF-2.0), as `moeq/bundled/README.md` says.

## Beside it
pip installs these with moeq, each under its own licence as its package states it, whose text lies in that package. None
of them is part of moeq's wheel. torch's build for NVIDIA GPUs brings NVIDIA's libraries too (`locks/cuda.txt`), under
NVIDIA's licences.

| package | version | licence |
|---|---|---|
"""
LONGEST = 100  # characters of a licence's name; some packages state the whole text
FAMILY = "License :: OSI Approved :: "


def licence(about: Message) -> str:
    """What a package says its licence is: an SPDX expression, else what it calls it, else its classifiers."""
    stated = (about.get("License-Expression") or about.get("License") or "").strip()
    if stated and "\n" not in stated and len(stated) <= LONGEST and stated != "UNKNOWN":
        return stated
    classifiers = [one.removeprefix(FAMILY) for one in about.get_all("Classifier", []) if one.startswith(FAMILY)]
    named = " and ".join(classifiers) or stated.partition("\n")[0].strip()[:LONGEST]
    return named or "not stated"


def rows(pins: dict[str, Pin]) -> Iterator[str]:
    """A line for every package; ends the program where another version is installed than the lock has."""
    for name, pin in sorted(pins.items()):
        try:
            about = metadata(name)
        except PackageNotFoundError:
            sys.exit(f"{name} is not installed: run make")
        if Version(about["Version"]).public != pin.version:
            sys.exit(f"{name} {about['Version']} is installed, locks/run.txt has {pin.version}: run make")
        yield f"| {about['Name']} | {pin.version} | {licence(about).replace('|', '/')} |\n"


def text() -> str:
    """What THIRD_PARTY.md has to say of what is installed."""
    return HEAD + "".join(rows(read("run")))


if __name__ == "__main__":
    NOTICES.write_text(text(), "utf-8")
