"""How long every stage will take, from measured rates and what it does.

A forward pass of a batch: products of everything but the experts, every expert once on its share of the tokens,
attention, and passes over the hidden states. Reading a checkpoint a second time comes from the page cache when it fits
there. What the stages write is hashed once more for their records.
"""

from __future__ import annotations

import torch

from moeq.planning.disk import Disk
from moeq.planning.effects import heldout
from moeq.planning.memory import loss_rows, read_share
from moeq.planning.placed import methods, placed_bytes
from moeq.planning.probe import PASSES, Rates, expert_tokens, losses_operations, losses_tokens
from moeq.planning.sizes import ModelSizes, Work
from moeq.quantizers.layer_data import SAMPLE_TOKENS
from moeq.quantizers.quantizer import WEIGHT_OPERATIONS, on_demand
from moeq.quantizers.refine import BATCH_ROWS
from moeq.recipe import Recipe
from moeq.stages.expert_effects import AT_ONCE

CALLS = 2e-3  # seconds that Python and small kernels take in one decoder layer and batch
EXPERT_CALLS = 1e-4  # and for one expert of it
PACKED_CALLS = 1e-3  # and for one packed expert, unpacked in a batch or replaced in place
LOADING = 0.7  # seconds of building and filling a model, whatever its size
TOKENIZING = 1e-6  # seconds a token
ROW = 3e-5  # seconds a row of the loss table: made, written, read and summed up
LIBRARY = 3.0  # seconds of loading the model's classes, the tokenizer and, for eval, lm-eval
VERIFYING = 7.0  # of starting the target's process, which loads its libraries, and of a few tokens in it
COMPARING = 6  # passes over the logits in which two outputs are compared
TRACE_PASSES = 4  # passes over an expert's weights that its Hessian trace takes
REPORT = 2.0
REPORT_EXPERT = 5e-4


