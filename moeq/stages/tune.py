"""Tuning: the scales of all placed experts trained on what the whole model answers, when they are assigned and refined.

The original answers the text first; what it said lies in a temporary file (evaluation/reference_logits.py), so that one
model is in memory. Sequences that losses measured on are held out where the text is the same, as many as the choice
takes. The state of the training is written whenever they are measured, so that a killed run goes on from there.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from moeq.artifacts.assignment import Assignment
from moeq.artifacts.digests import digest_of_file
from moeq.artifacts.files import digest_of, write_json
from moeq.artifacts.tensor_files import write_tensors
from moeq.artifacts.tuned import Tuned
from moeq.errors import CorpusError, RecipeError
from moeq.evaluation.reference_logits import ReferenceLogits, Scored
from moeq.models.experts import set_expert_weights
from moeq.models.forward import forward
from moeq.models.walk import Batch
from moeq.numerics.divergence import Kept, kl_divergence, kl_least
from moeq.quantizers.layer_data import heldout_stride
from moeq.quantizers.memory import working_memory
from moeq.quantizers.tune import TENSORS, Place, State, TunedScales, measured_every, train
from moeq.recipe import TuneSection
from moeq.stages import refine
from moeq.stages.context import Context
from moeq.stages.effects import joined, predictions
from moeq.stages.needs import Sizes
from moeq.stages.needs_tune import held_out, sequences_at_once
from moeq.stages.non_experts import Stored
from moeq.stages.replicas import Experts, nothing

REVISION = 1  # of what is half done; raised when the same inputs give another state
STARTS = "start"  # folder of what training begins with, gone afterwards
PROGRESS, STATE = ".tuning.json", ".tuning-"  # not part of the artifact
FEWEST = 2  # held-out sequences, whose differences say what is chance


def check(context: Context) -> None:
    """RecipeError for a streamed model that is refined, too; CorpusError for too little text."""
    if context.recipe.quantize.tune is None:
        return
    if context.model.streams:  # layer by layer, see refine.ByLayer
        if context.recipe.quantize.refine is not None:
            raise RecipeError(
                "the model is streamed, and quantize.refine trains its scales layer by layer already",
                where="quantize.tune",
                do="leave one of them out: --set quantize.tune=null",
            )
        return
    section, corpus = context.recipe.quantize.tune, context.recipe.corpus
    if section.sequences is not None or corpus.until_covered is None:
        _heldout(context, section.sequences or corpus.sequences)
    if section.sequences is not None:
        _ = context.text.tuning


def _heldout(context: Context, sequences: int) -> int:
    """The stride at which sequences are held out; CorpusError where too few are."""
    stride = heldout_stride(context.recipe.losses.heldout_fraction)
    if sequences < FEWEST * stride:
        raise CorpusError(
            f"{sequences} sequences leave fewer than {FEWEST} to choose by (one of {stride} is held out)",
            where="quantize.tune",
            do=f"set quantize.tune.sequences to {FEWEST * stride} or more",
        )
    return stride


def run(
    context: Context, assignment: Assignment, section: TuneSection, starts: Path
) -> tuple[Tuned, dict[Place, Tensor]]:
    """Train the scales of what lies in a folder; what came of it, and the scales that are better, none where the start
    is kept. The model's weights are those of the checkpoint again afterwards."""
    state_files = StateFiles.of(context, assignment, section, starts)
    with context.model.changeable(), Text.of(context, section) as text:
        text.remember()
        _replace_others(context)
        _drop(context, assignment)
        device, model = context.model.device, context.model.module
        scales = TunedScales(model, _matrices(context, assignment, starts), device)
        state = state_files.read(scales.change) or State.begun(scales.change)
        every = measured_every(section)
        with context.reporter.bar("tuning", -(-section.steps // every)) as advance:
            for _ in state.after[1:]:
                advance()

            def save() -> None:
                state_files.write(state)
                advance()

            train(scales, state, section, backward=text.backward, heldout=text.heldout_divergences, save=save)
        scales.write(state.best)
        stored = scales.stored() if state.is_better else {}
        gain, least = state.gain()
        tuned = Tuned(
            scales=scales.change.numel(),
            steps=state.steps,
            chosen=state.after[state.chosen],
            is_better=state.is_better,
            sequences=len(text.training),
            heldout=len(text.heldout),
            divergence={
                steps: mean if mean < float("inf") else None
                for steps, mean in zip(state.after, state.means, strict=True)
            },
            gain=gain,
            least=least,
        )
        del scales, model
    context.reporter.say(f"  {tuned.told()}")
    return tuned, stored


def _matrices(context: Context, assignment: Assignment, starts: Path) -> Iterator[tuple[Place, Any]]:
    for layer in context.model.layers:
        experts = refine.read(starts, layer, assignment, refine.quantized_experts(assignment, layer))
        for expert, matrices in experts.items():
            for projection, packed in matrices.items():
                yield Place(layer=layer, expert=expert, projection=projection), packed


def _replace_others(context: Context) -> None:
    """Put what the recipe quantizes outside of the experts into the model."""
    stored = Stored(context)
    with torch.no_grad():
        for module in stored.modules:
            weight = context.model.module.get_submodule(module.name).get_parameter("weight")
            weight.copy_(stored.packed(module).dequantize())


def _drop(context: Context, assignment: Assignment) -> None:
    """Have the model do without the experts that are dropped."""
    for layer in context.model.layers:
        values = {name: zeros.dequantize() for name, zeros in nothing(layer).items()}
        for expert in refine.dropped_experts(assignment, layer):
            set_expert_weights(context.model.module, layer, expert, values)


def with_scales(experts: Experts, layer: Any, scales: dict[Place, Tensor]) -> Experts:
    """A layer's experts with other scales, where there are some."""
    return {
        expert: {
            name: packed if place not in scales else replace(packed, scales=scales[place])
            for name, packed in matrices.items()
            for place in [Place(layer=layer, expert=expert, projection=name)]
        }
        for expert, matrices in experts.items()
    }


@dataclass(frozen=True, kw_only=True)
class StateFiles:
    """Where the state of a training lies: a file of tensors and, written after it, what names it."""

    folder: Path
    key: str

    @classmethod
    def of(cls, context: Context, assignment: Assignment, section: TuneSection, starts: Path) -> StateFiles:
        """Of a training that begins with what lies in a folder."""
        begins = {path.name: digest_of_file(path, cached=True) for path in sorted(starts.glob("*.safetensors"))}
        text = context.text.tuning.digest()
        heldout = context.recipe.losses.heldout_fraction
        others = Stored(context)  # whose codes hang on keys of `losses`, too
        made = others.index.model_dump(mode="json") if others.modules else None
        asked = [section.model_dump(mode="json"), heldout, context.recipe.seed, made]
        given = [context.model.stamp.digest, begins, text, asked, context.model.compute()]
        return cls(folder=starts, key=digest_of([REVISION, *given]))

    def read(self, like: Tensor) -> State | None:
        """The state of the same training; None where there is none, or it is damaged."""
        for name in refine.finished(self.folder / PROGRESS, self.key):
            with safe_open(self.folder / name, "pt") as file:
                tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
            change, first, second, best = (tensors[key].to(like) for key in TENSORS)
            return State(
                change=change,
                first=first,
                second=second,
                best=best,
                steps=int(tensors["after"][-1]),
                after=tensors["after"].tolist(),
                divergences=list(tensors["divergences"]),
            )
        return None

    def write(self, state: State) -> None:
        """Write a state; the one before stands until it is there."""
        path = self.folder / f"{STATE}{state.steps}"
        tensors = {name: getattr(state, name).cpu() for name in TENSORS}
        tensors |= {"after": torch.tensor(state.after), "divergences": torch.stack(state.divergences)}
        write_tensors(path, tensors)
        write_json(self.folder / PROGRESS, {"key": self.key, "files": {path.name: digest_of_file(path)}})
        for older in self.folder.glob(f"{STATE}*"):
            if older.name != path.name:
                older.unlink()


@dataclass(kw_only=True)
class Text:
    """What is trained on and what is held out, sequence by sequence, and what the original says of it."""

    context: Context
    section: TuneSection
    training: Sequence[Batch]
    heldout: Sequence[Batch]
    at_once: int
    reference: ReferenceLogits

    @classmethod
    def of(cls, context: Context, section: TuneSection) -> Text:
        """The text that the recipe asks for."""
        singles = context.text.tuning.batches(1)
        held = held_out(len(singles), _heldout(context, len(singles)))
        longest = max(single.input_ids.shape[1] for single in singles)
        memory = working_memory(section.working_memory, context.model.device)
        return cls(
            context=context,
            section=section,
            training=[single for place, single in enumerate(singles) if place not in held],
            heldout=[singles[place] for place in held],
            at_once=sequences_at_once(Sizes(context), memory, longest),
            reference=ReferenceLogits(context.out, sum(predictions(context, single) for single in singles)),
        )

    def __enter__(self) -> Text:
        return self

    def __exit__(self, *_: object) -> None:
        self.reference.close()

    def _batches(self, singles: Sequence[Batch]) -> list[Batch]:
        return joined(singles, self.at_once)

    def logits(self, batch: Batch) -> Tensor:
        """What the model says at every token that is no pad, or of every image, [n, V]."""
        device, dtype = self.context.model.device, self.context.model.dtype
        extra = {k: v.to(device, dtype if v.is_floating_point() else None) for k, v in batch.extra.items()}
        mask = None if bool(batch.mask.all()) else batch.mask.to(device, torch.long)
        said: Tensor = forward(self.context.model.module, batch.input_ids.to(device), mask, **extra).logits
        return said if self.context.model.takes_images else said[batch.mask.to(device)]

    @torch.no_grad()
    def remember(self) -> None:
        """Keep what the model says now, which is the original yet."""
        batches = self._batches([*self.training, *self.heldout])
        with self.context.reporter.bar("the original's answers", len(batches)) as advance:
            for batch in batches:
                counts = [predictions(self.context, one) for one in _singles(batch)]
                said = self.logits(batch).split(counts)
                for sequence, logits in zip(batch.sequences.tolist(), said, strict=True):
                    logprobs = logits.log_softmax(1, dtype=torch.float64)
                    first = torch.zeros(len(logits), dtype=torch.long, device=logits.device)
                    scored = Scored(logits=logits, logprobs=logprobs, targets=first, scores=logprobs[:, 0])
                    self.reference.write((sequence, 0), scored)
                advance()

    def _divergences(self, batch: Batch) -> list[Tensor]:
        """Of every sequence, at each of its tokens, how far the model is from what the original said, in float32."""
        found = []
        counts = [predictions(self.context, one) for one in _singles(batch)]
        for sequence, logits in zip(batch.sequences.tolist(), self.logits(batch).split(counts), strict=True):
            stored = self.reference.read((sequence, 0), 0, len(logits), logits.device, torch.float32)
            assert stored is not None, "not remembered"
            second, first = logits.log_softmax(1, dtype=torch.float32), stored.logprobs
            if isinstance(first, Kept):
                first = Kept(**{name: part if name == "ids" else part.float() for name, part in vars(first).items()})
                found.append(kl_least(first, second))
            else:
                found.append(kl_divergence(first, second))
        return found

    @torch.no_grad()
    def heldout_divergences(self) -> Tensor:
        """The mean divergence of every held-out sequence, [W] float64 on the CPU."""
        batches = self._batches(self.heldout)
        return torch.stack([tokens.double().mean().cpu() for batch in batches for tokens in self._divergences(batch)])

    def backward(self, step: int) -> float:
        """The mean divergence of a step's sequences, whose gradients are taken, a few sequences at a time."""
        chosen = [self.training[place] for place in self.order[step]]
        tokens = sum(predictions(self.context, single) for single in chosen)
        total = 0.0
        for batch in self._batches(chosen):
            loss = torch.cat(self._divergences(batch)).sum() / tokens
            if loss.requires_grad:  # it does not where no token came to a quantized expert
                loss.backward()  # type: ignore[no-untyped-call]
            total += float(loss.detach())
        return total

    @cached_property
    def order(self) -> list[list[int]]:
        """The sequences of every step: all in a drawn order, then again in another one."""
        generator = torch.Generator().manual_seed(self.context.recipe.seed)
        wanted, drawn = self.section.steps * self.section.batch_size, list[int]()
        while len(drawn) < wanted:
            drawn += torch.randperm(len(self.training), generator=generator).tolist()
        size = self.section.batch_size
        return [drawn[start : start + size] for start in range(0, wanted, size)]


def _singles(batch: Batch) -> list[Batch]:
    """A batch's sequences, without images: to be counted."""
    rows = range(len(batch.sequences))
    return [
        Batch(input_ids=batch.input_ids[i : i + 1], mask=batch.mask[i : i + 1], sequences=batch.sequences[i : i + 1])
        for i in rows
    ]
