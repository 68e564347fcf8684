"""profile: what the routers choose on the calibration text, and whether it reaches every expert."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

import numpy as np
import torch
from rich.markup import escape

from moeq.artifacts.profile import Coverage, ExpertProfile, read_profile, write_profile
from moeq.artifacts.tensor_files import safetensors_bytes
from moeq.artifacts.trace import (
    BYTES_PER_CHOICE,
    BYTES_PER_SEQUENCE,
    RoutingTrace,
    join_traces,
    read_trace,
    write_trace,
)
from moeq.artifacts.trace import NAME as TRACE
from moeq.engine.task import groups
from moeq.errors import ArtifactError
from moeq.models.corpus import Sequences, join
from moeq.models.corpus.images import image_tokens
from moeq.models.experts import refuse_loops
from moeq.models.walk import LayerInputs
from moeq.quantizers.layer_data import heldout_stride
from moeq.stages import workers
from moeq.stages.context import Context
from moeq.stages.finite import TRIED_TOKENS, check_output, may_overflow, naming_the_file, say_left_out_of
from moeq.stages.needs import CAPTURED, LIBRARY, STATES, Moment, Needs, Rates, Sizes
from moeq.stages.recorder import Recorder


def run(context: Context) -> dict[str, Any]:
    """Write profile.safetensors and profile.json, and trace.safetensors where wanted; returns the summary.

    With corpus.until_covered the text grows, pass by pass, until enough experts are covered or there is no more.
    """
    growth = context.recipe.corpus.until_covered
    chunks: list[Sequences] = []
    parts: list[Counted] = []
    for chunk in [context.text.calibration] if growth is None else context.text.calibration_chunks():
        chunks.append(chunk)
        parts += _counted(context, chunk)
        profile = _joined([part.profile for part in parts])
        coverage = profile.coverage(**coverage_settings(context))
        covered = growth is None or coverage.share_covered >= growth.share
        context.reporter.say(
            f"  {len(profile.tokens)} sequences: {coverage.share_covered:.1%} of {sum(coverage.experts)} experts saw "
            f"at least {coverage.min_tokens} calibration tokens"
        )
        if covered:
            break
    if context.model.takes_images:
        positions = chunks[0].ids.shape[1]
        context.reporter.say(f"  all {positions} positions of an image are seen at once: they count as prefill")
    if not covered:
        context.reporter.say("  [yellow]not covered: the maximum or the end of the text is reached[/yellow]")
    profile = replace(profile, text=join(chunks).digest(), corpus=context.text.corpus_names)
    write_profile(context.directory("profile"), profile, coverage)
    _write_trace(context, [part.trace for part in parts if part.trace is not None], profile.text)
    return summarize(profile, coverage)


@dataclass(frozen=True, kw_only=True)
class Counted:
    """What one pass over some sequences saw: its profile, of every layer the tokens left out and all of them, and the
    trace where it is wanted."""

    profile: ExpertProfile
    left_out: tuple[tuple[int, int], ...]
    trace: RoutingTrace | None


def _counted(context: Context, sequences: Sequences) -> list[Counted]:
    """One pass over some sequences, or one by each of several workers over some of them, in their order: a batch goes
    through the model as it does in one pass."""
    if context.recipe.profile.trace and sequences.extra is not None and not image_tokens(context.model.skeleton.config):
        context.reporter.say("  [yellow]trace: the configuration does not say which tokens are of images[/yellow]")
    batches = sequences.batches(context.recipe.corpus.batch_size)
    several = workers.several(context.recipe, context.model.device)
    opened = openers(Sizes(context), len(batches)) if several else None
    if opened is None:
        with context.reporter.bar("profile", len(context.model.layers)) as advance:
            parts = [count_part(context, sequences, advance)]
    else:
        given = []
        for some in groups(len(batches), opened.count):
            first, last = int(batches[some.start].sequences[0]), int(batches[some.stop - 1].sequences[-1])
            part = workers.Opened.of(context), sequences.part(first, last + 1)
            given.append((f"profile, sequences {first} to {last}", part))
        with (
            context.reporter.bar("profile", len(given)) as advance,
            workers.opening(context, opened.count) as crew,
        ):
            parts = crew.did(_count_in_worker, given, advance)
    for layer, each in zip(context.model.layers, zip(*(part.left_out for part in parts), strict=True), strict=True):
        say_left_out_of(context, layer, *(sum(numbers) for numbers in zip(*each, strict=True)))
    return parts


def _count_in_worker(given: tuple[workers.Opened, Sequences], tensors: Any) -> tuple[Counted, dict[str, torch.Tensor]]:
    opened, sequences = given
    return count_part(opened.context(), sequences), {}


def _write_trace(context: Context, parts: Sequence[RoutingTrace], text: str) -> None:
    """Write the trace of all parts; without any, take away what an earlier run recorded of other text."""
    path = context.directory("profile") / TRACE
    if not parts:
        path.unlink(missing_ok=True)
        return
    trace = replace(join_traces(parts), model=context.model.stamp, text=text)
    write_trace(path, trace)
    where = escape(str(context.finished("profile") / TRACE))
    context.reporter.say(f"  trace of {trace.num_tokens:,} tokens, {trace.num_layers} layers: {where}")


def check(context: Context) -> None:
    """RecipeError for a trace of a looped model."""
    if context.recipe.profile.trace:
        what = "a trace has one choice of a token in a layer"
        refuse_loops(context.model.layers, what, where="profile.trace: true", do="leave it out")


def trace_is_intact(context: Context) -> bool:
    """Whether the trace that the recipe asks for is there, undamaged and of the profile's sequences."""
    if not context.recipe.profile.trace:
        return True
    try:
        return read_trace(context.directory("profile") / TRACE).text == load(context).text
    except ArtifactError:
        return False


