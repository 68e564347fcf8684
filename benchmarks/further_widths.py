"""What widths and scales that moeq does not have would gain, measured before anything is built.

    python benchmarks/further_widths.py [--models MODELS] [--names tiny-mixtral tiny-qwen3-moe]
        [--parts half scales ternary] [--budgets 2.0 2.3] [--out FOLDER]

MODELS as frontier.py has it, which says too what is calibrated and measured on; the preset balanced's replicas
(trellis codes of 256 states, layers by their effect), for `scales` and `ternary` frontier.py's GPTQ in groups of 128.

half: also 1.5, 2.5 and 3.5 bits, steps of k and of k + 1 bits by turns. How far such a trellis is from normal weights,
beside the geometric mean of its neighbours, is measured on walks that are closed as moeq's are, with its values for
either kind of step; a matrix's loss at a half step is that share of its neighbours' geometric mean. What is shown is
the optimum's objective, nothing is quantized.
scales: those of grids on steps of 1/16 of an octave (6 bits are four octaves) instead of float16, taken before the
columns are rounded; the stored bits are counted as if they were so stored.
ternary: a width of three values, -s, 0 and s, five of them in a byte, beside the grids of 1, 2, 3, 4 and 8 bits: GPTQ's
losses with the codes that a symmetric narrow grid of 2 bits has. Shown is the optimum's objective.
"""

from __future__ import annotations

import argparse
import math
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import moeq  # noqa: F401  sets OMP_WAIT_POLICY before torch is imported

import figures  # isort: skip
import frontier  # isort: skip
import numpy as np  # isort: skip
import presets  # isort: skip
import torch  # isort: skip
from torch import Tensor  # isort: skip

from moeq.assigners import sensitivity
from moeq.numerics import gptq_cpu, group_grids, knapsack
from moeq.recipe import AssignSection
from moeq.stages import assign
from moeq.stages.context import Context
from moeq.stages.expert_bytes import expert_weights
from moeq_kernels.grids import inverse_scale
from moeq_kernels.trellis import values

TRELLIS, STATE_BITS = "trellis, 256 states", 8
PARTS = ("half", "scales", "ternary")
TRIT = 8 / 5  # bits of a value of three, five of them in a byte
STEPS, SEAM, TILES = 256, 64, 300
OCTAVE, GROUP, SAVED = 16, 128, 10  # steps of an octave, weights of a group, bits that its scale has less


class Losses:
    """The objective [N, P, W] and the bytes [N, P, W] of all experts' matrices at every width."""

    def __init__(self, context: Context, section: AssignSection) -> None:
        inputs = assign.inputs_of(context, section, "bench")
        tables = sensitivity.matrix_tables(inputs)
        names, self.widths = list(tables[0]), [bits for bits in tables[0]["down_proj"] if bits < 16]
        objective, size = [], []
        for layer, table in enumerate(tables):
            own = inputs.matrix_bytes_of(layer)
            objective.append(np.stack([np.stack([table[p][k] for k in self.widths], 1) for p in names], 1))
            each = np.array([[own[p][k] for k in self.widths] for p in names])
            size.append(np.broadcast_to(each, objective[-1].shape))
        self.objective, self.size = np.concatenate(objective), np.concatenate(size)
        self.weights = expert_weights(context.model.layers)