class Hours:
    """Seconds of every stage."""

    def __init__(
        self,
        sizes: ModelSizes,
        work: Work,
        recipe: Recipe,
        disk: Disk,
        rates: Rates,
        *,
        streams: bool,
        free: int,
        device: torch.device | str = "cpu",
    ) -> None:
        """free: bytes of memory that are left for the page cache."""
        self.device = device
        self.sizes, self.work, self.recipe, self.disk, self.rates = sizes, work, recipe, disk, rates
        self.streams, self.cached = streams, sizes.disk < free

    def seconds(self, stage: str) -> float:
        """Seconds of a stage, its files written, synced and hashed."""
        files = self.disk.lasting(stage) | (self.disk.store() if stage == "losses" else {})
        made = sum(files.values()) - self.disk.linked(stage)
        storing = made / self.rates.write_bytes + sum(files.values()) / self.rates.hash_bytes
        doing: float = getattr(self, f"_{stage}")()
        return doing + storing

    def _reading(self, size: float, *, first: bool = False) -> float:
        """Seconds of reading and stacking weights."""
        rate = self.rates.cached_bytes if self.cached and not first else self.rates.read_bytes
        return size / rate + size / self.rates.cached_bytes

    def _forward(self, tokens: float, batches: float, *, head: bool) -> float:
        """Seconds of running batches of `tokens` tokens through the whole model."""
        sizes, rates = self.sizes, self.rates
        share = tokens / self.work.calibration.batch_tokens
        dense = 2 * tokens * sizes.other_block_parameters / rates.matrix_flops
        routed = expert_tokens(sizes, int(tokens)) / expert_tokens(sizes, self.work.calibration.batch_tokens)
        experts = sum(layer.num_experts for layer in sizes.layers) * (rates.expert_seconds * routed + EXPERT_CALLS)
        blocks = len(sizes.block_parameters)
        passes = PASSES * tokens * sizes.hidden_size * sizes.dtype.itemsize / rates.elementwise_bytes
        layers = blocks * (rates.attention_seconds * share + passes + CALLS)
        logits = tokens * sizes.vocabulary
        last = 2 * logits * sizes.hidden_size / rates.matrix_flops + 8 * logits * 4 / rates.elementwise_bytes
        return batches * (dense + experts + layers + (last if head else 0))

    def _profile(self) -> float:
        text = self.work.calibration
        tokenizing = text.whole * TOKENIZING
        if self.work.evaluation is not None:
            tokenizing += self.work.evaluation.whole * TOKENIZING
        walk = self._forward(text.batch_tokens, text.batches, head=False)
        return LIBRARY / 3 + tokenizing + self._reading(self.sizes.disk, first=True) + walk

    def _losses(self) -> float:
        text, section = self.work.calibration, self.recipe.losses
        tokens, heldout = losses_tokens(self.sizes, self.work, section)
        sample = min(SAMPLE_TOKENS, int(text.tokens * (1 - section.heldout_fraction)))
        operations = sum(
            layer.num_experts * losses_operations(layer, tokens, heldout, section, sample)
            for layer in self.sizes.layers
        )
        shared = 2 * text.tokens * self.sizes.hidden_size**2 * len(self.sizes.layers) / self.rates.matrix_flops
        reading = self._reading(self.sizes.disk) if self.streams else 0
        walk = self._forward(text.batch_tokens, text.batches, head=False)
        rows = loss_rows(self.sizes, self.recipe) * ROW
        others = self.sizes.others.operations(text.tokens) / self.rates.losses_flops
        effects = self._layer_effects() + self._expert_effects()
        return reading + walk + shared + operations / self.rates.losses_flops + rows + others + effects

    def _layer_effects(self) -> float:
        """Seconds of the passes in which one layer after the other is quantized, and of making its replicas weights."""
        section = self.recipe.losses.layer_effects
        if section is None:
            return 0.0
        tokens, batches = heldout(self.sizes, self.work, self.recipe.losses, section, self.device)
        passes = (1 + len(self.sizes.layers)) * self._compared(tokens, 1.0)
        replacing = self.sizes.expert_parameters / self.rates.dequantized_weights
        replacing += sum(layer.num_experts for layer in self.sizes.layers) * PACKED_CALLS
        return batches * (passes + replacing)

    def _expert_effects(self) -> float:
        """Seconds of the passes in which one expert after the other is quantized; at most what the recipe allows.

        A pass runs from the expert's layer on: on average the later half of the model. With every few experts goes an
        exact pass, and once for each layer the check that it can be begun at.
        """
        section = self.recipe.losses.expert_effects
        if section is None:
            return 0.0
        layers = self.sizes.layers
        tokens, batches = heldout(self.sizes, self.work, self.recipe.losses, section, self.device)
        share = (len(layers) + 1) / (2 * len(layers))
        there = sum(layer.num_experts for layer in layers)
        experts = there if section.experts is None else min(section.experts, there)
        replacing = self.sizes.expert_parameters / there / self.rates.dequantized_weights + PACKED_CALLS
        one = batches * (self._compared(tokens, share) + replacing + self._compared(tokens, 1.0) / AT_ONCE)
        whole = experts * one + min(experts, len(layers)) * self._compared(tokens, share)
        return whole if section.seconds is None else min(whole, max(section.seconds, one))

    def _compared(self, tokens: float, share: float) -> float:
        """Seconds of one pass through a share of the decoder layers, and of comparing its output with the exact one."""
        layers = self._forward(tokens, 1, head=False)
        head = self._forward(tokens, 1, head=True) - layers
        comparing = COMPARING * tokens * self.sizes.vocabulary * 4 / self.rates.elementwise_bytes
        reading = self._reading(self.sizes.disk) if self.streams else 0.0
        return share * (layers + reading) + head + comparing

    def _assign(self) -> float:
        experts = self.sizes.experts_disk
        traces = self._reading(experts) + TRACE_PASSES * experts / self.rates.elementwise_bytes
        return loss_rows(self.sizes, self.recipe) * ROW / 10 + traces

    def _quantize(self) -> float:
        reading = self._reading(self.sizes.experts_disk * read_share(self.sizes, self.recipe))
        rounding = self._rounding() if on_demand(methods(self.recipe.assign, self.recipe)) else 0
        placed = placed_bytes(self.sizes, self.recipe.assign, self.recipe)
        return reading + rounding + placed / self.rates.cached_bytes + self._refine()

    def _refine(self) -> float:
        """Seconds of both runs, the repeated decoder layers and the training."""
        section, text = self.recipe.quantize.refine, self.work.calibration
        if section is None:
            return 0.0
        weights = self.sizes.expert_parameters
        training = section.iterations * weights * (6 * BATCH_ROWS + WEIGHT_OPERATIONS)
        reading = self._reading(self.sizes.disk) if self.streams else 0
        return (
            reading
            + 3 * self._forward(text.batch_tokens, text.batches, head=False)
            + training / self.rates.losses_flops
        )

    def _export(self) -> float:
        rest = self.sizes.disk - self.sizes.experts_disk
        placed = placed_bytes(self.sizes, self.recipe.assign, self.recipe)
        verifying = VERIFYING + 2 * self._reading(self.sizes.disk) if self.recipe.export.verify else 0.0
        return self._reading(rest) + placed / self.rates.hash_bytes + verifying

    def _eval(self) -> float:
        sizes, compare = self.sizes, len(self.recipe.eval.compare)
        text, tasks = self.work.evaluation, self.work.tasks
        forwards = batches = 0.0
        if text is not None:
            forwards += self._forward(text.batch_tokens, text.batches, head=True)
            batches += text.batches
        if tasks is not None:
            forwards += self._forward(tasks.batch * tasks.mean_tokens, tasks.batches * tasks.steps, head=True)
            batches += tasks.batches * tasks.steps
        dequantizing = (sizes.expert_parameters + sizes.others.parameters) / self.rates.dequantized_weights
        dequantizing += sum(layer.num_experts for layer in sizes.layers) * PACKED_CALLS
        sections = [self.recipe.assign, *self.recipe.eval.compare]
        rounding = sum(on_demand(methods(section, self.recipe)) for section in sections) * self._rounding()
        in_place = (1 + compare) * forwards + compare * dequantizing + rounding + self._low_precision(dequantizing)
        packed = forwards + batches * dequantizing
        reads = 2.0 + (compare > 0)
        if self.streams:
            walks = (0 if text is None else 1) + (0 if tasks is None else tasks.batches * tasks.steps)
            reads = (1 + compare) * walks + 1
            in_place += compare * dequantizing * max(0, walks - 1)
        library = 0 if tasks is None else LIBRARY
        loading = LOADING * (1 if self.streams else 2 + (compare > 0))
        return library + loading + reads * self._reading(sizes.disk) + dequantizing + in_place + packed

    def _rounding(self) -> float:
        """Seconds of rounding and packing every expert once at one width."""
        return WEIGHT_OPERATIONS * self.sizes.expert_parameters / self.rates.losses_flops

    def _low_precision(self, dequantizing: float) -> float:
        """Seconds of the curves: a pass for every point, and in every order every expert replaced about once."""
        text, found = self.work.evaluation, 0.0
        if text is None:
            return found
        for section in self.recipe.eval.low_precision:
            orders = 2 + section.seeds
            share = min(1.0, (section.sequences or text.sequences) / text.sequences)
            one = share * self._forward(text.batch_tokens, text.batches, head=True)
            if self.streams:
                one += self._reading(self.sizes.disk) + dequantizing
            found += orders * (len(section.shares) * one + dequantizing) + self._reading(self.sizes.disk)
        return found

    def _estimate(self) -> float:
        return self.disk.estimating * (1 + len(self.recipe.eval.compare))

    def _report(self) -> float:
        return REPORT + REPORT_EXPERT * sum(layer.num_experts for layer in self.sizes.layers)
