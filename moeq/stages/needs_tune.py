"""What tuning needs: the whole model with gradients, and what the original said on the disk."""

from __future__ import annotations

from moeq.evaluation.reference_logits import stored_bytes
from moeq.quantizers.layer_data import heldout_stride
from moeq.quantizers.memory import working_memory
from moeq.quantizers.tune import MEASURED
from moeq.recipe import TuneSection
from moeq.stages.needs import Moment, Rates, Sizes

MOST_HELD_OUT = 64  # sequences: enough to tell a gain of some percent from chance, and measured many times
LOGITS = 40  # bytes of a number that the model says: itself, its logarithm and gradients, the original's in float64
KEPT = 2.0  # what a decoder layer keeps for gradients, beside what it has at once
BACKWARD = 2  # forward passes that gradients are as long as
COMPARING = 8  # passes over the logits
STATE = 6 * 4  # bytes of a scale that is trained: its change, gradient, two moments, the best, the start
UNIT_BYTES = 2  # of a weight


def sequences_at_once(sizes: Sizes, memory: int, length: int) -> int:
    """Sequences of a length that are trained on at once within some memory, at least one."""
    return max(1, int(memory // (token_bytes(sizes) * length)))


def token_bytes(sizes: Sizes) -> float:
    """Activations of one token in all decoder layers, kept for gradients, and what the model says of it."""
    return sum(sizes.block_visits) * KEPT * sizes.activations(1) + LOGITS * sizes.vocabulary


def sequences(sizes: Sizes, section: TuneSection) -> tuple[int, int]:
    """How many are trained on, and how many are held out."""
    count = section.sequences or sizes.calibration.sequences
    heldout = len(held_out(count, heldout_stride(sizes.recipe.losses.heldout_fraction)))
    return count - heldout, heldout


def held_out(count: int, stride: int) -> list[int]:
    """The places of sequences that are held out: the last of every `stride`, evenly thinned to MOST_HELD_OUT."""
    every = range(stride - 1, count, stride)
    wanted = min(len(every), MOST_HELD_OUT)
    return [every[place * len(every) // wanted] for place in range(wanted)]


def moment(sizes: Sizes, section: TuneSection) -> Moment:
    """The model with its packed experts as units, one layer's gradients, and some sequences in all layers."""
    memory, length = working_memory(section.working_memory, sizes.device), sizes.calibration.length
    here = min(section.batch_size, sequences_at_once(sizes, memory, length))
    return {
        **sizes.model(),
        **sizes.words(),
        "units of codes": UNIT_BYTES * sizes.expert_parameters,
        "scales in training": STATE * sizes.scales(),
        "gradients of a layer": 2
        * sizes.largest.num_experts
        * sizes.largest.parameters_per_expert
        * sizes.dtype.itemsize,
        "activations and logits for gradients": here * length * token_bytes(sizes),
    }


def temporary(sizes: Sizes, section: TuneSection) -> int:
    """Bytes of what the original said."""
    tokens = sum(sequences(sizes, section)) * int(sizes.calibration.length)
    return stored_bytes(tokens, sizes.vocabulary, sizes.dtype.itemsize)


def seconds(sizes: Sizes, section: TuneSection, rates: Rates) -> float:
    """The original's answers, the steps, and the held-out text every few of them."""
    trained, heldout = sequences(sizes, section)
    length = sizes.calibration.length
    passes = trained + (2 + MEASURED) * heldout + (1 + BACKWARD) * section.steps * section.batch_size
    batch = length * section.batch_size
    forwards = sizes.forward(rates, batch, passes / section.batch_size, head=True)
    compared = COMPARING * passes * length * sizes.vocabulary * 4 / rates.elementwise_bytes
    written = section.steps * 2 * 4 * sizes.expert_parameters / rates.elementwise_bytes
    return forwards + compared + written
