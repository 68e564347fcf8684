"""Asks PyPI's advisories about every package of locks/: `make audit`.

Ends with 1 where an advisory is known, with 0 where none is; where no database could be reached it says NOT RUN and
ends with 0, and where one knows only some of the packages it names the others: no audit passes unseen.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
LOCKS = ("run", "test", "docs", "cuda", "triton")
NAMES = 6  # of packages in a line


def verdict(answer: Mapping[str, Any] | None, said: str) -> tuple[int, list[str]]:
    """The exit status and the lines for what pip-audit answered; None: nothing, but it said something."""
    if answer is None:
        last = said.strip().splitlines()[-1:] or ["no answer"]
        return 0, [f"audit: NOT RUN: no database of advisories could be reached ({last[0].strip()[:200]})"]
    packages: Sequence[Mapping[str, Any]] = answer["dependencies"]
    unknown = [one["name"] for one in packages if "skip_reason" in one]
    found = [(one, advisory) for one in packages for advisory in one.get("vulns", ())]
    lines = []
    for package, advisory in found:
        fixed = ", ".join(advisory["fix_versions"]) or "no version"
        lines.append(f"audit: {package['name']} {package['version']}: {advisory['id']}, mended in {fixed}")
    if len(unknown) == len(packages):
        lines.append(f"audit: NOT RUN: the database that was reached knows none of {len(packages)} packages")
    elif unknown:
        named = ", ".join(unknown[:NAMES]) + f" and {len(unknown) - NAMES} more" * (len(unknown) > NAMES)
        lines.append(f"audit: NOT RUN for {len(unknown)} of {len(packages)} packages: {named}")
    if len(unknown) < len(packages):
        lines.append(f"audit: {len(packages) - len(unknown)} packages, {len(found)} advisories")
    return (1 if found else 0), lines


def main() -> int:
    """Run pip-audit beside this interpreter and say what it found."""
    files = [word for name in LOCKS for word in ("--requirement", f"locks/{name}.txt")]
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "audit.json"
        command = [sys.executable, "-m", "pip_audit", "--require-hashes", "--disable-pip", "--format", "json"]
        done = subprocess.run(
            [*command, "--progress-spinner", "off", "--output", str(out), *files],
            cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False,
        )  # fmt: skip
        answer = json.loads(out.read_text("utf-8")) if out.is_file() and out.stat().st_size else None
    status, lines = verdict(answer, done.stdout)
    print("\n".join(lines))
    return status


if __name__ == "__main__":
    sys.exit(main())
