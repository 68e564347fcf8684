"""Synthetic artifacts of a run: nothing is read from disk, no model is needed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, replace

import numpy as np
import pyarrow as pa
import pytest

from moeq.artifacts.assignment import FULL, Assignment, ExpertChoice, LayerAssignment
from moeq.artifacts.evaluation import EvalReport, EvalRow
from moeq.artifacts.losses import SCHEMA, LossTable
from moeq.artifacts.manifest import PlacementManifest, Totals, layout
from moeq.artifacts.profile import ExpertProfile
from moeq.artifacts.sensitivities import SensitivityTable
from moeq.artifacts.stage import ModelStamp
from moeq.estimator import Estimate, Grid, Placement, estimate, load_geometry, load_hardware
from moeq.reporting.inputs import ReportInputs, SpeedInputs, TradeOff
from moeq_kernels.widths import Encoding

EXPERT_WEIGHTS = 3_000_000  # of the 4,000,000 of all
BASELINES = ("monde_bwrule", "monde_opt", "hobbit")


def profile_of(layers: int, experts: int) -> ExpertProfile:
    generator = np.random.default_rng(1)
    counts = generator.integers(0, 50, (layers, 6, 2, experts))
    counts[:, :, :, -1] = 0  # the last expert of each layer is never chosen
    return ExpertProfile(
        layers=tuple(f"model.layers.{index}.mlp" for index in range(layers)),
        top_k=(2,) * layers,
        counts=tuple(counts),
        scores=tuple(counts * 0.5),
        tokens=np.full((6, 2), 64),
    )


def losses_of(layers: int, experts: int, widths: tuple[int, ...]) -> LossTable:
    generator = np.random.default_rng(2)
    rows = [
        {
            "layer": layer,
            "layer_name": f"model.layers.{layer}.mlp",
            "expert": expert,
            "projection": "expert",
            "method": method,
            "bits": bits,
            "group_size": 64,
            "symmetric": False,
            "loss": 1.0,
            "relative_loss": float(generator.uniform(0.5, 1) * 4.0**-bits),
            "calibration_tokens": 10 * expert,
            "heldout_tokens": 5 * expert,
            "fallback": "none" if expert else "borrowed_hessian+raised_damping",
            "measured_on": "heldout" if expert else "borrowed",
            "bytes": 100 * bits,
        }
        for method in ("gptq", "rtn")
        for layer in range(layers)
        for expert in range(experts)
        for bits in widths
    ]
    return LossTable(pa.Table.from_pylist(rows, schema=SCHEMA))


def sensitivities_of(profile: ExpertProfile) -> SensitivityTable:
    """Made-up traces; of the last layer's last expert no calibration Hessian is known."""
    generator = np.random.default_rng(5)
    shares = profile.activation()
    experts = [len(row) for row in shares]
    count = sum(experts)
    columns = {
        "layer": np.repeat(np.arange(len(experts)), experts),
        "expert": np.concatenate([np.arange(n) for n in experts]),
        "activations": np.concatenate([profile.total(layer)[0] for layer in range(len(experts))]),
        "activation_frequency": np.concatenate(shares),
        "routing_mass": np.concatenate(shares),
        "frobenius_hessian_trace": generator.uniform(9_000, 12_000, count),
        "hybrid_importance": generator.random(count),
        "calibration_hessian_trace": [*generator.lognormal(5, 1, count - 1), None],
    }
    return SensitivityTable(pa.table(columns))


def assignment_of(name: str, layers: int, experts: int, gpu: int = 1) -> Assignment:
    generator = np.random.default_rng(3)
    choices = [
        [
            ExpertChoice(tier="gpu", bits=FULL, importance=1.0)
            if expert < gpu
            else ExpertChoice(tier="ndp", bits=int(generator.integers(1, 5)), importance=0.5)
            for expert in range(experts)
        ]
        for _ in range(layers)
    ]
    return Assignment(
        name=name,
        method="prefix-split",
        parameters={"quantizer": "gptq"},
        group_size=64,
        layers=tuple(LayerAssignment(name=f"layer {i}", experts=tuple(row)) for i, row in enumerate(choices)),
    )


