"""What quantizing one expert alone does to the model's output, expert by expert until the time is spent.

A few experts at a time, or a few of every worker: the exact output and what goes into their decoder layers is computed
once for each batch, then the model runs again from each expert's layer on. Before a layer is begun at, it is seen that
the exact model gives the same output from there, to the last bit; where it does not, the whole model runs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from moeq.artifacts.expert_effects import ExpertEffects, Measured, read_measured, write_measured
from moeq.artifacts.files import digest_of
from moeq.engine.task import groups
from moeq.models.experts import ExpertLayer
from moeq.models.partial import Outputs, beginning_at, recording
from moeq.models.streaming import blocks_of
from moeq.models.walk import Batch
from moeq.recipe import ExpertEffectsSection
from moeq.stages.context import Context
from moeq.stages.effects import alone, divergence, heldout_batches, log_probabilities, predictions, replaced
from moeq.stages.replicas import Replicas, load_index, load_losses
from moeq.stages.workers import Opened, Openers, opening

REVISION = 1  # raised when the same inputs give other effects
AT_ONCE = 16  # experts, at most: each keeps what goes into its decoder layer
NOWHERE = ""  # the decoder layer of experts that lie in none
RUNS_WHOLE = "  {} needs more than the layer before it: the whole model runs"
Place = tuple[int, int]  # layer and expert


def measure(context: Context, section: ExpertEffectsSection, opened: Openers | None = None) -> ExpertEffects:
    """Measure where the last run with the same inputs stopped, until time or number are reached; fill in the rest.
    opened: workers among which the experts are divided.

    At least one expert is measured. What is done is written after every few experts. Raises QuantizationError when an
    output is not finite.
    """
    method = context.recipe.losses.methods[0]
    expected = _expected(context, method, section.bits)
    places = order(expected, context.recipe.seed)
    hidden = max(layer.hidden_size for layer in context.model.layers)
    batches = heldout_batches(context, section.sequences, kept=AT_ONCE * hidden)
    directory = context.directory("losses")
    done = read_measured(directory, _inputs(context, section, method, batches))
    wanted = len(places) if section.experts is None else min(section.experts, len(places))
    if done.divergence:
        context.reporter.say(f"  effects of {len(done.divergence):,} experts are there, of {done.seconds:.0f} s")
    opened = opened if len(done.divergence) < wanted else None
    with (
        _measuring(context, _Worker(context=context, section=section, batches=batches), opened) as (measured, workers),
        context.reporter.bar("expert effects", max(0, wanted - len(done.divergence))) as advance,
    ):
        count = workers
        while len(done.divergence) < wanted and _time_left(section, done) > 0:
            here = places[len(done.divergence) : min(wanted, len(done.divergence) + count)]
            started = time.monotonic()
            effects = measured(here)
            took = time.monotonic() - started
            done = Measured(
                inputs=done.inputs, seconds=done.seconds + took, divergence=(*done.divergence, *effects.tolist())
            )
            write_measured(directory, done)
            for _ in here:
                advance()
            count = max(1, int(min(AT_ONCE * workers, _time_left(section, done) * len(here) / max(took, 1e-9))))
    values = done.divergence[:wanted]
    tokens = sum(predictions(context, batch) for batch in batches)
    return _filled(section, method, batches, tokens, expected, dict(zip(places, values, strict=False)))


def order(expected: Sequence[np.ndarray], seed: int) -> list[Place]:
    """Layers and experts by falling expected effect [E] a layer, the first of every layer before all others.

    Equal ones come in an order that the seed decides.
    """
    flat = [(layer, expert) for layer, values in enumerate(expected) for expert in range(len(values))]
    shuffled = [flat[index] for index in np.random.default_rng(seed).permutation(len(flat))]
    falling = sorted(shuffled, key=lambda place: -float(expected[place[0]][place[1]]))
    first: dict[int, Place] = {}
    for place in falling:
        first.setdefault(place[0], place)
    return [*first.values(), *(place for place in falling if first[place[0]] != place)]


def _time_left(section: ExpertEffectsSection, done: Measured) -> float:
    """Seconds that may still be spent; the first expert is measured whatever it takes."""
    return np.inf if section.seconds is None or not done.divergence else section.seconds - done.seconds


def _expected(context: Context, method: str, bits: int) -> list[np.ndarray]:
    """Weighted loss times own tokens of every expert, [E] a layer."""
    table = load_losses(context)
    names = ("weighted_loss", "calibration_tokens", "heldout_tokens")
    columns = zip(*(table.matrix(method, name) for name in names), strict=True)
    return [loss[bits].astype(float) * (own[bits] + held[bits]) for loss, own, held in columns]


def _inputs(context: Context, section: ExpertEffectsSection, method: str, batches: Sequence[Batch]) -> str:
    """Digest of all that decides the order of the experts and their effects."""
    index = load_index(context)
    rows = next(made.rows for made in index.made if (made.method, made.bits) == (method, section.bits))
    sizes = [list(batch.input_ids.shape) for batch in batches]
    return digest_of([REVISION, index.set, rows, section.sequences, sizes, context.recipe.seed])


@dataclass(kw_only=True)
class _Worker:
    """Measures a few experts at a time; seen: whether the model can begin at a decoder layer, by its name."""

    context: Context
    section: ExpertEffectsSection
    batches: list[Batch]
    seen: dict[str, bool] = field(default_factory=lambda: {NOWHERE: False})
    replicas: dict[int, Replicas] = field(default_factory=dict)

    def measure(self, places: Sequence[Place]) -> np.ndarray:
        """Mean divergence of every expert of some places, [n]."""
        context, model = self.context, self.context.model
        names = blocks_of(model.module)
        known = model.layers if model.streamed is None else model.streamed.layers  # found while all are there
        layers = {index: known[index] for index, _ in places}
        blocks = {
            index: next((name for name in names if layer.name.startswith(f"{name}.")), NOWHERE)
            for index, layer in layers.items()
        }
        totals, tokens = np.zeros(len(places)), 0
        for batch in self.batches:
            with recording(model.module, names, list(blocks.values())) as outputs:
                exact = log_probabilities(context, batch)
            for block in sorted(set(blocks.values()) - set(self.seen)):
                self._see(block, outputs, batch, exact)
            for index, (layer, expert) in enumerate(places):
                starting = beginning_at(model.module, outputs, blocks[layer])
                with (
                    starting if self.seen[blocks[layer]] else nullcontext(),
                    replaced(context, layers[layer], self._replicas(layers[layer]), [expert]),
                ):
                    changed = log_probabilities(context, batch)
                where = f"{layers[layer].name}, expert {expert} at {self.section.bits} bits"
                totals[index] += divergence(exact, changed, where)
            tokens += predictions(context, batch)
        return totals / tokens

    def _replicas(self, layer: ExpertLayer) -> Replicas:
        if layer.index not in self.replicas:
            method = self.context.recipe.losses.methods[0]
            self.replicas[layer.index] = alone(self.context, layer, self.section.bits, method)
        return self.replicas[layer.index]

    def _see(self, block: str, outputs: Outputs, batch: Batch, exact: torch.Tensor) -> None:
        """Whether the exact model that begins at a decoder layer gives the exact output.

        Families whose layers hand on more than their output give another one, or fail.
        """
        try:
            with beginning_at(self.context.model.module, outputs, block):
                self.seen[block] = torch.equal(log_probabilities(self.context, batch), exact)
        except (LookupError, AttributeError, TypeError, ValueError, RuntimeError):
            self.seen[block] = False
        if not self.seen[block]:
            self.context.reporter.say(RUNS_WHOLE.format(block))


@contextmanager
def _measuring(
    context: Context, own: _Worker, opened: Openers | None
) -> Iterator[tuple[Callable[[Sequence[Place]], np.ndarray], int]]:
    """What measures some experts, and how many workers it has: the run itself, or those of its own, which stay."""
    if opened is None:
        yield own.measure, 1
        return
    asked = _Asked(opened=Opened.of(context), section=own.section, batches=own.batches)
    said: set[str] = set()
    with opening(context, opened.count) as crew:

        def measured(places: Sequence[Place]) -> np.ndarray:
            some = [places[which.start : which.stop] for which in groups(len(places), crew.count)]
            parts = [(f"expert effects, {len(here)} from {here[0]} on", (asked, here)) for here in some]
            found = crew.did(_measure_in_worker, parts)
            for block in sorted({block for _, whole in found for block in whole} - said):
                context.reporter.say(RUNS_WHOLE.format(block))
                said.add(block)
            return np.concatenate([effects for effects, _ in found])

        yield measured, crew.count


@dataclass(frozen=True, kw_only=True, eq=False)
class _Asked:
    """What a worker measures experts by."""

    opened: Opened
    section: ExpertEffectsSection
    batches: list[Batch]


_kept: list[tuple[Context, _Worker]] = []  # what this worker measures by


def _measure_in_worker(
    given: tuple[_Asked, Sequence[Place]], tensors: Any
) -> tuple[tuple[np.ndarray, list[str]], dict[str, Any]]:
    """The task: the mean divergence of every expert of some places, and at which decoder layers the model cannot
    begin."""
    asked, places = given
    context = asked.opened.context()
    if not _kept or _kept[0][0] is not context:
        _kept[:] = [(context, _Worker(context=context, section=asked.section, batches=asked.batches))]
    worker = _kept[0][1]
    effects = worker.measure(places)
    return (effects, [block for block, begins in worker.seen.items() if not begins and block != NOWHERE]), {}


def _filled(
    section: ExpertEffectsSection,
    method: str,
    batches: Sequence[Batch],
    tokens: int,
    expected: Sequence[np.ndarray],
    measured: dict[Place, float],
) -> ExpertEffects:
    """The effects of all experts: as measured, else the fit of their layer times what was expected."""
    fits = _fits(expected, measured)
    places = [[(layer, expert) for expert in range(len(values))] for layer, values in enumerate(expected)]
    return ExpertEffects(
        bits=section.bits,
        method=method,
        sequences=sum(len(batch.input_ids) for batch in batches),
        tokens=tokens,
        measured=len(measured),
        divergence=tuple(
            tuple(measured.get(place, fits[layer] * float(expected[layer][place[1]])) for place in row)
            for layer, row in enumerate(places)
        ),
        is_measured=tuple(tuple(place in measured for place in row) for row in places),
        fit=tuple(fits),
    )


def _fits(expected: Sequence[np.ndarray], measured: dict[Place, float]) -> list[float]:
    """Sum of the measured effects over the sum of what was expected of these experts, of every layer.

    Layers without any, or of whose experts nothing was expected, take that of all layers.
    """
    sums = np.zeros((len(expected), 2))
    for (layer, expert), effect in measured.items():
        sums[layer] += effect, expected[layer][expert]
    whole = sums.sum(0)
    everywhere = whole[0] / whole[1] if whole[1] > 0 else 0.0
    return [max(0.0, float(effect / hoped if hoped > 0 else everywhere)) for effect, hoped in sums]
