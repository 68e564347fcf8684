"""Digests of every file that the demo makes, in a minute and a half of processor time. From the repository's root:

    export PYTHONPATH=$PWD:$PWD/tests OMP_NUM_THREADS=1
    .venv/bin/python tests/made_before/demo_digests.py                    # compares with demo.json
    .venv/bin/python tests/made_before/demo_digests.py --write FILE       # as JSON; demo.json is such a file

Digests depend on what `archives.environment` lists; elsewhere write a file at the commit before, and compare with it by
`--against FILE`. Where they differ for a reason, the CHANGELOG names it and demo.json is written anew.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from made_before.archives import FOLDER, differences, digests, environment, moeq, other_environment

RECORDED = FOLDER / "demo.json"


def demo() -> dict[str, Any]:
    """Run the demo; what it made, and where."""
    with tempfile.TemporaryDirectory(prefix="moeq-demo-") as folder:
        recipe = FOLDER.parents[1] / "recipes" / "demo.yaml"
        moeq("run", recipe, "--out", Path(folder), "--set", "device=cpu", "--quiet")
        return {"made_by": environment(), "files": digests(Path(folder))}


def main() -> None:
    parser = argparse.ArgumentParser(description="Digests of every file that the demo makes.")
    parser.add_argument("--write", type=Path, help="write them to a file instead of comparing")
    parser.add_argument("--against", type=Path, default=RECORDED, help="what to compare with [default: demo.json]")
    options = parser.parse_args()
    found = demo()
    if options.write is not None:
        options.write.write_text(json.dumps(found, indent=1) + "\n", "utf-8")
        return
    before = json.loads(options.against.read_text("utf-8"))
    other, changed = other_environment(before["made_by"]), differences(before["files"], found["files"])
    if other is not None:
        print(f"not the same environment: {other}")
    print("\n".join(changed) or f"all {len(found['files'])} files are the same")
    sys.exit(bool(changed))


if __name__ == "__main__":
    main()
