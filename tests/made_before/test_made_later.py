"""What a later moeq made is refused in one line that says how to go on, with the exit code of its class.

tests/robustness/test_bad_input.py has those of a plain run; here are the others, on the newest archive.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from made_before.archives import Kept, kept_in, names, refused
from robustness.runs import restamp

from moeq.artifacts.run import DIRECTORIES

RECIPE, ARTIFACT = 2, 7  # exit codes


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Kept:
    return kept_in(names()[-1], tmp_path_factory.mktemp("newest"))


def edit(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text("utf-8")) | changes))


LATER = {  # the run, the file, who reads it
    "layer effects": ("run", "losses/layer_effects.json", "assign"),
    "expert effects": ("run", "losses/expert_effects.json", "assign"),
    "other modules": ("run", "losses/others.json", "report"),
    "replicas of other modules": ("run", "losses/others-replicas.json", "quantize"),
    "low precision": ("run", "eval/low_precision.json", "report"),
    "folded norms": ("vit-run", "reparam/reparam.json", "report"),
    "integer forward": ("vit-run", "reparam/integer.json", "report"),
}


@pytest.mark.cases(4)
@pytest.mark.parametrize("case", LATER)
def test_later_schema_versions_are_refused(kept: Kept, case: str, tmp_path: Path) -> None:
    name, file, stage = LATER[case]
    run = kept.copy(name, tmp_path)
    edit(run / file, schema_version=99)
    restamp(run)
    shutil.rmtree(run / DIRECTORIES.get(stage, stage))
    code, line = refused(stage, "--out", run, "--model", kept.model(name), "--quiet")
    assert (code, f"{run / file}: schema version 99" in line) == (ARTIFACT, True), line
    assert "run `moeq" in line


LATER_CHECKPOINTS = {  # what is changed: the file, the section, the key; the commands that must not go on
    "format": ("config.json", "quantization_config", "format_version", ("generate",)),
    "layout of the configuration": ("config.json", "quantization_config", "layout_version", ("generate",)),
    "layout of the manifest": ("placement.json", "layout", "version", ("inspect", "convert", "verify")),
}


@pytest.mark.parametrize("case", LATER_CHECKPOINTS)
def test_later_checkpoints_are_refused(kept: Kept, case: str, tmp_path: Path) -> None:
    file, section, key, commands = LATER_CHECKPOINTS[case]
    checkpoint = kept.copy("run/checkpoint", tmp_path)
    edit(checkpoint / file, **{section: json.loads((checkpoint / file).read_text("utf-8"))[section] | {key: 99}})
    (checkpoint / "SHA256SUMS").unlink()
    more = {"generate": ["once"], "convert": ["--to", "dequantized", "--out", tmp_path / "out"]}
    for command in commands:
        code, line = refused(command, checkpoint, *more.get(command, []))
        assert (code, file in line, "99" in line) == (ARTIFACT, True, True), line
        assert line.endswith("; install the moeq that wrote it, or export again")


def test_later_recipes_are_refused(kept: Kept, tmp_path: Path) -> None:
    (tmp_path / "later.yaml").write_text(f"recipe_version: 2\n{(kept.folder / 'run.yaml').read_text('utf-8')}")
    code, line = refused("inspect", tmp_path / "later.yaml")
    assert (code, "recipe_version" in line) == (RECIPE, True)
