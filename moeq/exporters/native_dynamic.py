"""A checkpoint with replicas of several widths as a model whose experts' precision follows its workload.

What it begins with is what placement.json says: experts of tier gpu, then those of more bits, then the more important.

Letters: L MoE layers, E experts of a layer.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from numbers import Integral
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from moeq.analysis.hotness import FloatArray
from moeq.arguments import checked
from moeq.artifacts.coactivation import NAME as COACTIVATION
from moeq.artifacts.coactivation import REMEDY as AGAIN
from moeq.artifacts.coactivation import read_coactivation
from moeq.artifacts.manifest import PlacedExpert, PlacedLayer, PlacementManifest, read_manifest
from moeq.bounded import shown
from moeq.errors import ArtifactError, ModelError, RecipeError, missing
from moeq.exporters.native_replicas import CheckpointReplicas, CopyingReader
from moeq.folders import checkpoint_of
from moeq.models.loading import compute_dtype, load_model, resolve_device
from moeq.models.source import open_source
from moeq.runtime.dynamic.forms import Form, form_of
from moeq.runtime.dynamic.model import DynamicMoE, DynamicSettings
from moeq.runtime.dynamic.needs import WEIGHTS, other_bytes, stand_ins, weights_bytes
from moeq.runtime.dynamic.options import DynamicOptions
from moeq.runtime.dynamic.pools import HIGH, LOW
from moeq.tables import human_bytes
from moeq_kernels import choice
from moeq_kernels.packed import packed_shapes
from moeq_kernels.widths import Encoding

MOST_TOKENS = 2**31 - 1  # whose keys and values are added up
LOG = logging.getLogger("moeq.dynamic")


@checked
def open_dynamic(
    checkpoint: str | Path,
    settings: str | DynamicOptions = "auto",
    *,
    dtype: str = "auto",
    device: str = "auto",
    tokens: int = 0,
    sequences: int = 1,
    copies: Literal["beside", "between"] = "beside",
    policy: choice.Policy = "measured",
    log: str | Path | None = None,
    say: Callable[[str], None] = LOG.warning,
    trust_remote_code: bool = False,
) -> DynamicMoE:
    """A checkpoint that moeq exported with `quantize.replicas: all`, its experts in high or low precision as its
    workload asks for it (paper 001, DynaExq); `moeq.open_dynamic`.

    settings: as `--dynamic` takes them, or auto; dtype: auto, float32, float16 or bfloat16; tokens: whose keys, values
    and activations the budget has room for, of all sequences together, copies: how they are made, both unless the
    settings say; sequences: at once; log: file for decisions as JSON lines; say: what is told once of every kind of
    failure. Close it, or use it in a `with`.

    ModelError for a checkpoint without two widths, without those that are asked for, for a budget that not even all
    experts in low precision keep, with the sum, and for a device that is neither a CPU nor a CUDA GPU; ArtifactError
    for a damaged checkpoint, RecipeError for settings that cannot be.
    """
    _check_counts(tokens, sequences)
    path = checkpoint_of(Path(checkpoint))
    if not path.exists():
        raise missing(path, "give RUN/checkpoint of a moeq run")
    options = DynamicOptions.parse(settings) if isinstance(settings, str) else settings
    manifest = read_manifest(path)
    high, low = options.pair(manifest.widths_there, str(path))
    target = resolve_device(device)
    form = form_of(target, options.planes)
    model, source = load_with_replicas(path, dtype, target, policy, trust_remote_code)
    layers = source.reader.layers
    other = {WEIGHTS: weights_bytes(model, layers)}
    wanted = options.tokens if options.tokens is not None else tokens
    if wanted:
        with stand_ins(model, layers):
            other = other_bytes(model, layers, context=-(-wanted // sequences), batch=sequences)
    memory = options.memory
    if memory is None:
        memory = sum(other.values()) + _own_bytes(manifest, source, high, low, options.transient, form, str(path))
    return DynamicMoE(
        model,
        layers,
        source,
        _settings(options, high, low, memory, copies),
        other_bytes=other,
        importance=np.stack([_first(layer) for layer in manifest.layers]),
        follows=_follows(path, [layer.name for layer in layers]) if options.prefetch else None,
        policy=policy,
        log=None if log is None else Path(log),
        say=say,
    )


def _check_counts(tokens: Any, sequences: Any) -> None:
    """RecipeError for numbers of tokens and sequences that cannot be."""
    for name, value, least in (("tokens", tokens, 0), ("sequences", sequences, 1)):
        if not isinstance(value, Integral) or not least <= int(value) <= MOST_TOKENS:
            raise RecipeError(f"{name} is {shown(value)}", do=f"give a whole number from {least} to {MOST_TOKENS}")


def _settings(options: DynamicOptions, high: int, low: int, memory_bytes: int, copies: str) -> DynamicSettings:
    """What the options say, where they say it; copies: how they are made else."""
    return DynamicSettings(
        high=high,
        low=low,
        memory_bytes=memory_bytes,
        host_bytes=options.host,
        period=options.period,
        ema=options.ema,
        threshold=options.threshold,
        certainty=options.certainty,
        transient=options.transient,
        background=(options.copies or copies) == "beside",
        busy=options.busy,
        planes=options.planes,
        prefetch=options.prefetch,
    )


def _follows(path: Path, layers: Sequence[str]) -> list[FloatArray] | None:
    """Which experts follow which, where the checkpoint says; ArtifactError where it says so of other layers."""
    table = read_coactivation(path)
    if table is None:
        return None
    if [layer.name for layer in table.layers] != list(layers):
        raise ArtifactError("of other layers than the checkpoint's", where=str(path / COACTIVATION), do=AGAIN)
    return table.follows()


def load_with_replicas(
    path: Path, dtype: str, device: torch.device, policy: choice.Policy, trust_remote_code: bool = False
) -> tuple[Any, CheckpointReplicas]:
    """A checkpoint's model, whose experts no kernel has taken yet, and its replicas."""
    source = CheckpointReplicas(CopyingReader(path, trust_remote_code))
    opened = open_source(str(path))
    with choice.choosing(policy, at_once=False):  # nobody computes with what is placed
        return load_model(opened, compute_dtype(opened, dtype, device), device, trust_remote_code), source


