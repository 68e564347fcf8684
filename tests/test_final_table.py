"""The table at the end of a run: what it shows in narrow windows, and that its words are explained."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from moeq import final_table
from moeq.artifacts.assignment import EDITED
from moeq.pipeline import Outcome
from moeq.progress import PlainConsole
from moeq.terminal import named_lines, print_final

ESTIMATED = {"geometry": "mixtral-8x7b", "geometry_is_the_models": False}


def row(name: str, label: str, *, speed: float | None = 7.8, exported: bool = False, **more: Any) -> dict[str, Any]:
    return {
        "name": name,
        "label": label,
        "exported": exported,
        "bits_per_weight": 2.29,
        "stored_bits": 4.05,
        "expert_bytes": 900_000,
        "expert_share": 0.143,
        "total_bytes": 2_000_000,
        "checkpoint_bytes": 2_100_000,
        "checkpoint_share": 0.284,
        "perplexity": 35.17,
        "perplexity_change": 0.053,
        "kl": 0.0739,
        "kl_stderr": 0.0008,
        "same_top": 0.814,
        "accuracy": None,
        "accuracy_stderr": None,
        "speedup_over_monde_bandwidth_rule": speed,
        "speedup_over_monde_cost_optimal": None if speed is None else speed / 2,
    } | more


def shown(rows: list[dict[str, Any]], width: int) -> str:
    console = PlainConsole(width=width)
    with console.capture() as capture:
        for made in final_table.tables(rows, width):
            console.print(made)
    return capture.get()


def test_rows_are_called_by_their_labels_and_the_exported_one_is_marked() -> None:
    text = shown([row("original", "as trained"), row("run", "optimal by matrix, 2.3 bits", exported=True)], 80)
    assert "optimal by matrix, 2.3 bits *" in text
    assert "as trained" in text
    assert "original" not in text


@pytest.mark.parametrize("width", [60, 80])
def test_stored_bits_kl_and_equal_top_1_stand_beside_perplexity_on_one_line(width: int) -> None:
    lines = shown([row("a", "4 experts in FP16 + prefix-split, 2.3 bits")], width).splitlines()
    assert all(len(line.rstrip()) <= width for line in lines)
    head = lines[0].split()
    assert [title for title in ("bits", "ppl", "KL", "top-1") if title in head] == ["bits", "ppl", "KL", "top-1"]
    assert {"2.29", "35.17", "0.0739", "81.4%"} <= set(lines[1].split())


@pytest.mark.parametrize("width", [20, 30, 40, 60])
def test_no_window_is_too_narrow_for_a_name_or_a_figure(width: int) -> None:
    text = shown([row("run", "optimal by matrix, 2.3 bits", exported=True), row("b", "uniform 2-bit")], width)
    assert all(len(line.rstrip()) <= width for line in text.splitlines())
    words = {
        "optimal",
        "matrix,",
        "uniform",
        "2-bit",
        "2.29",
        "4.05",
        "35.17",
        "0.0739",
        "81.4%",
        "879",
        "7.8x",
        "3.9x",
    }
    assert words <= set(text.replace(";", "").split()), text


def test_a_column_that_no_row_has_is_left_out() -> None:
    assert "acc" not in shown([row("a", "a")], 80)
    assert "acc" in shown([row("a", "a"), row("b", "b", accuracy=0.6)], 80)


def test_what_words_of_the_table_mean_stands_below_it_with_the_paper_that_they_are_of() -> None:
    rows = [row("a", "prefix-split, 2.3 bits")]
    found = dict(final_table.explanations(rows, final_table.caption(rows, ESTIMATED, 160)))
    assert {"MoNDE", "bandwidth rule", "prefix-split"} <= set(found)
    assert "near-data processor" in found["MoNDE"]
    assert all("https://arxiv.org/abs/" in meaning for meaning in found.values())


def test_of_a_tiny_model_there_is_no_speed_up_and_no_word_about_it() -> None:
    rows = [row("a", "uniform 2-bit", speed=None)]
    caption = final_table.caption(rows, ESTIMATED | {"geometry_is_the_models": True}, 160)
    assert "speed-up" not in shown(rows, 160) + caption
    assert list(final_table.explanations(rows, caption)) == []
    assert "speed-up" in shown([row("a", "uniform 2-bit")], 160)


def test_other_replicas_are_said_where_there_are_some() -> None:
    """The bits of all tensors are without them, the whole checkpoint has them."""
    rows = [row("a", "uniform 2-bit")]
    assert "all bits: of all tensors; scales" in final_table.caption(rows, ESTIMATED, 80)
    assert "alike" not in final_table.caption(rows, ESTIMATED, 80)
    original = row("original", "as trained", total_bytes=2 * rows[0]["total_bytes"])  # or half: of FP8, dequantized
    assert "everything else stored alike" in final_table.caption([original, *rows], ESTIMATED, 80)
    told = final_table.caption(rows, ESTIMATED, 80, 422_400)
    assert "all bits: of all tensors but 413 KiB of other replicas, which only the whole has; scales" in told


@pytest.mark.parametrize("edited", [False, True])
def test_an_assignment_that_was_edited_by_hand_is_said_to_be(
    edited: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its row bears the method's name and budget."""
    monkeypatch.setenv("COLUMNS", "300")
    changed = {"assign": ("assignment.json",)} if edited else {}
    outcomes = [
        Outcome(
            stage=stage,
            skipped=True,
            seconds=0,
            record=SimpleNamespace(summary=ESTIMATED),
            edited=changed.get(stage, ()),
        )
        for stage in ("assign", "estimate")
    ]
    print_final([row("run", "optimal by matrix, 2.3 bits", exported=True)], {}, outcomes)
    assert f"* exported{f', edited {EDITED}' if edited else ''}. bits:" in capsys.readouterr().out


def test_names_of_any_length_are_parted_from_what_they_name() -> None:
    assert named_lines({"report": "a", "checkpoint for llama.cpp-refit": "b"}) == [
        "report                         a",
        "checkpoint for llama.cpp-refit b",
    ]
    assert named_lines({}) == []


def test_a_column_that_a_narrow_window_leaves_out_is_not_explained() -> None:
    rows = [row("a", "uniform 2-bit")]
    assert " +:" in final_table.caption(rows, ESTIMATED, 80)
    assert " +:" not in final_table.caption(rows, ESTIMATED, 60)
    assert "+" not in shown(rows, 60).splitlines()[0].split()
