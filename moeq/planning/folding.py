"""What folding norms needs before a run begins: two float32 versions of what is resident, a block, a checkpoint."""

from __future__ import annotations

from moeq.artifacts.reparam import NAME
from moeq.models.same_outputs import LOGIT_BYTES
from moeq.planning.hours import Hours
from moeq.planning.result import Need, Term
from moeq.planning.sizes import ModelSizes, Work
from moeq.stages.context import FOLDED, Context
from moeq.stages.reparam import settings

WIDTH = 4  # bytes of a number in float32
PROGRAM = 700 << 20  # Python, torch and transformers
PASSES = 4  # over the model: where norms lead, calibration, the folded model, what was written
COMPARED = 3  # versions whose perplexity is measured
BLOCKS = 3  # a block, its changed parameters, and those as they are written
STATES = 4  # hidden states that a stopped batch holds a token
ROW = 2 << 10  # of a norm in the report


def folding_need(context: Context, sizes: ModelSizes, work: Work, hours: Hours | None) -> Need:
    """Memory, disk and, where rates were measured, time of `moeq reparam`."""
    section = settings(context)
    text = work.calibration
    tokens = min(section.samples, text.sequences) * text.length
    gpu = context.device.type == "cuda"
    weights = sum(sizes.block_parameters) + sizes.resident_parameters
    disk = weights * WIDTH if section.dtype == "float32" else weights * sizes.source_dtype.itemsize
    terms = (
        Term(what="program", bytes=PROGRAM),
        Term(what="resident weights, twice", bytes=2 * sizes.resident_parameters * WIDTH, gpu=gpu),
        Term(what="decoder block in float32", bytes=BLOCKS * max(sizes.block_parameters) * WIDTH, gpu=gpu),
        Term(what="logits", bytes=2 * min(LOGIT_BYTES, tokens * sizes.vocabulary * WIDTH)),
        Term(
            what="stopped batches",
            bytes=STATES * tokens * sizes.hidden_size * WIDTH,
            gpu=gpu,
            lever="fewer reparam.samples",
        ),
    )
    read = PASSES * sizes.disk + 2 * disk
    return Need(
        stage="reparam",
        ram_terms=tuple(term for term in terms if not term.gpu),
        gpu_terms=tuple(term for term in terms if term.gpu),
        read=read,
        lasting={FOLDED: disk, NAME: 2 * len(sizes.block_parameters) * ROW},
        linked=0,
        temporary=0,
        seconds=None if hours is None else _seconds(context, text.sequences, hours),
    )


def _seconds(context: Context, sequences: int, hours: Hours) -> float:
    """Passes as long as the profile's over fewer sequences, and as eval's over its text."""
    section, variants = settings(context), 2 + len(context.recipe.eval.compare)
    passes = PASSES * hours.seconds("profile") * min(1.0, section.samples / sequences)
    return passes + (COMPARED * hours.seconds("eval") / variants if section.compare else 0.0)
