"""The schemes of paper 004's Table 1 on one model, through simulated quantization."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from moeq.integers.artifacts.integer_report import QualityRow, SchemeRow
from moeq.integers.forward.description import ViT
from moeq.integers.forward.lower import lower
from moeq.integers.forward.measure import quality
from moeq.integers.forward.program import Program, pixel_codes
from moeq.integers.forward.ranges import measured
from moeq.integers.forward.reference import folded, forward
from moeq.integers.forward.settings import Settings
from moeq.integers.forward.simulate import simulate
from moeq.recipe import Softmax

BATCH = 64


@dataclass(frozen=True, kw_only=True)
class Scheme:
    """A row: its name, W/A/Attn, the quantizer of the softmax, whether the norms are folded per channel."""

    name: str
    weights: int
    activations: int
    attention: int
    softmax: Softmax
    fold: bool


def _scheme(name: str, widths: tuple[int, int, int], softmax: Softmax, fold: bool = True) -> Scheme:
    weights, activations, attention = widths
    return Scheme(name=name, weights=weights, activations=activations, attention=attention, softmax=softmax, fold=fold)


SCHEMES = (
    _scheme("min-max, no fold", (8, 8, 8), "uniform", fold=False),
    _scheme("fold, uniform softmax", (8, 8, 8), "uniform"),
    _scheme("fold, uniform softmax", (8, 8, 4), "uniform"),
    _scheme("fold, log2 softmax", (8, 8, 4), "log2"),
    _scheme("fold, log-sqrt2 softmax", (8, 8, 4), "log-sqrt2"),
    _scheme("fold, log-sqrt2 softmax", (8, 8, 8), "log-sqrt2"),
    _scheme("fold, log-sqrt2 softmax", (6, 6, 4), "log-sqrt2"),
    _scheme("fold, log-sqrt2 softmax", (4, 8, 4), "log-sqrt2"),
)


def program_of(vit: ViT, calibration: Tensor, settings: Settings, fold: bool) -> Program:
    """Fold, measure and lower a float description; calibration: images [B, C, H, W]."""
    percentile = settings.percentile if settings.range == "percentile" else None
    scales: dict[str, float] = {}
    if fold:
        vit, scales = folded(vit, calibration, settings.activations, percentile)
    return lower(vit, measured(vit, calibration, percentile), settings, scales)


def float_logits(vit: ViT, images: Tensor) -> Tensor:
    """Logits [B, L] of the description in float64."""
    return torch.cat([forward(vit, part, lambda _name, _values: None) for part in images.split(BATCH)])


def simulated_logits(program: Program, images: Tensor) -> Tensor:
    """Logits [B, L] of simulated quantization, real numbers."""
    scale = program.values[program.logits].scale
    assert scale is not None
    codes = pixel_codes(program, images)
    return torch.cat([simulate(program, part)[program.logits] for part in codes.split(BATCH)]) * scale


def schemes(vit: ViT, calibration: Tensor, images: Tensor, labels: Tensor, settings: Settings) -> list[SchemeRow]:
    """Every scheme on images [B, C, H, W], the float model first; settings: range and denominator of them all.

    vit: not folded yet, so that the scheme without the fold is what it says.
    """
    reference = float_logits(vit, images)
    rows = [_row("float", "64/64/64", quality(reference, reference, labels))]
    for scheme in SCHEMES:
        mine = replace(
            settings,
            weights=scheme.weights,
            activations=scheme.activations,
            attention=scheme.attention,
            softmax=scheme.softmax,
        )
        logits = simulated_logits(program_of(vit, calibration, mine, scheme.fold), images)
        rows.append(_row(scheme.name, mine.widths, quality(logits, reference, labels)))
    return rows


def _row(name: str, widths: str, found: QualityRow) -> SchemeRow:
    return SchemeRow(name=name, widths=widths, **found.model_dump())


def table(rows: Sequence[SchemeRow]) -> str:
    """The schemes as text, at most 70 columns."""
    lines = [f"{'scheme':<24}{'W/A/Attn':>9}{'accuracy':>10}{'cross-ent.':>12}{'logit error':>13}"]
    lines += [
        f"{row.name:<24}{row.widths:>9}{row.accuracy:>10.4f}{row.cross_entropy:>12.4f}{row.logit_error:>13.4f}"
        for row in rows
    ]
    return "\n".join(lines)
