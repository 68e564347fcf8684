"""What losses needs: a walk with batches of experts in every layer (quantizers/layer.py), the store, the effects."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from moeq.artifacts import effects, expert_effects, replica_store, replicas
from moeq.artifacts.losses import NAME
from moeq.artifacts.tensor_files import safetensors_bytes
from moeq.models.experts import ExpertLayer
from moeq.models.loading import memory_bytes
from moeq.quantizers.layer import expert_batches
from moeq.quantizers.layer_data import SAMPLE_TOKENS, heldout_stride, part_rows, row_bytes
from moeq.quantizers.memory import working_memory
from moeq.quantizers.quantizer import WEIGHT_OPERATIONS, BatchSizes
from moeq.recipe import ExpertEffectsSection, LayerEffectsSection, LossesSection
from moeq.registry import QUANTIZERS
from moeq.stages import losses_tasks
from moeq.stages.context import Context
from moeq.stages.effects import kept_numbers, passes, sequence_count, sequences_at_once
from moeq.stages.expert_bytes import store_bytes
from moeq.stages.expert_effects import AT_ONCE
from moeq.stages.needs import CAPTURED, PACKED_CALLS, STATES, Moment, Needs, Rates, Sizes
from moeq.stages.replicas import entries
from moeq.stages.workers import MEMORY_SHARE, SERVER, WORKER, Openers, worker_count, worker_threads
from moeq_kernels.packed import packed_shapes

SET = "0" * 64  # stands for the digest that names a set in the store
ROW = 1300  # bytes of one row of the loss table as a Python dictionary
ROW_SECONDS = 3e-5  # a row: made, written, read and summed up
COMPARED = 5  # effects: two outputs as logarithmic probabilities and what is between them, in float32
COMPARING = 6  # passes over the logits in which two outputs are compared
TABLE, TABLE_ROW = 5320, 21.6  # bytes of losses.parquet
ROWS, ROWS_ROW, ROWS_TRACE = 110, 408, 14  # bytes of a file of rows in the store, beside the layer's name
INDEX, INDEX_MADE, INDEX_LAYER, INDEX_ENTRY = 90, 112, 8, 97  # bytes of replicas.json


def batch_moments(layer: ExpertLayer, section: LossesSection, routed: int, *, gpu: bool) -> list[tuple[int, int]]:
    """Bytes of the tensors of the last batch of experts at its fullest moments, and those of the layer's packed
    replicas by then. routed: tokens of its busiest expert.
    """
    first = next(expert_batches(layer, section))
    count = first.stop - first.start
    every = store_bytes(layer, section.bits, section.encoding)
    own = every * count // layer.num_experts
    quantizers = [QUANTIZERS.get(method) for method in section.methods]
    store = every if any(quantizer.stored for quantizer in quantizers) else 0
    sizes = BatchSizes(layer=layer, settings=section, experts=count, tokens=routed, lent=SAMPLE_TOKENS, gpu=gpu)
    moments = [(row_bytes(layer, routed + SAMPLE_TOKENS), 0)]
    for quantizer in quantizers:
        there = store - own if quantizer.stored else store
        moments += [(size, there) for part in quantizer.chain() for size in part.memory(sizes)]
    if store:
        moments.append((own, store))  # packed, and copied to where they stay
        if count < layer.num_experts:
            moments.append((0, 2 * store))  # joined
    rounded = 0 if all(quantizer.stored for quantizer in quantizers) else own
    rows = 4 * section.max_measured_tokens * (2 * layer.hidden_size + 7 * layer.intermediate_size)
    moments.append((rounded + rows + 8 * layer.parameters_per_expert, store))
    return [(4 * count * layer.parameters_per_expert + batch, replicas) for batch, replicas in moments]


def expert_tokens(sizes: Sizes, section: LossesSection) -> tuple[float, float]:
    """Mean calibration and held-out tokens of an expert."""
    share = sizes.geometry.top_k / sizes.layers[0].num_experts
    calibration = sizes.calibration.tokens * (1 - section.heldout_fraction)
    heldout = sizes.calibration.tokens * section.heldout_fraction
    return calibration if section.tokens == "all" else calibration * share, heldout * share


def losses_operations(layer: ExpertLayer, tokens: float, heldout: float, section: LossesSection, sample: int) -> float:
    """Floating-point operations for one expert; `tokens` of its own to calibrate, `heldout` to measure: what the
    quantizers say of themselves, and the measured outputs."""
    widths, products = len(section.bits) * len(section.methods), len(layer.projections)
    sizes = BatchSizes(layer=layer, settings=section, experts=1, tokens=tokens, lent=sample)
    chosen = [part for method in section.methods for part in QUANTIZERS.get(method).chain()]
    rows = 2 * min(heldout, section.max_measured_tokens) * layer.hidden_size * layer.intermediate_size
    measured = rows * products + rows * widths * (2 * products if section.per_projection else products)
    made: float = sum(part.operations(sizes) for part in chosen)
    return made + measured + WEIGHT_OPERATIONS * layer.parameters_per_expert * widths


def _store(sizes: Sizes) -> dict[str, int]:
    """Bytes of the files in an empty replica store, by name."""
    section, folder, files = sizes.recipe.losses, Path(SET), {replica_store.MARKER: 56}
    for layer in sizes.layers:
        count = layer.num_experts * (1 + len(layer.projections) if section.per_projection else 1)
        shapes, stamps = {}, {}
        for made in entries(section):
            more = ROWS_TRACE if QUANTIZERS.get(made.method).knows_hessians else 0
            name = replicas.rows_file(folder, layer.index, made.rows).as_posix()
            files[name] = ROWS + count * (ROWS_ROW + more + len(layer.name))
            if made.entry is None:
                continue
            encoding = section.encoding.at(made.bits)
            described = {name: {"inputs": layer.shape(name)[1]} | encoding.describe() for name in layer.projections}
            stamps[made.entry] = replicas.described(made.entry, SET, described)
            for name in layer.projections:
                parts = packed_shapes(*layer.shape(name), made.bits, encoding)
                for part, (shape, dtype) in parts.items():
                    shapes[f"{made.entry}.{name}.{part}"] = (dtype, (layer.num_experts, *shape))
        if stamps:
            name = replicas.layer_file(folder, layer.index).as_posix()
            files[name] = safetensors_bytes(shapes, replicas.layer_metadata(layer.index, stamps))
    return files | sizes.others.store()


def needs(sizes: Sizes) -> Needs:
    """A walk over the calibration text, which stops in every layer while its experts are quantized; the effects."""
    section, text, hidden = sizes.recipe.losses, sizes.calibration, sizes.geometry.hidden_size
    routed = _routed(sizes)
    count = worker_count(sizes.recipe, sizes.device)
    workers = None if count is None else Workers.of(sizes, count, routed)
    batch, packed = max(batch_moments(sizes.largest, section, routed, gpu=sizes.gpu), key=sum)
    rows, made, store = sizes.loss_rows(), entries(section), _store(sizes)
    floats = 4 * hidden * min(part_rows(hidden), sizes.layer_tokens * (1 - section.heldout_fraction))
    floats += 0 if sizes.dtype.itemsize == 4 else 4 * hidden * sizes.layer_tokens
    here = {"batch of experts": batch, "packed replicas of a layer": packed}
    quantizing = {
        "tokens in float32": floats, "rows of a layer": rows // len(sizes.layers) * ROW,
        **(here if workers is None else {}), "sums over inputs of other modules": sizes.others.sums(),
        **sizes.heap(text.batch_tokens),
    }  # fmt: skip
    kept = len([each for each in made if each.entry is not None])
    files = {NAME: int(TABLE + TABLE_ROW * rows)}
    files[replicas.INDEX] = INDEX + INDEX_MADE * len(made) + len(sizes.layers) * (INDEX_LAYER + INDEX_ENTRY * kept)
    files |= sizes.others.artifacts()
    measured = [] if section.layer_effects is None else [_layer_effects(sizes, section.layer_effects)]
    measured += [] if section.expert_effects is None else [_expert_effects(sizes, section.expert_effects)]
    for each in measured:
        files |= each.files

    def seconds(rates: Rates) -> float:
        sample = min(SAMPLE_TOKENS, int(text.tokens * (1 - section.heldout_fraction)))
        tokens, heldout = expert_tokens(sizes, section)
        work = sum(
            layer.num_experts * losses_operations(layer, layer.visits * tokens, layer.visits * heldout, section, sample)
            for layer in sizes.layers
        )
        work += sizes.others.operations(text.tokens)
        inputs = text.tokens * sum(layer.visits for layer in sizes.layers)
        shared = 2 * inputs * hidden**2 / rates.matrix_flops
        passes = sum(each.seconds(rates) for each in measured) + rows * ROW_SECONDS
        walk, made = sizes.walk_seconds(rates) + shared, work / rates.losses_flops
        return (walk + made if workers is None else workers.seconds(walk, made)) + passes

    moments = [
        {**sizes.loading(), **sizes.stopped(2)},
        {**sizes.held(), **sizes.stopped(STATES, CAPTURED), **sizes.running(text.batch_tokens)},
        {**sizes.held(), **sizes.stopped(STATES, 1), **quantizing},
    ]
    return Needs(
        moments=[
            *(moments if workers is None else [{**moment, **workers.held} for moment in moments]),
            *(moment for each in measured for moment in each.moments),
        ],
        files=files,
        read=sizes.walked if sizes.streams else 0,
        temporary=max(store.values()) if (sizes.context.store / replica_store.MARKER).is_file() else 0,
        store=store,
        seconds=seconds,
    )


@dataclass(frozen=True, kw_only=True)
class Workers:
    """Processes beside the run's own that quantize experts. held: bytes by what takes them, all of it at once; ahead:
    layers that are out while the model runs on; at_once: of them as many as compute side by side on this machine."""

    held: Moment
    ahead: int
    at_once: float

    @classmethod
    def of(cls, sizes: Sizes, count: int, routed: int) -> Workers:
        """What `count` workers take; a layer is out while the next one runs where this machine's memory has room for
        two. On GPUs `held` is what the first one holds beside the run's own. routed: tokens of the layer's busiest
        expert."""
        recipe, layer, section = sizes.recipe, sizes.largest, sizes.recipe.losses
        experts = len(losses_tasks.split(layer, section, count, sizes.device)[0][0])
        few = replace(layer, num_experts=experts)
        batch = max(map(sum, batch_moments(few, section, routed, gpu=sizes.gpu)))
        floats = 0 if sizes.dtype.itemsize == 4 else 4 * sizes.layer_tokens * layer.hidden_size
        weights = layer.num_experts * layer.weights_per_expert * sizes.dtype.itemsize
        given = weights + sizes.layer_tokens * (sizes.token + 12 * sizes.geometry.top_k + 16) + 4 * layer.hidden_size**2
        made = store_bytes(layer, section.bits, section.encoding)
        elsewhere = recipe.engine.startswith("ray:")  # on a cluster's nodes, not in this machine's memory
        own = {"workers": count * WORKER + SERVER, "batches of experts of workers": count * (batch + floats)}
        own = {} if elsewhere else own
        if sizes.gpu:
            held = {} if elsewhere else {"batch of experts of a worker": batch + floats}
            room = MEMORY_SHARE * memory_bytes(torch.device("cpu")) - count * WORKER - SERVER
            return cls(held=held, ahead=int(2 * (given + made) <= room), at_once=count)
        cores = len(os.sched_getaffinity(0)) / worker_threads(recipe)
        at_once = count if elsewhere else max(1.0, min(count, cores))
        for ahead in (1, 0):
            held = own | {"layers handed to workers": (1 + ahead) * given, "packed replicas of a layer": 2 * made}
            both = sum(held.values()) + sum(sizes.held().values()) + sum(sizes.stopped(STATES, CAPTURED).values())
            if both <= MEMORY_SHARE * memory_bytes(torch.device("cpu")):
                break
        return cls(held=held, ahead=ahead, at_once=at_once)

    def seconds(self, walk: float, made: float) -> float:
        """Seconds of a walk, and of what is made in its layers by one worker, side by side where layers are ahead."""
        each = made / self.at_once
        return max(walk, each) if self.ahead else walk + each


def layers_ahead(context: Context) -> int:
    """How many layers are with the workers while the model runs on: 1, or 0 where memory has no room for two."""
    count = worker_count(context.recipe, context.model.device)
    if count is None:
        return 0
    sizes = Sizes(context)
    return Workers.of(sizes, count, _routed(sizes)).ahead


def _routed(sizes: Sizes) -> int:
    """Calibration tokens of a popular expert, at every visit: three times the mean."""
    share = 1.0 if sizes.recipe.losses.tokens == "all" else 3 * sizes.geometry.top_k / sizes.largest.num_experts
    return int(sizes.layer_tokens * min(1.0, share))


def _layer_effects(sizes: Sizes, section: LayerEffectsSection) -> Needs:
    """One run with every layer's change carried along: on average through the later half of the model, and a whole run
    to compare with. Of a streamed model every block is read twice, and for the whole run again. Of a looped model no
    change is carried: the whole of it runs for each."""
    layers = len(sizes.layers)
    batches, tokens, groups, moment = _layer_effects_batches(sizes, section)
    opened = effect_openers(sizes, section)

    def seconds(rates: Rates) -> float:
        blocks = sizes.forward(rates, tokens, 1, head=False)
        replacing = sizes.expert_parameters / rates.dequantized_weights + sizes.experts * PACKED_CALLS
        output = _output(sizes, rates, tokens)
        run = batches * ((passes(layers) - 1) * blocks + (1 + layers) * output)
        read = sizes.reading(rates, sizes.walked) if sizes.streams else 0.0
        at_once = 1 if opened is None else opened.at_once
        if sizes.most_visits > 1:
            return batches * (replacing + (1 + layers) * (blocks + output + read)) / at_once
        return run / at_once + max(1, groups / at_once) * (replacing + 2 * read) + blocks + output + read

    moments = _by_workers(sizes, moment, opened)
    return Needs(moments=moments, files={effects.NAME: 110 + 22 * layers}, seconds=seconds)


def _layer_effects_batches(sizes: Sizes, section: LayerEffectsSection) -> tuple[int, float, int, Moment]:
    """Batches whose outputs are compared, tokens of one, groups of them that are carried together, and what is held."""
    layers, text = len(sizes.layers), sizes.calibration
    kept = kept_numbers(layers, sizes.geometry.hidden_size)
    count = sequence_count(section, layers, text.sequences)
    there, batches, tokens = _compared(sizes, count, kept)
    memory = working_memory(sizes.recipe.losses.working_memory, sizes.device)
    states = text.length * (layers + 1) * sizes.token
    groups = min(batches, -(-there * states // max(memory, states)))
    numbers = COMPARED * sizes.vocabulary * 4 + sizes.vocabulary * sizes.dtype.itemsize
    held = {"outputs that are compared": tokens * numbers, "hidden states of layers' changes": there * states / groups}
    return batches, tokens, groups, {**sizes.held(), **sizes.words(), **held, **sizes.running(tokens)}


def effect_openers(sizes: Sizes, section: LayerEffectsSection | ExpertEffectsSection) -> Openers | None:
    """Workers among which the text of the layers' effects is divided, or the experts of whom each is measured; None:
    the run itself measures them."""
    if isinstance(section, LayerEffectsSection):
        parts, _, _, moment = _layer_effects_batches(sizes, section)
    else:
        parts, (_, _, moment) = _measured_experts(sizes, section), _expert_effects_batches(sizes, section)
    return Openers.of(sizes.recipe, sizes.device, parts, sum(moment.values()))


def _by_workers(sizes: Sizes, moment: Moment, opened: Openers | None) -> list[Moment]:
    """What is held while effects are measured, by the run itself or by workers, whose models are theirs."""
    return [moment if opened is None else {**(moment if sizes.gpu else {}), **opened.held}]


def _measured_experts(sizes: Sizes, section: ExpertEffectsSection) -> int:
    return min(section.experts or sizes.experts, sizes.experts)


def _compared(sizes: Sizes, count: int, kept: int) -> tuple[int, int, float]:
    """Held-out sequences that effects are measured on, batches of them whose outputs fit, tokens of a batch."""
    losses, text = sizes.recipe.losses, sizes.calibration
    there = max(1, min(count, text.sequences // heldout_stride(losses.heldout_fraction)))
    memory = working_memory(losses.working_memory, sizes.device)
    batches = -(-there // min(there, sequences_at_once(memory, sizes.vocabulary, text.length, kept)))
    return there, batches, there * text.length / batches


def _output(sizes: Sizes, rates: Rates, tokens: float) -> float:
    """Seconds of the output of some tokens, and of comparing it."""
    head = sizes.forward(rates, tokens, 1, head=True) - sizes.forward(rates, tokens, 1, head=False)
    return head + COMPARING * tokens * sizes.vocabulary * 4 / rates.elementwise_bytes


def _expert_effects(sizes: Sizes, section: ExpertEffectsSection) -> Needs:
    """The passes in which one expert after the other is quantized; at most as long as the recipe allows.

    An expert's runs from its layer on: on average the later half of the model, but of a looped model all of it. With
    every few experts goes an exact pass.
    """
    layers, measured = len(sizes.layers), _measured_experts(sizes, section)
    batches, tokens, moment = _expert_effects_batches(sizes, section)
    opened = effect_openers(sizes, section)

    def seconds(rates: Rates) -> float:
        blocks, output = sizes.forward(rates, tokens, 1, head=False), _output(sizes, rates, tokens)
        blocks += sizes.reading(rates, sizes.walked) if sizes.streams else 0.0
        replacing = sizes.expert_parameters / rates.dequantized_weights + sizes.experts * PACKED_CALLS
        part = (layers + 1) / (2 * layers) if sizes.most_visits == 1 else 1
        later = blocks * part + output
        expert = batches * (later + replacing / sizes.experts + (blocks + output) / AT_ONCE)
        expert /= 1 if opened is None else opened.at_once
        most = float("inf") if section.seconds is None else section.seconds
        return min(measured * expert, max(most, expert))

    files = {
        expert_effects.NAME: 170 + 36 * sizes.experts + 25 * layers,
        expert_effects.MEASURED: 150 + 26 * measured,
    }
    return Needs(moments=_by_workers(sizes, moment, opened), files=files, seconds=seconds)


def _expert_effects_batches(sizes: Sizes, section: ExpertEffectsSection) -> tuple[int, float, Moment]:
    """Batches whose outputs are compared, tokens of one, and what is held."""
    kept = AT_ONCE * sizes.geometry.hidden_size  # what goes into the layers
    _, batches, tokens = _compared(sizes, section.sequences, kept)
    numbers = COMPARED * sizes.vocabulary * 4 + (sizes.vocabulary + kept) * sizes.dtype.itemsize
    held = {"outputs that are compared": tokens * numbers}
    return batches, tokens, {**sizes.held(), **sizes.words(), **held, **sizes.running(tokens)}