def nearest(wanted: Tensor, steps: list[int], tables: dict[int, Tensor]) -> Tensor:
    """Values [T, 256] of the walks nearest to tiles [T, 256], of steps of so many bits; as trellis_device.py."""
    states, tiles = 1 << STATE_BITS, torch.arange(len(wanted))

    def forward(cost: Tensor, places: range) -> tuple[Tensor, list[Tensor]]:
        back = []
        for place in places:
            bits = steps[place % STEPS]
            least, way = cost.view(len(wanted), states >> bits, 1 << bits).min(2)
            cost = (wanted[:, place % STEPS, None] - tables[bits]).square().view(len(wanted), 1 << bits, -1)
            cost, _ = (cost + least.unsqueeze(1)).flatten(1), back.append(way)
        return cost, back

    def before(state: Tensor, places: range, back: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        """The state before the first place, and those at all places, the last first."""
        passed = []
        for place, way in zip(reversed(places), reversed(back), strict=True):
            passed.append(state)
            bits = steps[place % STEPS]
            high = state & ((states >> bits) - 1)
            state = high << bits | way[tiles, high]
        return state, passed

    cost, back = forward(torch.zeros(len(wanted), states), range(-SEAM, SEAM))
    around, _ = before(cost.argmin(1), range(SEAM), back[SEAM:])
    _, back = forward(torch.full((len(wanted), states), 1e30).scatter_(1, around.unsqueeze(1), 0.0), range(STEPS))
    _, passed = before(around, range(STEPS), back)
    return torch.stack([tables[steps[place]][state] for place, state in enumerate(reversed(passed))], 1)


def half_step(bits: int) -> float:
    """The error of bits + 1/2 on normal weights, of the geometric mean of those of bits and bits + 1."""
    wanted = torch.randn(TILES, STEPS, generator=torch.Generator().manual_seed(0))
    tables = {k: values(k, STATE_BITS) for k in (bits, bits + 1)}
    tables = {k: table / table.square().mean().sqrt() for k, table in tables.items()}

    def error(steps: list[int]) -> float:
        found = []
        for spread in (0.85, 0.9, 0.95, 1.0):
            near = nearest(wanted, steps, {k: spread * table for k, table in tables.items()})
            scale = (near * wanted).sum() / near.square().sum()
            found.append(float((wanted - scale * near).square().mean()))
        return min(found)

    lower, upper = (error([k] * STEPS) for k in (bits, bits + 1))
    return error([bits, bits + 1] * (STEPS // 2)) / math.sqrt(lower * upper)


def half(losses: Losses, shares: dict[int, float], results: figures.Figures, name: str) -> None:
    """A figure for every budget: the objective with half steps, of that without."""
    order = np.argsort(losses.widths)
    objective, size = (part[:, :, order].reshape(-1, len(order)) for part in (losses.objective, losses.size))
    places = [int(np.flatnonzero(np.sort(losses.widths) == bits)[0]) for bits in shares]
    between = [
        share * np.sqrt(objective[:, at] * objective[:, at + 1])
        for at, share in zip(places, shares.values(), strict=True)
    ]
    sizes = [(size[:, at] + size[:, at + 1]) // 2 for at in places]
    more = (np.column_stack([objective, *between]), np.column_stack([size, *sizes]))
    for budget in results.options.budgets:
        total = int(float(budget) * losses.weights / 8)
        found, best = (knapsack.solve(*tables, total).loss for tables in ((objective, size), more))
        results.add(f"{name}: objective with half steps at {budget} bits, of that without", best / found, digits=3)


def ternary(bench: presets.Settings, results: figures.Figures, name: str) -> None:
    """A figure for every budget: the objective with a width of three values, of that without; beside grids, and beside
    trellis codes."""
    narrow = {"bits": [2, 4], "symmetric": True, "symmetric_range": "narrow"}
    kinds = {
        "grids": ("gptq", frontier.GPTQ), "trellis codes": ("trellis", frontier.LOSSES[TRELLIS]),
        "three": ("gptq", frontier.GPTQ | narrow),
    }  # fmt: skip
    tables: dict[str, Losses] = {}
    for own, (quantizer, section) in kinds.items():
        bench.out = bench.out.with_name(own.replace(" ", "-"))
        context = bench.context(section | frontier.EFFECTS)
        presets.seconds(context, "profile", "losses")
        budget = results.options.budgets[0]
        tables[own] = Losses(context, AssignSection.of(**frontier.MIXED, bits_per_weight=budget, quantizer=quantizer))
    three = tables.pop("three")
    at = three.widths.index(2)
    numbers = np.array([
        [math.prod(layer.shape(p)) for p in layer.projections]
        for layer in context.model.layers for _ in range(layer.num_experts)
    ])  # fmt: skip
    objective, size = three.objective[..., [at]], three.size[..., [at]]
    size = size - np.round(numbers * (2 - TRIT) / 8).astype(np.int64)[..., None]
    for own, without in tables.items():
        more = (np.concatenate([without.objective, objective], 2), np.concatenate([without.size, size], 2))
        for budget in results.options.budgets:
            total = int(float(budget) * without.weights / 8)
            both = ((without.objective, without.size), more)
            found, best = (
                knapsack.solve(*(part.reshape(-1, part.shape[2]) for part in one), total).loss for one in both
            )
            what = f"{name}: objective of {own} with three values at {budget} bits, of that without"
            results.add(what, best / found, digits=3)


def scales(bench: presets.Settings, results: figures.Figures, name: str) -> None:
    """A row for every budget, with scales as they are and on coarser steps."""
    results.table([name, "  bits", "perplexity", "             KL", "  equal"])
    plain = group_grids.group_grid

    def coarse(*given: Any) -> tuple[Tensor, Tensor, Tensor]:
        scale, _, zero = plain(*given)
        stepped = torch.exp2((OCTAVE * scale.log2()).round() / OCTAVE).half().to(scale.dtype)
        return stepped, inverse_scale(stepped), zero

    for how, grid in (("float16", plain), ("6 bits", coarse)):
        gptq_cpu.group_grid = group_grids.group_grid = grid  # type: ignore[assignment,attr-defined]
        bench.out = bench.out.with_name(f"scales-{how.replace(' ', '-')}")
        context = bench.context(frontier.GPTQ | frontier.EFFECTS)
        presets.seconds(context, "profile", "losses")
        for budget in results.options.budgets:
            section = AssignSection.of(**frontier.MIXED, bits_per_weight=budget, quantizer="gptq")
            found = bench.measured(context, assign.make(context, section, "bench"))
            stored = found.bits if grid is plain else found.bits - SAVED / GROUP
            results.row(f"{budget} bits, scales of {how}", *replace(found, bits=stored).cells())
    gptq_cpu.group_grid = group_grids.group_grid = plain  # type: ignore[attr-defined]


def main() -> int:
    options = _options()
    if not (options.models / "train_tiny.py").is_file():
        return figures.skipped(options, f"no trained checkpoints with their train_tiny.py in {options.models}")
    results = figures.Figures(options)
    shares = {bits: half_step(bits) for bits in (1, 2, 3)} if "half" in options.parts else {}
    for bits, share in shares.items():
        results.add(f"error of {bits}.5 bits, of the geometric mean of its neighbours'", share, digits=3)
    with tempfile.TemporaryDirectory() as folder:
        for name in options.names:
            out = (options.out or Path(folder)) / name
            bench = presets.Settings(str(options.models / name), out / "trellis", options.models / "train_tiny.py")
            if "half" in options.parts:
                section = AssignSection.of(**frontier.MIXED, bits_per_weight=options.budgets[0], quantizer="trellis")
                context = bench.context(frontier.LOSSES[TRELLIS] | frontier.EFFECTS)
                presets.seconds(context, "profile", "losses")
                half(Losses(context, section), shares, results, name)
            if "scales" in options.parts:
                scales(bench, results, name)
            if "ternary" in options.parts:
                ternary(bench, results, name)
            results.keep()
    return results.report()


def _options() -> argparse.Namespace:
    parser = figures.parser(
        __doc__, models=figures.SHARED / "models", names=(["tiny-mixtral", "tiny-qwen3-moe"], ["tiny-mixtral"]),
        parts=(list(PARTS), ["half"]), budgets=(["2.0", "2.3"], ["2.3"]),
    )  # fmt: skip
    parser.add_argument("--out", type=Path, help="keep the runs here")
    options = figures.parsed(parser)
    if unknown := [part for part in options.parts if part not in PARTS]:
        parser.error(f"no part {unknown[0]!r}; there are {', '.join(PARTS)}")
    return options


if __name__ == "__main__":
    sys.exit(main())
