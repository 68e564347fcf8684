"""The schemes of paper 004's Table 1 on one model, through simulated quantization."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from moeq.integers.artifacts.integer_report import QualityRow, SchemeRow
from moeq.integers.forward.description import ViT
from moeq.integers.forward.dropping import dropped_codes
from moeq.integers.forward.lower import lower
from moeq.integers.forward.program import Program, pixel_codes
from moeq.integers.forward.reference import folded, forward, measured
from moeq.integers.forward.run import run
from moeq.integers.forward.simulate import simulate
from moeq.recipe import Dropping, IntegerSection, Softmax

BATCH = 64
HELD_BYTES = 2 << 30  # of all values of a forward of as many images as run at once


SCHEMES: tuple[tuple[str, tuple[int, int, int], Softmax, Dropping, bool], ...] = (
    # name, W/A/Attn, the quantizer of the softmax, which codes count as 0, whether the norms are folded per channel
    ("min-max, no fold", (8, 8, 8), "uniform", "printed", False),
    ("fold, uniform softmax", (8, 8, 8), "uniform", "printed", True),
    ("fold, uniform softmax", (8, 8, 4), "uniform", "printed", True),
    ("fold, log2, as printed", (8, 8, 4), "log2", "printed", True),
    ("fold, log2 softmax", (8, 8, 4), "log2", "calibrated", True),
    ("fold, log-sqrt2, printed", (8, 8, 4), "log-sqrt2", "printed", True),
    ("fold, log-sqrt2 softmax", (8, 8, 4), "log-sqrt2", "calibrated", True),
    ("fold, log-sqrt2 softmax", (8, 8, 8), "log-sqrt2", "calibrated", True),
    ("fold, log-sqrt2 softmax", (6, 6, 4), "log-sqrt2", "calibrated", True),
    ("fold, log-sqrt2 softmax", (4, 8, 4), "log-sqrt2", "calibrated", True),
)


def program_of(
    vit: ViT, calibration: Tensor, section: IntegerSection, norm_scales: dict[str, float] | None = None
) -> Program:
    """Measure and lower a float description; calibration: images [B, C, H, W].

    norm_scales: s~ of the norms that are folded, by name ("blocks.0.norm1"); None: those of the blocks are folded here.
    """
    percentile = section.percentile if section.range == "percentile" else None
    if norm_scales is None:
        vit, norm_scales = folded(vit, calibration, section.activations, percentile)
    dropped = dropped_codes(vit, calibration, section)
    return lower(vit, measured(vit, calibration, percentile), section, norm_scales, dropped)


def float_logits(vit: ViT, images: Tensor) -> Tensor:
    """Logits [B, L] of the description in float64."""
    return torch.cat([forward(vit, part, lambda _name, _values: None) for part in images.split(BATCH)])


def simulated_logits(program: Program, images: Tensor) -> Tensor:
    """Logits [B, L] of simulated quantization, real numbers."""
    logits = torch.cat([simulate(program, codes)[program.logits] for codes in code_batches(program, images)])
    return logits * program.values[program.logits].known_scale


def code_batches(program: Program, images: Tensor, forwards: int = 1) -> Iterator[Tensor]:
    """Codes of the pixels of images [B, C, H, W], of as many at once as `forwards` can run in HELD_BYTES."""
    one = sum(value.nbytes for value in run(program, pixel_codes(program, images[:1])).values())
    for part in images.split(max(1, min(BATCH, HELD_BYTES // (forwards * one)))):
        yield pixel_codes(program, part)


def widths_of(section: IntegerSection) -> str:
    """W/A/Attn as the paper writes them."""
    return f"{section.weights}/{section.activations}/{section.attention}"


def quality(logits: Tensor, reference: Tensor, labels: Tensor) -> QualityRow:
    """How well a quantized classifier does: its logits and the float model's, [B, L]; labels: whole numbers [B]."""
    return QualityRow(
        accuracy=float((logits.argmax(-1) == labels).double().mean()),
        cross_entropy=float(cross_entropy(logits.double(), labels)),
        logit_error=float((logits - reference).norm() / reference.norm()),
    )


def schemes(vit: ViT, calibration: Tensor, images: Tensor, labels: Tensor, section: IntegerSection) -> list[SchemeRow]:
    """Every scheme on images [B, C, H, W], the float model first; section: range and denominator of them all.

    vit: not folded yet, so that the scheme without the fold is what it says.
    """
    reference = float_logits(vit, images)
    rows = [SchemeRow(name="float", widths="64/64/64", **quality(reference, reference, labels).model_dump())]
    for name, (weights, activations, attention), softmax, dropping, fold in SCHEMES:
        widths = {"weights": weights, "activations": activations, "attention": attention}
        scheme = section.model_copy(update={**widths, "softmax": softmax, "dropping": dropping})
        logits = simulated_logits(program_of(vit, calibration, scheme, None if fold else {}), images)
        rows.append(SchemeRow(name=name, widths=widths_of(scheme), **quality(logits, reference, labels).model_dump()))
    return rows


def table(rows: Sequence[SchemeRow]) -> str:
    """The schemes as text, at most 70 columns."""
    lines = [f"{'scheme':<24}{'W/A/Attn':>9}{'accuracy':>10}{'cross-ent.':>12}{'logit error':>13}"]
    lines += [
        f"{row.name:<24}{row.widths:>9}{row.accuracy:>10.4f}{row.cross_entropy:>12.4f}{row.logit_error:>13.4f}"
        for row in rows
    ]
    return "\n".join(lines)
