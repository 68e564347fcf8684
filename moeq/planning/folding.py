"""What folding norms needs before a run begins: two float32 versions of what is resident, a block, a checkpoint."""

from __future__ import annotations

from typing import Any

from moeq.artifacts.run import FOLDED
from moeq.integers.artifacts.reparam import NAME
from moeq.integers.same_outputs import LOGIT_BYTES
from moeq.models.forward import image_positions
from moeq.planning.hours import Hours
from moeq.planning.result import Need, Term
from moeq.planning.sizes import ModelSizes, Work
from moeq.stages import integer_forward
from moeq.stages.context import Context
from moeq.stages.reparam import settings

WIDTH = 4  # bytes of a number in float32
PROGRAM = 700 << 20  # Python, torch and transformers
PASSES = 4  # over the model: where norms lead, calibration, the folded model, what was written
COMPARED = 3  # versions whose perplexity is measured
BLOCKS = 3  # a block, its changed parameters, and those as they are written
STATES = 4  # hidden states that a stopped batch holds a token
ROW = 2 << 10  # of a norm in the report
MANIFEST_BLOCK = 30 << 10  # of a block's operations, constants and values in the manifest of an integer forward

# bytes that the test vectors have, with accumulators and codes: of a position and channel of the hidden size (both
# norms, query, key, value, attention, projection, sums of the stream), of a query, head and key, of a query and head,
# of a position and channel within a feed-forward part, of what an expert gives back, of a position and router's expert
STREAM, PAIR, HEAD, WITHIN, GIVEN, ROUTED = 58, 5, 12, 7, 8, 8


def folding_need(context: Context, sizes: ModelSizes, work: Work, hours: Hours | None, processor: Hours | None) -> Need:
    """Memory, disk and, where rates were measured, time of `moeq reparam` by both clocks."""
    section = settings(context)
    text = work.calibration
    tokens = min(section.samples, text.sequences) * text.length
    gpu = context.model.device.type == "cuda"
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
        lasting={FOLDED: disk, NAME: 2 * len(sizes.block_parameters) * ROW} | _integer_forward(context),
        linked=0,
        temporary=0,
        seconds=None if hours is None else _seconds(context, text.sequences, hours),
        processor_seconds=None if processor is None else _seconds(context, text.sequences, processor),
    )


def _integer_forward(context: Context) -> dict[str, int]:
    """Bytes of the integer forward's files; none where the recipe wants none."""
    section = settings(context).integer
    if section is None:
        return {}
    model, layers = context.model.described
    config: Any = model.config
    positions, hidden = image_positions(model), config.hidden_size
    vectors = config.num_hidden_layers * (
        STREAM * positions * hidden + config.num_attention_heads * positions * (PAIR * positions + HEAD)
    )
    dense = config.num_hidden_layers - len(layers)
    vectors += dense * WITHIN * positions * config.intermediate_size
    for layer in layers:
        within = WITHIN * config.moe_intermediate_size + GIVEN * hidden
        vectors += positions * (config.num_experts_per_tok * within + ROUTED * layer.num_experts)
    weights = sum(one.numel() * (1 if one.dim() > 1 else WIDTH) for one in model.parameters())
    blocks = config.num_hidden_layers * MANIFEST_BLOCK
    tasks = getattr(config, "num_tasks", 1)
    return {integer_forward.FOLDER: tasks * (section.vectors * vectors + weights + blocks)}


def _seconds(context: Context, sequences: int, hours: Hours) -> float:
    """Passes as long as the profile's over fewer sequences, and as eval's over its text."""
    section, variants = settings(context), 2 + len(context.recipe.eval.compare)
    passes = PASSES * hours.seconds("profile") * min(1.0, section.samples / sequences)
    return passes + (COMPARED * hours.seconds("eval") / variants if section.compare else 0.0)