def coverage_settings(context: Context) -> dict[str, int]:
    """What decides whether an expert is covered: the tokens it must see, and which sequences losses holds out."""
    wanted = context.recipe.profile.min_tokens
    return {
        "min_tokens": context.recipe.losses.min_tokens if wanted is None else wanted,
        "heldout_stride": heldout_stride(context.recipe.losses.heldout_fraction),
    }


def _prefill(context: Context, sequences: Sequences) -> torch.Tensor:
    """Tokens [S] of every sequence that count as prefill; all positions of images, which are seen at once."""
    if context.model.takes_images:
        return sequences.mask.sum(1)
    fraction = Fraction(str(context.recipe.profile.prefill_fraction))  # as it is written: .28 of 25 tokens are 7
    return torch.tensor([math.ceil(fraction * int(length)) for length in sequences.mask.sum(1)])


def count_part(context: Context, sequences: Sequences, advance: Callable[[], None] = lambda: None) -> Counted:
    """One pass over some sequences in this process."""
    lengths, prefill = sequences.mask.sum(1), _prefill(context, sequences)
    known = image_tokens(context.model.skeleton.config)
    recorder = Recorder(sequences, prefill, known) if context.recipe.profile.trace else None
    counts, scores, top_k, left_out, tried = [], [], [], [], False
    batches = sequences.batches(context.recipe.corpus.batch_size)
    with naming_the_file(context):
        for inputs in context.model.walk(batches, hidden=False):
            left_out.append((inputs.left_out, inputs.left_out + len(inputs.hidden)))
            layer_counts, layer_scores = count_routing(inputs, len(sequences), prefill)
            counts.append(layer_counts)
            scores.append(layer_scores)
            top_k.append(inputs.experts.shape[1])
            if recorder is not None:
                recorder.add(inputs)
            advance()
            tried = inputs.layer is context.model.layers[-1] and may_overflow(context, inputs.layer)
            del inputs  # before the next layer's are gathered
        if tried:
            check_output(context, sequences)
    profile = ExpertProfile(
        layers=tuple(layer.name for layer in context.model.layers),
        top_k=tuple(top_k),
        counts=tuple(counts),
        scores=tuple(scores),
        tokens=torch.stack([prefill, lengths - prefill], 1).numpy(),
    )
    return Counted(profile=profile, left_out=tuple(left_out), trace=None if recorder is None else recorder.trace())


def _joined(parts: Sequence[ExpertProfile]) -> ExpertProfile:
    """Profiles of some sequences, and of those after them, as one."""
    layers = range(len(parts[0].layers))
    return replace(
        parts[0],
        counts=tuple(np.concatenate([part.counts[layer] for part in parts]) for layer in layers),
        scores=tuple(np.concatenate([part.scores[layer] for part in parts]) for layer in layers),
        tokens=np.concatenate([part.tokens for part in parts]),
    )