def _own_bytes(
    manifest: PlacementManifest,
    source: CheckpointReplicas,
    high: int,
    low: int,
    transient: int,
    form: Form,
    where: str,
) -> int:
    """Bytes of pools with as many experts in high precision as fit into what the assignment's experts take.

    Counted as they are stored; a pool's blocks are larger (aligned, and as a kernel fills groups up), its buffer for
    experts in transit apart, and what a form keeps beside them.
    ModelError where all in low precision take more.
    """
    stored = [
        [[_stored(expert, layer, width, manifest.encoding) for width in (low, high)] for expert in layer.experts]
        for layer in manifest.layers
    ]
    placed, all_low = manifest.totals.placed_expert_bytes, sum(small for layer in stored for small, _ in layer)
    if all_low > placed:
        what = (
            f"all experts at {low} bits take {human_bytes(all_low)}, more than the {human_bytes(placed)} of its own "
            "assignment"
        )
        raise ModelError(what, where=where, do="give memory, or a lower precision")
    least = min(map(len, stored))
    each = sum(max(large - small for small, large in layer) for layer in stored)
    places = min(least, (placed - all_low) // each if each > 0 else least)
    layers = source.reader.layers
    examples = [[source.expert(layer, 0, width) for width in (low, high)] for layer in layers]
    versions = [[matrices for matrices, _ in of_layer] for of_layer in examples]
    small, large = (max(form.block(of_layer[version]).nbytes for of_layer in versions) for version in (LOW, HIGH))
    count, rich = sum(map(len, stored)), places * len(stored)
    beside = form.beside(versions, [of_layer[LOW][1] for of_layer in examples], [one.num_experts for one in layers])
    return (count - rich + transient) * small + (rich + transient) * large + beside


def _stored(expert: PlacedExpert, layer: PlacedLayer, width: int, encoding: Encoding) -> int:
    """Bytes of the replica of an expert at a width, as if it had tensors of its own."""
    one = next(replica for replica in expert.replicas if replica.bits == width and replica.projections is None)
    if one.leading_bits_of is None:
        return one.bytes
    shapes = (packed_shapes(*layer.shape(name), width, encoding) for name in layer.projections)
    return sum(math.prod(size) * dtype.itemsize for of_matrix in shapes for size, dtype in of_matrix.values())


def _first(layer: PlacedLayer) -> np.ndarray:
    """[E] of a layer: its experts' importances, the highest to those that the assignment gave the most.

    Where no importance is known, they fall as 1, 1/2, 1/3, ...
    """
    known = np.array([expert.importance for expert in layer.experts], dtype=np.float64)
    if not known.any():
        known = 1 / np.arange(1, len(known) + 1)
    order = sorted(
        layer.experts,
        key=lambda one: (one.tier != "gpu", -_mean_bits(one, layer.projections), -one.importance, one.expert),
    )
    first = np.empty_like(known)
    first[[one.expert for one in order]] = np.sort(known)[::-1]
    return first


def _mean_bits(expert: PlacedExpert, projections: Sequence[str]) -> float:
    widths = expert.widths
    return float(widths) if isinstance(widths, int) else sum(widths[name] for name in projections) / len(projections)
