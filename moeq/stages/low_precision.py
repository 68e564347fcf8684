"""Perplexity against the share of every layer's experts at a low width (paper 001, Figure 4).

A sweep loads the model once. From one point to the next only the experts whose width changes are overwritten. A
streamed model's experts are overwritten whenever they are read. What is no routed expert stays as in the checkpoint.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import nn

from moeq.analysis.low_precision import Chosen, low_experts, orders
from moeq.artifacts.assignment import FULL
from moeq.artifacts.low_precision import NAME, Curve, LowPrecisionReport, Point, Sweep, write_sweeps
from moeq.evaluation.perplexity import perplexity
from moeq.models.corpus import Sequences
from moeq.models.experts import ExpertLayer
from moeq.recipe import AssignSection, LowPrecisionSection
from moeq.runtime.swapping import ExpertPlace, Replacement
from moeq.stages import assign, profile
from moeq.stages.context import Context
from moeq.stages.replicas import Replicas


def write_curves(context: Context) -> None:
    """Write low_precision.json beside the evaluation; without a sweep in the recipe, take away what is there."""
    path = context.directory("eval") / NAME
    if not context.recipe.eval.low_precision:
        path.unlink(missing_ok=True)
        return
    sweeps = tuple(_sweep(context, section) for section in context.recipe.eval.low_precision)
    write_sweeps(path, LowPrecisionReport(sweeps=sweeps))


def _sweep(context: Context, section: LowPrecisionSection) -> Sweep:
    """One pair of widths in all orders; points with the same experts at the low width are measured once."""
    routing = profile.load(context)
    counts = [routing.total(layer)[0] for layer in range(len(routing.layers))]
    chosen = {
        name: [(share, low_experts(order, share)) for share in sorted(section.shares)]
        for name, order in orders(counts, section.seeds, context.recipe.seed).items()
    }
    text = context.text.evaluation
    assert text is not None, "the recipe says so"
    sequences = _some(text, section.sequences)
    there_and_back = [points[:: -1 if index % 2 else 1] for index, points in enumerate(chosen.values())]
    measured = _measure(context, section, sequences, [low for points in there_and_back for _, low in points])
    return Sweep(
        low_bits=section.bits,
        high_bits=section.high_bits,
        quantizer=section.quantizer or context.recipe.assign.quantizer,
        experts=sum(map(len, counts)),
        sequences=len(sequences),
        tokens=int(sequences.mask[:, 1:].sum()),
        curves=tuple(
            Curve(
                order=order,
                number=number,
                points=tuple(
                    Point(share=share, low_experts=sum(map(len, low)), perplexity=measured[low])
                    for share, low in points
                ),
            )
            for (order, number), points in chosen.items()
        ),
    )


def _measure(
    context: Context, section: LowPrecisionSection, sequences: Sequences, wanted: list[Chosen]
) -> dict[Chosen, float]:
    """Perplexity of every choice of experts, each measured once."""
    settings = context.recipe.eval.perplexity
    assert settings is not None, "the recipe says so"
    different = list(dict.fromkeys(wanted))
    batches = -(-len(sequences) // settings.batch_size)
    name = f"{section.bits} of {section.high_bits} bits"
    widths, model = _Widths(context, section), context.model
    perplexities: dict[Chosen, float] = {}
    with model.overlay() as overlay, context.reporter.bar(name, len(different) * batches) as advance:
        for low in different:
            perplexities[low] = perplexity(
                overlay.set(partial(widths.of, low)),
                sequences,
                settings.batch_size,
                model.device,
                advance,
                model.streamed,
                bar=context.reporter.bar,
            )["perplexity"]
    return perplexities


class _Widths:
    """What gives a layer's experts the low width or the high one."""

    def __init__(self, context: Context, section: LowPrecisionSection) -> None:
        self.section = section
        quantizer = section.quantizer or context.recipe.assign.quantizer
        self._replicas: dict[int, list[Replicas]] = {}
        for bits in {section.bits, section.high_bits} - {FULL}:
            uniform = AssignSection.of("uniform", bits=bits, quantizer=quantizer)
            made = assign.make(context, uniform, f"uniform-{bits}")
            self._replicas[bits] = [Replicas(context, made, layer) for layer in context.model.layers]

    def of(self, low: Chosen, layer: ExpertLayer, _: nn.Module | None) -> dict[ExpertPlace, Replacement]:
        """The replicas of one layer's experts; none of those in full precision."""
        bits, high = self.section.bits, self.section.high_bits
        widths = {expert: bits if expert in low[layer.index] else high for expert in range(layer.num_experts)}
        return {
            (layer.name, expert): self._replicas[width][layer.index].replacement(expert)
            for expert, width in widths.items()
            if width != FULL
        }


def _some(sequences: Sequences, count: int | None) -> Sequences:
    """At most `count` of the sequences, evenly spaced."""
    if count is None or count >= len(sequences):
        return sequences
    chosen = [index * len(sequences) // count for index in range(count)]
    at = torch.tensor(chosen)
    domains = tuple(sequences.domains[index] for index in chosen)
    return Sequences(ids=sequences.ids[at], mask=sequences.mask[at], domains=domains, pad=sequences.pad)
