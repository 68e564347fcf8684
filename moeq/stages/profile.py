"""profile: one pass over the calibration text that counts what the routers choose."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch

from moeq.artifacts.profile import ExpertProfile, read_profile, write_profile
from moeq.models.walk import LayerInputs, walk
from moeq.stages.context import Context


def run(context: Context) -> dict[str, Any]:
    """Write profile.safetensors and profile.json; returns the summary."""
    sequences = context.calibration
    lengths = sequences.mask.sum(1)
    fraction = context.recipe.profile.prefill_fraction
    prefill = torch.tensor([math.ceil(fraction * int(length)) for length in lengths])  # [S] tokens counted as prefill
    counts, scores, top_k = [], [], []
    batches = sequences.batches(context.recipe.corpus.batch_size)
    with context.reporter.bar("profile", len(context.layers)) as advance:
        for inputs in walk(context.model, context.layers, batches, context.device, streamed=context.streamed):
            layer_counts, layer_scores = count_routing(inputs, len(sequences), prefill)
            counts.append(layer_counts)
            scores.append(layer_scores)
            top_k.append(inputs.experts.shape[1])
            advance()
            del inputs  # before the next layer's are gathered
    profile = ExpertProfile(
        layers=tuple(layer.name for layer in context.layers),
        top_k=tuple(top_k),
        counts=tuple(counts),
        scores=tuple(scores),
        tokens=torch.stack([prefill, lengths - prefill], 1).numpy(),
    )
    write_profile(context.directory("profile"), profile)
    return summarize(profile)


def count_routing(inputs: LayerInputs, num_sequences: int, prefill: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Counts int64 and routing-weight sums float64 of one layer, [S, 2, E] (prefill, decode)."""
    experts = inputs.layer.num_experts
    chosen, weights = inputs.experts.cpu(), inputs.weights.cpu().double()
    phase = (inputs.position >= prefill[inputs.sequence]).long()
    cell = ((inputs.sequence * 2 + phase).unsqueeze(1) * (experts + 1) + chosen.clamp(max=experts)).reshape(-1)
    size = num_sequences * 2 * (experts + 1)  # one column more for experts that stand for none
    counts = torch.bincount(cell, minlength=size).view(num_sequences, 2, experts + 1)[..., :experts]
    scores = torch.bincount(cell, weights.reshape(-1), minlength=size).view(num_sequences, 2, experts + 1)[
        ..., :experts
    ]
    return counts.contiguous().numpy(), scores.contiguous().numpy()


def summarize(profile: ExpertProfile) -> dict[str, Any]:
    """Figures for the terminal and the record."""
    similarity = [value for value in profile.similarity() if value is not None]
    totals = [profile.total(layer)[0] for layer in range(len(profile.layers))]
    return {
        "layers": len(profile.layers),
        "sequences": int(profile.tokens.shape[0]),
        "tokens": int(profile.tokens.sum()),
        "mean_prefill_decode_cosine": float(np.mean(similarity)) if similarity else None,
        "experts_never_chosen": int(sum((counts == 0).sum() for counts in totals)),
    }


def load(context: Context) -> ExpertProfile:
    return read_profile(context.directory("profile"))
