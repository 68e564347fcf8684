"""Make the integer forward of a vision transformer: calibrate, lower, run, prove, write, replay."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from moeq.artifacts.stage import ModelStamp
from moeq.errors import InternalError, QuantizationError
from moeq.integers.artifacts.integer import Value
from moeq.integers.artifacts.integer_report import DroppedRow, IntegerFigures
from moeq.integers.forward import saved
from moeq.integers.forward.description import ViT, describe
from moeq.integers.forward.program import Program, pixel_codes
from moeq.integers.forward.reference import check_description
from moeq.integers.forward.replay import replay
from moeq.integers.forward.run import run
from moeq.integers.forward.schemes import (
    BATCH,
    code_batches,
    float_logits,
    program_of,
    quality,
    schemes,
    table,
    widths_of,
)
from moeq.integers.forward.simulate import simulate
from moeq.recipe import IntegerSection

FORWARDS = 3  # of the same images whose values are compared: in whole numbers, simulated, and with real factors


def make(
    model: nn.Module,
    calibration: Tensor,
    images: Tensor,
    labels: Tensor,
    section: IntegerSection,
    folder: Path,
    *,
    task: int = 0,
    norm_scales: dict[str, float] | None = None,
    original: nn.Module | None = None,
    stamp: ModelStamp | None = None,
) -> IntegerFigures:
    """Write the integer forward of a model to a folder and say how it does.

    calibration, images: what the model is given, [B, C, H, W], of the first only section.calibration; labels: of the
    images, whole numbers [B]. norm_scales: s~ of the norms that were folded already, by module path; None: the model is
    not folded, which is then done here. original: the model before its fold, for the schemes; the model itself where it
    is None. task: whose router and head, of models with several. Raises QuantizationError for images and widths that
    cannot be, ModelError for other models.
    """
    _check_images(calibration, images, labels)
    calibration = calibration[: section.calibration]
    vit = describe(model, task)
    if not 0 <= int(labels.min()) <= int(labels.max()) < len(vit.head.weight):
        known = f"the head of task {task} knows 0 to {len(vit.head.weight) - 1}"
        raise QuantizationError(f"labels are {int(labels.min())} to {int(labels.max())}, {known}", where="integer")
    with torch.no_grad():
        error = check_description(vit, calibration, _logits(model, calibration, task))
        scales = None if norm_scales is None else _by_name(vit, norm_scales)
        program, reference = program_of(vit, calibration, section, scales), float_logits(vit, images)
        figures = _evaluate(program, images, reference, labels)
        values = run(program, pixel_codes(program, images[: section.vectors]))
        saved.write(folder, program, values, section.model_dump() | {"task": task}, stamp)
        checked = replay(folder)
        rows = None
        if section.schemes:
            before = vit if original is None else describe(original, task)
            rows = tuple(schemes(before, calibration, images, labels, section))
    return IntegerFigures(
        widths=widths_of(section),
        softmax=section.softmax,
        denominator=section.denominator,
        calibration_images=len(calibration),
        images=len(images),
        description_error=error,
        **figures,
        vectors=checked["images"],
        replay=checked["check"],
        schemes=rows,
        dropped=program.dropped,
    )


def _logits(model: Any, images: Tensor, task: int) -> Tensor:
    """The model's own logits in float32."""
    if any(parameter.dtype != torch.float32 for parameter in model.parameters()):
        model = copy.deepcopy(model).float()
    of_task = {"task": task} if getattr(model.config, "num_tasks", 1) > 1 else {}
    logits: Tensor = model(images.float(), **of_task).logits
    return logits


def _check_images(calibration: Tensor, images: Tensor, labels: Tensor) -> None:
    for what, tensor in (("calibration", calibration), ("evaluation", images)):
        if tensor.dim() != 4 or not len(tensor):
            raise QuantizationError(f"{what} images are {list(tensor.shape)}", where="integer", do="give images")
        if not all(bool(torch.isfinite(part).all()) for part in tensor.split(BATCH)):
            raise QuantizationError(
                f"a pixel of the {what} images is not finite", where="integer", do="leave such images out"
            )
    if len(labels) != len(images):
        raise QuantizationError(
            f"{len(labels)} labels of {len(images)} images", where="integer", do="give every image one label"
        )


def _by_name(vit: ViT, scales: dict[str, float]) -> dict[str, float]:
    """Scales of norms, given by module path, by the norms' names in a program."""
    names = {block.norm1.path: f"blocks.{number}.norm1" for number, block in enumerate(vit.blocks)}
    names |= {block.norm2.path: f"blocks.{number}.norm2" for number, block in enumerate(vit.blocks)}
    names[vit.norm.path] = "norm"
    unknown = sorted(set(scales) - set(names))
    if unknown:
        raise QuantizationError(f"{unknown[0]} is no norm of this model", where="integer", do="fold it again")
    return {names[path]: scale for path, scale in scales.items()}


