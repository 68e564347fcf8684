"""Make the integer forward of a vision transformer: calibrate, lower, run, prove, write, replay."""

from __future__ import annotations

import copy
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from moeq.artifacts.stage import ModelStamp
from moeq.errors import InternalError, QuantizationError
from moeq.integers.artifacts.integer import Value
from moeq.integers.artifacts.integer_report import IntegerFigures
from moeq.integers.forward import saved as files
from moeq.integers.forward.description import ViT, describe
from moeq.integers.forward.lower import lower
from moeq.integers.forward.measure import quality
from moeq.integers.forward.program import Program, pixel_codes
from moeq.integers.forward.ranges import measured
from moeq.integers.forward.reference import check_description, folded
from moeq.integers.forward.replay import replay
from moeq.integers.forward.run import run
from moeq.integers.forward.schemes import BATCH, float_logits, schemes, table
from moeq.integers.forward.settings import Settings
from moeq.integers.forward.simulate import simulate


def make(
    model: nn.Module,
    calibration: Tensor,
    images: Tensor,
    labels: Tensor,
    settings: Settings,
    folder: Path,
    *,
    norm_scales: dict[str, float] | None = None,
    original: nn.Module | None = None,
    stamp: ModelStamp | None = None,
) -> IntegerFigures:
    """Write the integer forward of a model to a folder and say how it does.

    calibration, images: what the model is given, [B, C, H, W], of the first only settings.calibration; labels: of the
    images, whole numbers [B]. norm_scales: s~ of the norms that were folded already, by module path; None: the model is
    not folded, which is then done here. original: the model before its fold, for the schemes; the model itself where it
    is None. Raises QuantizationError for images and widths that cannot be, ModelError for other models.
    """
    _check_images(calibration, images, labels)
    calibration = calibration[: settings.calibration]
    vit = describe(model, settings.task)
    if not 0 <= int(labels.min()) <= int(labels.max()) < len(vit.head.weight):
        known = f"the head of task {settings.task} knows 0 to {len(vit.head.weight) - 1}"
        raise QuantizationError(f"labels are {int(labels.min())} to {int(labels.max())}, {known}", where="integer")
    with torch.no_grad():
        error = check_description(vit, calibration, _logits(model, calibration, settings))
        program, reference = _program(vit, calibration, settings, norm_scales), float_logits(vit, images)
        found = _evaluate(program, images, reference, labels)
        values = run(program, pixel_codes(program, images[: settings.vectors]))
        files.write(folder, program, values, asdict(settings), stamp)
        checked = replay(folder)
        rows = None
        if settings.schemes:
            before = vit if original is None else describe(original, settings.task)
            rows = tuple(schemes(before, calibration, images, labels, settings))
    return IntegerFigures(
        widths=settings.widths,
        softmax=settings.softmax,
        denominator=settings.denominator,
        calibration_images=len(calibration),
        images=len(images),
        description_error=error,
        **found,
        vectors=checked["images"],
        replay=checked["check"],
        schemes=rows,
    )


def _logits(model: Any, images: Tensor, settings: Settings) -> Tensor:
    """The model's own logits in float32."""
    if any(parameter.dtype != torch.float32 for parameter in model.parameters()):
        model = copy.deepcopy(model).float()
    task = {"task": settings.task} if getattr(model.config, "num_tasks", 1) > 1 else {}
    found: Tensor = model(images.float(), **task).logits
    return found


def _check_images(calibration: Tensor, images: Tensor, labels: Tensor) -> None:
    for what, tensor in (("calibration", calibration), ("evaluation", images)):
        if tensor.dim() != 4 or not len(tensor):
            raise QuantizationError(f"{what} images are {list(tensor.shape)}", where="integer", do="give images")
        if not bool(torch.isfinite(tensor).all()):
            raise QuantizationError(f"a pixel of the {what} images is not finite", where="integer", do="check them")
    if len(labels) != len(images):
        raise QuantizationError(f"{len(labels)} labels of {len(images)} images", where="integer", do="check them")


def _program(vit: ViT, calibration: Tensor, settings: Settings, norm_scales: dict[str, float] | None) -> Program:
    percentile = settings.percentile if settings.range == "percentile" else None
    if norm_scales is None:
        vit, scales = folded(vit, calibration, settings.activations, percentile)
    else:
        paths = {norm.path: name for name, norm in _norms(vit).items()}
        unknown = sorted(set(norm_scales) - set(paths))
        if unknown:
            raise QuantizationError(f"{unknown[0]} is no norm of this model", where="integer", do="fold it again")
        scales = {paths[path]: scale for path, scale in norm_scales.items()}
    return lower(vit, measured(vit, calibration, percentile), settings, scales)


def _norms(vit: ViT) -> dict[str, Any]:
    sides = {f"blocks.{i}.{side}": getattr(block, side) for i, block in enumerate(vit.blocks) for side in
             ("norm1", "norm2")}  # fmt: skip
    return sides | {"norm": vit.norm}


def _evaluate(program: Program, images: Tensor, reference: Tensor, labels: Tensor) -> dict[str, Any]:
    """Integer logits on all images, proven equal to the simulation, and the distance to real-valued factors."""
    scale = program.values[program.logits].scale
    assert scale is not None
    whole, real = [], []
    differing = dict.fromkeys(_code_values(program), 0)
    counts, saturated, overflows = dict.fromkeys(differing, 0), 0, 0
    for codes in pixel_codes(program, images).split(BATCH):
        found, wanted = run(program, codes), simulate(program, codes)
        wrong = next((name for name, values in found.items() if not torch.equal(values.double(), wanted[name])), None)
        if wrong is not None:
            raise InternalError(f"{wrong}: the integer forward differs from its simulation")
        freely = simulate(program, codes, exact=False)
        for name in differing:
            differing[name] += int((found[name] != freely[name]).sum())
            counts[name] += found[name].numel()
            saturated += _at_end(found[name], program.values[name])
        overflows += sum(_at_end(found[name], program.values[name]) for name in _wide_values(program))
        whole.append(found[program.logits].double() * scale)
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
    names = [one.outputs[roles[one.kind]] for one in program.operations if one.kind in roles]
    return [name for name in names if program.values[name].bits > 10]


def _at_end(codes: Tensor, held: Value) -> int:
    """How many codes are the least or the largest that their register holds."""
    top = 2 ** (held.bits - 1) - 1 if held.signed else 2**held.bits - 1
    bottom = -top - 1 if held.signed else 0
    return int(((codes == top) | (codes == bottom)).sum())


def lines(found: IntegerFigures) -> list[str]:
    """What `make` found, as lines of at most 70 columns."""
    whole, real = found.integer, found.folded
    said = [
        f"integer forward {found.widths}, {found.softmax} softmax, on {found.images:,} images:",
        f"  accuracy {whole.accuracy:.2%}, cross-entropy {whole.cross_entropy:.4f} "
        f"(float {real.accuracy:.2%}, {real.cross_entropy:.4f}),",
        f"  logit error {whole.logit_error:.4f}; equal to its simulation in every value",
        f"  against real-valued factors {found.differing_code_share:.2%} of codes differ, "
        f"{found.differing_code_share_first:.2%} behind",
        f"  the first norm (the rest is rounding carried on), logits by {found.logit_error_of_factors:.4f}",
        f"  {found.saturated_code_share:.2%} of codes at the ends of their range; vectors of {found.vectors} images",
    ]
    if found.saturated_residuals:
        said.append(f"  {found.saturated_residuals:,} numbers of residual stream or logits were clipped to their range")
    return said if found.schemes is None else [*said, *table(found.schemes).splitlines()]
