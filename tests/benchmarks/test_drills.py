"""Each kind of drill in a short form, as `make drills` does them by the hundred; and what counts as lost."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import drill_flips
import drill_kinds
import drill_subjects
import drills
import pytest
from drill_subjects import MADE, Ground, Lost
from fork_server import Finished, ForkServer

pytestmark = pytest.mark.full


@pytest.fixture(scope="module")
def ground(moeq: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> Ground:
    """A run that writes every runtime's format, and conversions of what it made."""
    return Ground(tmp_path_factory.mktemp("drills") / "ground", ["formats"], moeq)


@pytest.fixture(scope="module")
def finished(ground: Ground) -> drill_flips.Finishable:
    """A finished run with sources of its own."""
    return drill_flips.Finishable(ground, "formats")


SHORT: list[drill_kinds.Drill] = [drill_kinds.kill, *drill_kinds.SIGNALS, *drill_kinds.DISK]
SHORT += [drill_kinds.one_directory, drill_kinds.one_target]


@pytest.mark.parametrize("number", range(len(SHORT)))
def test_short_form(ground: Ground, number: int) -> None:
    if SHORT[number] in drill_kinds.MOUNTED and not drill_kinds.runs.can_mount():
        pytest.skip("mounting needs root")
    assert SHORT[number](ground, random.Random(f"short-{number}"), ground.place()).total() >= 1


def test_flips(finished: drill_flips.Finishable) -> None:
    """A model's weights, experts, a configuration and a record, in a run that goes on from one to the next."""
    chance, kinds = random.Random(3), finished.kinds(large=False)
    assert {"model .safetensors", "store rows of losses", "record", "GGUF", "text"} <= kinds.keys()
    for kind in ("model .safetensors", "quantize .safetensors", "checkpoint of a format config.json", "record"):
        drill_flips.flip(finished, chance.choice(kinds[kind]), chance)


def test_what_is_other_than_unbroken_is_lost(ground: Ground) -> None:
    subject, place = ground.subjects["convert to gptqmodel"], ground.place()
    ground.finish_as_unbroken(subject, place)
    with pytest.raises(Lost, match="is there already"):
        ground.finish(subject, place)
    (place / MADE / "config.json").write_text("{}")
    with pytest.raises(Lost, match=r"other than unbroken: changed in/out/config\.json"):
        ground.check(subject, place)
    (place / MADE / "config.json").unlink()
    (place / MADE / "a.partial").mkdir()
    with pytest.raises(Lost, match=r"missing in/out/config\.json; left behind in/out/a\.partial"):
        ground.check(subject, place)


@pytest.mark.parametrize(
    ("code", "stderr", "what"),
    [
        (0, "", "exit 0"),
        (1, "moeq: bug in moeq: x", "exit 1"),
        (8, "Traceback\nmoeq: x", "not one line"),
        (8, "moeq: cannot write", "not one line with"),
    ],
)
def test_what_is_no_refusal_is_lost(code: int, stderr: str, what: str) -> None:
    with pytest.raises(Lost, match=what):
        drill_subjects.refusal(Finished(code, "", stderr), {8}, ["run"], "out")
    assert drill_subjects.refusal(Finished(8, "", "moeq: out: full\n"), {8}, ["run"], "out") == "moeq: out: full"


def test_a_flip_that_is_passed_on_is_lost(
    ground: Ground, finished: drill_flips.Finishable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It comes last: the run is spoiled."""
    silent: Callable[..., Any] = lambda *_, **__: Finished(0, "", "")  # noqa: E731
    monkeypatch.setattr(type(ground.server), "run", silent)
    monkeypatch.setattr(ground, "finish", silent)
    for name, what in (("in/out/eval/eval.json", "passed on|not seen"), ("sources/text.jsonl", "passed on silently")):
        with pytest.raises(Lost, match=what):
            drill_flips.flip(finished, finished.place / name, random.Random(2))


def test_the_tally_counts_what_was_lost_and_keeps_its_place(ground: Ground, tmp_path: Path) -> None:
    def losing(ground: Ground, chance: random.Random, place: Path) -> Counter[str]:
        raise Lost("a file", ["run", "x.yaml"])

    def keeping(ground: Ground, chance: random.Random, place: Path) -> Counter[str]:
        return Counter(kept=2)

    tally = drills.Tally(tmp_path / "log")
    drills.drilled(ground, tally, "disk", losing, "1-disk-0")
    drills.drilled(ground, tally, "disk", keeping, "1-disk-1")
    assert (tally.run["disk"], tally.passed["disk"]) == (Counter(losing=1, kept=2), Counter(kept=2))
    lost, kept = tally.log.read_text().splitlines()
    assert "LOST: Lost: a file; seed 1-disk-0, moeq run x.yaml; kept " in lost
    assert Path(lost.rpartition("kept ")[2]).is_dir()
    assert kept.endswith("1-disk-1: kept 2")
