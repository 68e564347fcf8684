"""Assigners on a small profile and loss table: placement, weighting, the paper's ablation."""

from pathlib import Path

import numpy as np
import pytest

from moeq.artifacts.assignment import Assignment, read_assignment, write_assignment
from moeq.artifacts.losses import LossTable, read_losses, write_losses
from moeq.artifacts.profile import ExpertProfile
from moeq.assigners import assign
from moeq.assigners.inputs import AssignInputs
from moeq.errors import ArtifactError, AssignmentError
from moeq.recipe import AssignSection

EXPERTS = 6
COUNTS = np.array([10, 60, 30, 0, 5, 95])
SCORES = np.array([9.0, 20.0, 12.0, 0.0, 1.0, 58.0])


def profile() -> ExpertProfile:
    half = np.stack([COUNTS, COUNTS[::-1]])[None].astype(np.int64)
    scores = np.stack([SCORES, SCORES[::-1]])[None]
    return ExpertProfile(
        layers=("layer.a", "layer.b"),
        top_k=(2, 2),
        counts=(half, half),
        scores=(scores, scores),
        tokens=np.array([[100, 100]]),
    )


def loss_table(folder: Path, losses: np.ndarray) -> LossTable:
    """losses: [experts, 4]."""
    rows = [
        {
            "layer": layer, "layer_name": f"layer.{layer}", "expert": expert, "projection": "expert", "method": "gptq",
            "bits": bits, "group_size": 64, "symmetric": False, "loss": float(losses[expert, bits - 1]),
            "relative_loss": 0.1, "calibration_tokens": 10, "heldout_tokens": 5, "fallback": "none",
            "measured_on": "heldout", "bytes": 100 * bits, "weighted_loss": 0.1 * float(losses[expert, bits - 1]),
            "hessian_trace": 3.0,
        }
        for layer in range(2) for expert in range(EXPERTS) for bits in (1, 2, 3, 4)
    ]  # fmt: skip
    write_losses(folder / "losses.parquet", [rows])
    return read_losses(folder / "losses.parquet")


def run(folder: Path, losses: np.ndarray | None = None, **options: object) -> Assignment:
    table = loss_table(folder, np.tile([1.0, 0.3, 0.1, 0.02], (EXPERTS, 1)) if losses is None else losses)
    config = AssignSection(**{"statistics": "prefill"} | options)
    return assign(
        AssignInputs(
            name="x",
            config=config,
            profile=profile(),
            losses=table,
            group_size=64,
            symmetric=False,
            bytes=({bits: 100 * bits for bits in (1, 2, 3, 4, 16)},) * 2,
            weights=(800,) * 2,
            traces=lambda: [np.arange(EXPERTS, dtype=float)] * 2,
        )
    )


def test_importance_orders_the_bits(tmp_path: Path) -> None:
    assignment = run(tmp_path, method="prefix-split", code_bits="5/2")
    order = np.argsort(-(COUNTS / COUNTS.sum() + SCORES / SCORES.sum()), kind="stable")
    bits = assignment.bits()[0][order]
    assert (np.diff(bits) <= 0).all()
    assert bits.sum() == 15


def test_alpha_decides_between_counts_and_scores(tmp_path: Path) -> None:
    by_counts = run(tmp_path, method="uniform", bits=2, gpu_experts=3, alpha=1.0)
    assert by_counts.hot()[0].tolist() == [False, True, True, False, False, True]
    importance = [choice.importance for choice in by_counts.layers[0].experts]
    assert importance == pytest.approx((COUNTS / COUNTS.sum()).tolist())


def test_mass_weighting_gives_bits_to_what_the_router_uses(tmp_path: Path) -> None:
    """As printed, an expert that is never chosen earns bits as the others do; weighted, it does not."""
    losses = np.tile([1.0, 0.3, 0.1, 0.02], (EXPERTS, 1))
    losses[5] = [0.9, 0.8, 0.7, 0.6]  # most used; as printed its gains are small
    printed = run(tmp_path, losses, method="prefix-split", code_bits=2, loss_weighting="none")
    weighted = run(tmp_path, losses, method="prefix-split", code_bits=2, loss_weighting="mass")
    assert weighted.bits()[0][5] > printed.bits()[0][5]


def test_selector_off_is_the_papers_ablation(tmp_path: Path) -> None:
    assignment = run(tmp_path, method="prefix-split", code_bits=3, gpu_experts=2, selector=False)
    assert sorted(assignment.bits()[0].tolist()) == [3, 3, 3, 3, 16, 16]


def test_statistics_pick_the_phase(tmp_path: Path) -> None:
    decode = run(tmp_path, method="uniform", bits=2, gpu_experts=1, statistics="decode")
    assert decode.hot()[0].tolist() == [True, False, False, False, False, False]


def test_too_many_gpu_experts(tmp_path: Path) -> None:
    with pytest.raises(AssignmentError, match=r"layer\.a: gpu_experts is 7, the layer has 6"):
        run(tmp_path, method="uniform", bits=2, gpu_experts=7)


def test_round_trip_and_hand_editing(tmp_path: Path) -> None:
    assignment = run(tmp_path, method="prefix-split", code_bits=2)
    path = tmp_path / "assignment.json"
    write_assignment(path, assignment)
    assert read_assignment(path) == assignment
    path.write_text(path.read_text().replace('"bits": 2', '"bits": 5', 1))
    with pytest.raises(ArtifactError, match=r"layers\.0\.experts\.\d\.bits"):
        read_assignment(path)
