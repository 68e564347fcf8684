"""losses: GPTQ replicas of every expert at every width, and what each costs; layer by layer, resumable."""

from __future__ import annotations

import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

from moeq.artifacts.files import digest_of, make_directory, read_json, write_json, write_text
from moeq.artifacts.losses import NAME, WHOLE, LossTable, read_losses, write_losses
from moeq.artifacts.replicas import LayerReplicas, layer_file, write_layer_replicas
from moeq.errors import CorpusError
from moeq.models.experts import expert_math, stacked_biases, stacked_weights
from moeq.models.walk import LayerInputs, walk
from moeq.quantizers.layer import heldout_stride, quantize_layer
from moeq.stages.context import Context

PARTS = ".parts"  # rows of finished layers, until the table is written
REPLICAS = "replicas"
REVISION = 1  # raised when the same inputs give other replicas or losses: also for parts that a killed run left


def run(context: Context) -> dict[str, Any]:
    """Write the replica store and losses.parquet; layers that an earlier, killed run finished are kept."""
    config = context.recipe.losses
    directory = context.directory("losses")
    sequences = context.grown_calibration
    stride = heldout_stride(config.heldout_fraction)
    if len(sequences) < stride:
        raise CorpusError(
            f"{len(sequences)} sequences leave none to measure on (one of {stride} is held out)",
            where="corpus.sequences",
            do=f"use at least {stride}",
        )
    parts = _open_parts(directory, context, sequences.digest())
    with_replicas = "gptq" in config.methods
    done = {layer.index for layer in context.layers if _is_done(directory, parts, layer.index, with_replicas)}
    if len(done) < len(context.layers):
        batches = sequences.batches(context.recipe.corpus.batch_size)
        with context.reporter.bar("losses", len(context.layers)) as advance:
            for inputs in walk(context.model, context.layers, batches, context.device, streamed=context.streamed):
                if inputs.layer.index not in done:
                    _finish_layer(context, inputs, directory, parts, with_replicas)
                advance()
                del inputs  # before the next layer's are gathered
    write_losses(directory / NAME, (read_json(parts / f"layer-{layer.index:03d}.json") for layer in context.layers))
    return summarize(read_losses(directory / NAME))


def _finish_layer(context: Context, inputs: LayerInputs, directory: Path, parts: Path, with_replicas: bool) -> None:
    """Quantize and measure one layer and write what came out; nothing of it stays in memory."""
    layer = inputs.layer
    result = quantize_layer(
        inputs,
        stacked_weights(context.model, layer, slice(None)),
        expert_math(context.model, layer),
        context.recipe.losses,
        stacked_biases(context.model, layer, slice(None)),
    )
    if with_replicas:
        write_layer_replicas(directory / REPLICAS, layer.index, result.replicas)
    write_json(parts / f"layer-{layer.index:03d}.json", result.rows)


def clean(context: Context) -> None:
    """Drop the parts once the stage's record is written."""
    shutil.rmtree(context.directory("losses") / PARTS, ignore_errors=True)


def _open_parts(directory: Path, context: Context, tokens: str) -> Path:
    """The folder of finished layers' rows; emptied, with the replicas, when it belongs to other inputs."""
    recipe = context.recipe.losses.model_dump(mode="json")
    key = digest_of([REVISION, context.stamp.digest, recipe, tokens, context.compute()])
    parts = directory / PARTS
    if not (parts / "key").is_file() or (parts / "key").read_text() != key:
        shutil.rmtree(parts, ignore_errors=True)
        shutil.rmtree(directory / REPLICAS, ignore_errors=True)
        make_directory(parts)
        write_text(parts / "key", key)
    return parts


def _is_done(directory: Path, parts: Path, layer: int, with_replicas: bool) -> bool:
    replicas = not with_replicas or layer_file(directory / REPLICAS, layer).is_file()
    return replicas and (parts / f"layer-{layer:03d}.json").is_file()


def summarize(table: LossTable) -> dict[str, Any]:
    """Mean relative loss by method and width, fallbacks and coverage."""
    whole = table.rows(WHOLE)
    relative = {
        method: {
            str(bits): float(
                np.mean([r["relative_loss"] for r in whole if r["method"] == method and r["bits"] == bits])
            )
            for bits in table.bits()
        }
        for method in table.methods()
    }
    method = "gptq" if "gptq" in table.methods() else table.methods()[0]
    once = [row for row in whole if row["bits"] == table.bits()[0] and row["method"] == method]
    fallbacks = Counter(name for row in once for name in row["fallback"].split("+") if name != "none")
    return {
        "experts": len(once),
        "mean_relative_loss": relative,
        "fallbacks": dict(sorted(fallbacks.items())),
        "measured_on_borrowed_tokens": sum(row["measured_on"] == "borrowed" for row in once),
        "fewest_calibration_tokens": min(row["calibration_tokens"] for row in once),
    }


def load(context: Context) -> LossTable:
    return read_losses(context.directory("losses") / NAME)


def store(context: Context, layer: int) -> LayerReplicas:
    """The replica store of one layer."""
    return LayerReplicas(context.directory("losses") / REPLICAS, layer)