def count_routing(inputs: LayerInputs, num_sequences: int, prefill: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Counts int64 and routing-weight sums float64 of one layer, [S, 2, E] (prefill, decode)."""
    experts = inputs.layer.num_experts
    chosen, weights = inputs.experts.cpu(), inputs.weights.cpu().double()
    phase = (inputs.position >= prefill[inputs.sequence]).long()
    cell = ((inputs.sequence * 2 + phase).unsqueeze(1) * (experts + 1) + chosen.clamp(max=experts)).reshape(-1)
    shape = (num_sequences, 2, experts + 1)  # one column more for experts that stand for none
    counts, scores = (
        torch.bincount(cell, each, minlength=math.prod(shape)).view(shape)[..., :experts].contiguous().numpy()
        for each in (None, weights.reshape(-1))
    )
    return counts, scores


def summarize(profile: ExpertProfile, coverage: Coverage) -> dict[str, Any]:
    """Figures for the terminal and the record."""
    similarity = [value for value in profile.similarity() if value is not None]
    totals = [profile.total(layer)[0] for layer in range(len(profile.layers))]
    return {
        "layers": len(profile.layers),
        "sequences": int(profile.tokens.shape[0]),
        "tokens": int(profile.tokens.sum()),
        "mean_prefill_decode_cosine": float(np.mean(similarity)) if similarity else None,
        "experts_never_chosen": int(sum((counts == 0).sum() for counts in totals)),
        "min_tokens": coverage.min_tokens,
        "share_of_experts_below_min_tokens": coverage.share_below,
        "most_below_in_a_layer": max(
            below / experts for below, experts in zip(coverage.below, coverage.experts, strict=True)
        ),
    }


def load(context: Context) -> ExpertProfile:
    return read_profile(context.directory("profile"))


TOKEN = 16  # bytes of one token of the text that sequences are taken from, half of which are their ids
TOKENIZED_AT_ONCE = 150 << 20  # bytes that the tokenizer holds of one lot of text, of at most a MiB
TOKENIZED_KEPT = 0.3  # of what tokenizing took, in the heap until the stage ends
TOKENIZING = 1e-6  # seconds a token
JSON, JSON_LAYER, JSON_EXPERT = 291, 229, 16  # bytes of profile.json
TRACE_HEADER, TRACE_LAYER = 1_000, 110  # bytes of the trace beside its tokens


def openers(sizes: Sizes, batches: int) -> workers.Openers | None:
    """Workers among which the text is divided; None: the run itself counts."""
    text = sizes.calibration
    walk = {**sizes.held(), **sizes.stopped(STATES, CAPTURED, kept=False), **sizes.running(text.batch_tokens)}
    model = max(sum(walk.values()), sum(sizes.loading().values()))
    return workers.Openers.of(sizes.recipe, sizes.device, batches, model)


def needs(sizes: Sizes) -> Needs:
    """The text, and a walk over it with the counts of every sequence."""
    text, count = sizes.calibration, len(sizes.layers)
    there = [part.whole for part in (text, sizes.evaluation) if part is not None]
    read = {"text": max(there) * TOKEN + min(TOKENIZED_AT_ONCE, 600 * max(there))}
    shapes: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {"tokens": (torch.int64, (text.sequences, 2))}
    for layer in sizes.layers:
        for name, dtype in (("counts", torch.int64), ("scores", torch.float64)):
            shapes[f"layer.{layer.index}.{name}"] = (dtype, (text.sequences, 2, layer.num_experts))
    files = {"profile.safetensors": safetensors_bytes(shapes)}
    files["profile.json"] = JSON + JSON_LAYER * count + JSON_EXPERT * sizes.experts
    counts = sizes.counts()
    if sizes.recipe.profile.trace:  # which takes half as much again while its layers become one array
        choices = text.tokens * count * sizes.geometry.top_k * BYTES_PER_CHOICE
        counts += choices * (3 if sizes.recipe.corpus.until_covered is None else 4) // 2
        files[TRACE] = TRACE_HEADER + TRACE_LAYER * count + choices + text.sequences * BYTES_PER_SEQUENCE
    tables = {"routing counts": counts, "heap of the text": TOKENIZED_KEPT * read["text"]}
    opened, disk = openers(sizes, int(text.batches)), sizes.walked if sizes.streams else sizes.disk

    def seconds(rates: Rates) -> float:
        walk = sizes.forward(rates, text.batch_tokens, text.batches, head=False)
        walk /= 1 if opened is None else opened.at_once
        return LIBRARY / 3 + TOKENIZING * sum(there) + sizes.reading(rates, disk, first=True) + walk

    walking: list[Moment] = [
        {**sizes.loading(), **sizes.stopped(2, 1, kept=False), **tables},
        {**sizes.held(), **sizes.stopped(STATES, CAPTURED, kept=False), **sizes.running(text.batch_tokens), **tables},
    ]
    if not sizes.streams and not sizes.images:
        tried = TRIED_TOKENS * sizes.vocabulary * (sizes.dtype.itemsize + 12)
        walking.append({**sizes.held(), "logits": tried, **tables})
    if opened is not None:  # whose models are theirs
        walking = [{**(moment if sizes.gpu else tables), **opened.held} for moment in walking]
    moments: list[Moment] = [read, *walking]
    return Needs(moments=moments, files=files, read=disk, seconds=seconds)