def row_of(name: str, size: int, perplexity: float, assignment: Assignment | None, exported: bool = False) -> EvalRow:
    codes = None if assignment is None else assignment.code_bits()
    return EvalRow(
        name=name,
        exported=exported,
        assignment=assignment,
        expert_bytes=size,
        other_bytes=2_000_000,
        bits_per_weight=8 * size / EXPERT_WEIGHTS,
        code_bits=None if codes is None else float(codes),
        perplexity=perplexity,
        perplexity_by_domain={"math": 0.8 * perplexity, "prose": 1.2 * perplexity},
        accuracy=0.6,
        tasks={"arc": {"acc": 0.7}, "piqa": {"acc": 0.5, "acc_norm": 0.4}},
    )


@pytest.fixture(scope="session")
def estimated() -> Callable[[str], Estimate]:
    """An estimate of a small placement on the sizes of Mixtral, by name of the assignment."""
    bits = np.random.default_rng(4).integers(1, 5, (4, 8))
    found = estimate(
        load_geometry("mixtral-8x7b"),
        load_hardware("paper-ctxmoe"),
        Placement(name="placed", bits=bits, hot=np.zeros((4, 8), bool)),
        grid=Grid(inputs=(128, 512), outputs=(64,), batches=(1, 4)),
    )
    return lambda name: found.model_copy(update={"placement": name})


@pytest.fixture(scope="session")
def make(estimated: Callable[[str], Estimate]) -> Callable[..., ReportInputs]:
    """Inputs of a report for a number of layers and experts."""

    def inputs(
        layers: int = 3, experts: int = 5, name: str = "mixed", gpu: int = 1, widths: tuple[int, ...] = (1, 2, 3, 4)
    ) -> ReportInputs:
        own, other = assignment_of(name, layers, experts, gpu), assignment_of("uniform-4", layers, experts, 0)
        rows = (
            row_of("original", 6_000_000, 30.0, None),
            row_of(name, 900_000, 32.0, own, exported=True),
            row_of("uniform-4", 1_700_000, 33.0, other),
        )
        stamp = ModelStamp(name=f"org/{name}", revision=None, digest="d" * 64)
        totals = Totals(
            placed_expert_bytes=900_000, other_replica_bytes=0, non_expert_bytes=1, guard_bytes=0, bytes_by_tier={}
        )
        profile = profile_of(layers, experts)
        return ReportInputs(
            profile=profile,
            coverage=profile.coverage(16, 4),
            sensitivities=sensitivities_of(profile),
            weights=4_000_000,
            losses=losses_of(layers, experts, widths),
            assignment=own,
            evaluation=EvalReport(rows=rows, tokens=1234, export_logit_error=1e-7),
            manifest=PlacementManifest(
                model=stamp,
                assignment={"name": name, "method": "prefix-split"},
                layout=layout(Encoding(group_size=64, symmetric=False)),
                layers=(),
                totals=totals,
                inputs={},
                moeq_version="9.9",
            ),
            speed=speed_of([estimated(name), estimated("uniform-4")]),
            recipe_text=f"name: {name}\n",
            digests={"profile": "a" * 64, "losses": "b" * 64},
        )

    return inputs


def speed_of(estimates: list[Estimate]) -> SpeedInputs:
    return SpeedInputs(
        geometry=asdict(load_geometry("mixtral-8x7b")),
        geometry_is_the_models=False,
        hardware="paper-ctxmoe",
        popularity="uniform",
        estimates=tuple(estimates),
        decode_speedups={
            one.placement: {key: one.speedups_over(key, batch=1)[0].decode for key in BASELINES} for one in estimates
        },
    )


@pytest.fixture(scope="session")
def traded() -> list[TradeOff]:
    """Four assignments under two policies, the second the run's own."""
    return [
        TradeOff(
            bits_per_weight=bits, expert_bytes=int(1e6 * bits), objective=4.0**-bits, tokens_per_second=90 / bits,
            hardware="h100-ndp-cxl", policy="static_mixed" if bits < 4 else "context_aware",
            command=None if bits == 2.5 else f"moeq assign RUN --bits {bits:g}",
        )
        for bits in (2.0, 2.5, 3.0, 4.0)
    ]  # fmt: skip


@pytest.fixture
def with_rows() -> Callable[..., ReportInputs]:
    """The inputs with other evaluation rows."""
    return lambda inputs, rows: replace(inputs, evaluation=inputs.evaluation.model_copy(update={"rows": tuple(rows)}))