def _evaluate(program: Program, images: Tensor, reference: Tensor, labels: Tensor) -> dict[str, Any]:
    """Integer logits on all images, proven equal to the simulation, and the distance to real-valued factors."""
    scale = program.values[program.logits].known_scale
    whole, real = [], []
    differing = dict.fromkeys(_code_values(program), 0)
    counts, saturated, overflows = dict.fromkeys(differing, 0), 0, 0
    for codes in code_batches(program, images, FORWARDS):
        made, simulated = run(program, codes), simulate(program, codes)
        wrong = next((name for name, value in made.items() if not torch.equal(value.double(), simulated[name])), None)
        if wrong is not None:
            raise InternalError(f"{wrong}: the integer forward differs from its simulation")
        freely = simulate(program, codes, exact=False)
        for name in differing:
            differing[name] += int((made[name] != freely[name]).sum())
            counts[name] += made[name].numel()
            saturated += _at_end(made[name], program.values[name])
        overflows += sum(_at_end(made[name], program.values[name]) for name in _wide_values(program))
        whole.append(made[program.logits].double() * scale)
        real.append(freely[program.logits] * scale)
    logits, free = torch.cat(whole), torch.cat(real)
    return {
        "integer": quality(logits, reference, labels),
        "folded": quality(reference, reference, labels),
        "real_factors": quality(free, reference, labels),
        "equal_to_simulation": True,
        "differing_code_share": sum(differing.values()) / sum(counts.values()),
        "differing_code_share_first": differing["blocks.0.norm1"] / counts["blocks.0.norm1"],
        "logit_error_of_factors": float((logits - free).norm() / free.norm()),
        "saturated_code_share": saturated / sum(counts.values()),
        "saturated_residuals": overflows,
    }


def _code_values(program: Program) -> list[str]:
    """Values that are codes of the activations' own widths: what every operation gives on, sums and rows apart."""
    return [
        operation.outputs["out"]
        for operation in program.operations
        if operation.kind in {"linear", "layer_norm", "log_attention", "uniform_attention", "table"}
        and program.values[operation.outputs["out"]].bits <= 10
    ]


def _wide_values(program: Program) -> list[str]:
    """Values with headroom over calibration: the residual stream, what is added to it, and logits of routers and head.

    One at the end of its register was clipped there.
    """
    roles = {"tokens": "out", "add": "out", "linear": "out", "router": "logits", "experts": "outputs"}
    names = [step.outputs[roles[step.kind]] for step in program.operations if step.kind in roles]
    return [name for name in names if program.values[name].bits > 10]


def _at_end(codes: Tensor, held: Value) -> int:
    """How many codes are the least or the largest that their register holds."""
    low, high = held.ends
    return int(((codes == low) | (codes == high)).sum())


def _dropped(rows: Sequence[DroppedRow]) -> list[str]:
    """From which codes on blocks count 0, and how far attention is off with that and in the printed form."""
    codes = Counter("none" if row.dropped_from is None else f"from {row.dropped_from}" for row in rows)
    counted = ", ".join(f"{code} ({blocks})" for code, blocks in sorted(codes.items()))
    mine, printed = (median(errors) for errors in zip(*((row.error, row.printed_error) for row in rows), strict=True))
    return [
        f"  codes that count as 0 (in how many blocks): {counted};",
        f"  attention is off by {mine:.3f}, as printed by {printed:.3f} (medians of blocks)",
    ]


def lines(figures: IntegerFigures) -> list[str]:
    """What `make` found, as lines of at most 70 columns."""
    whole, real = figures.integer, figures.folded
    said = [
        f"integer forward {figures.widths}, {figures.softmax} softmax, on {figures.images:,} images:",
        f"  accuracy {whole.accuracy:.2%}, cross-entropy {whole.cross_entropy:.4f} "
        f"(float {real.accuracy:.2%}, {real.cross_entropy:.4f}),",
        f"  logit error {whole.logit_error:.4f}; equal to its simulation in every value",
        f"  against real-valued factors {figures.differing_code_share:.2%} of codes differ, "
        f"{figures.differing_code_share_first:.2%} behind",
        f"  the first norm (the rest is rounding carried on), logits by {figures.logit_error_of_factors:.4f}",
        f"  {figures.saturated_code_share:.2%} of codes at the ends of their range; "
        f"vectors of {figures.vectors} images",
    ]
    if figures.dropped:
        said += _dropped(figures.dropped)
    if clipped := figures.saturated_residuals:
        said.append(f"  {clipped:,} numbers of residual stream or logits were clipped to their range")
    return said if figures.schemes is None else [*said, *table(figures.schemes).splitlines()]
