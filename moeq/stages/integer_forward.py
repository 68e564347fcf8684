"""The integer forward of a folded vision transformer: reparam.integer, part of the stage reparam."""

from __future__ import annotations

import math
import shutil
from pathlib import Path
from typing import Any

import torch
from rich.markup import escape
from torch import nn

from moeq.artifacts.run import FOLDED
from moeq.errors import RecipeError
from moeq.integers.artifacts.integer_report import (
    NAME,
    SCHEMA,
    IntegerFigures,
    IntegerReport,
    read_report,
    write_report,
)
from moeq.integers.forward.description import KNOWN, is_known
from moeq.integers.forward.from_model import FORWARDS, lines, make
from moeq.integers.forward.schemes import BATCH, HELD_BYTES
from moeq.models.corpus import ImageSequences
from moeq.models.forward import image_positions
from moeq.models.loading import load_model
from moeq.models.source import ModelSource, open_source
from moeq.recipe import IntegerSection
from moeq.stages.context import Context

FOLDER = "integer"
WHERE = "reparam.integer"


def check(context: Context) -> None:
    """RecipeError where the recipe wants the integer forward of a model that has none, before anything is written."""
    if context.recipe.reparam is None or context.recipe.reparam.integer is None:
        return
    if not is_known(context.model.skeleton):
        what = f"{type(context.model.skeleton).__name__} has no integer forward"
        raise RecipeError(what, where=WHERE, do=f"leave it out; known are {KNOWN}")


def inputs(context: Context) -> dict[str, Any]:
    """What is read beside the section and the calibration images: those that it is measured on."""
    return {
        "images": context.text.digest("evaluation"),
        "taken": context.text.test_images.model_dump(mode="json", exclude={"source"}),
    }


def remove(directory: Path) -> None:
    """Take away what an earlier run of the stage left."""
    shutil.rmtree(directory / FOLDER, ignore_errors=True)
    for name in (NAME, SCHEMA):
        (directory / name).unlink(missing_ok=True)


def write(context: Context, section: IntegerSection, scales: dict[str, float], directory: Path) -> dict[str, Any]:
    """Write integer/ (of a model with several tasks integer/task-0 and so on) and integer.json into the stage's folder.

    scales: s~ of the folded norms by module path. Returns what `make` found, by task, without the schemes.
    """
    calibration, images = context.text.calibration, context.text.evaluation
    if not isinstance(calibration, ImageSequences) or not isinstance(images, ImageSequences):
        raise RecipeError("no labelled images", where=WHERE, do="name some in corpus.source")
    folded = open_source(str(directory / FOLDED), trust_remote_code=context.recipe.trust_remote_code)
    model, original = _load(context, folded), _load(context, context.model.source)
    tasks = getattr(model.config, "num_tasks", 1)
    figures: dict[str, IntegerFigures] = {}
    for task in range(tasks):
        folder = directory / FOLDER if tasks == 1 else directory / FOLDER / f"task-{task}"
        figures[f"task-{task}"] = make(
            model,
            calibration.pixels,
            images.pixels,
            images.labels,
            section,
            folder,
            task=task,
            norm_scales=scales,
            original=original,
            stamp=context.model.stamp,
        )
        for line in lines(figures[f"task-{task}"]):
            context.reporter.say(f"  {escape(line)}")
        context.reporter.say(f"  {escape(str(context.finished('reparam') / folder.relative_to(directory)))}")
    write_report(directory, IntegerReport(tasks=figures))
    return {task: each.model_dump(mode="json", exclude={"schemes", "replay"}) for task, each in figures.items()}


def load(context: Context) -> IntegerReport | None:
    """What was measured; None where the recipe wants no integer forward."""
    section = context.recipe.reparam
    return None if section is None or section.integer is None else read_report(context.directory("reparam"))


def _load(context: Context, source: ModelSource) -> nn.Module:
    return load_model(source, torch.float32, torch.device("cpu"), context.recipe.trust_remote_code)


IN_MEMORY = 3  # times the bytes that values have in vectors: all are int64 or float64
PARAMETER = 40  # bytes of a weight: of both models in float32, of their descriptions in float64, of the program


def held(context: Context, images: int) -> dict[str, float]:
    """Bytes in memory while it is made: models, images to calibrate on and to be measured on, values of a batch.

    images: how many in all.
    """
    task, model = context.model.image_task, context.model.skeleton
    sets = {id(one): one for one in (*context.text.calibration_images, *context.text.evaluation_images)}
    files = sum(one.images.nbytes for one in sets.values())
    return {
        "models and their integer forms": PARAMETER * sum(weight.numel() for weight in model.parameters()),
        "images": files + 4 * math.prod(task.shape) * images,
        "values of images that run at once": min(HELD_BYTES, IN_MEMORY * FORWARDS * BATCH * _vector_bytes(context)),
    }


MANIFEST_BLOCK = 30 << 10  # bytes of a block's operations, constants and values in the manifest

# bytes that the test vectors have, with accumulators and codes: of a position and channel of the hidden size (both
# norms, query, key, value, attention, projection, sums of the stream), of a query, head and key, of a query and head,
# of a position and channel within a feed-forward part, of what an expert gives back, of a position and router's expert
STREAM, PAIR, HEAD, WITHIN, GIVEN, ROUTED = 58, 5, 12, 7, 8, 8


def foreseen_bytes(context: Context, section: IntegerSection) -> int:
    """Bytes of the integer forward's files: weights, test vectors, manifest of every task."""
    model = context.model.skeleton
    config: Any = model.config
    weights = sum(weight.numel() * (1 if weight.dim() > 1 else 4) for weight in model.parameters())
    stored = section.vectors * _vector_bytes(context) + weights + config.num_hidden_layers * MANIFEST_BLOCK
    return int(getattr(config, "num_tasks", 1) * stored)


def _vector_bytes(context: Context) -> int:
    """Bytes of the values of one image."""
    model, layers = context.model.described
    config: Any = model.config
    positions, hidden, depth = image_positions(model), config.hidden_size, config.num_hidden_layers
    vectors = depth * (STREAM * positions * hidden + config.num_attention_heads * positions * (PAIR * positions + HEAD))
    vectors += (depth - len(layers)) * WITHIN * positions * config.intermediate_size
    for layer in layers:
        within = WITHIN * config.moe_intermediate_size + GIVEN * hidden
        vectors += positions * (config.num_experts_per_tok * within + ROUTED * layer.num_experts)
    return int(vectors)
