"""What eval needs: the model with what is swapped in it, the exported checkpoint, workers with models of their own."""

from __future__ import annotations

from collections.abc import Sequence

from moeq.artifacts.evaluation import NAME, SAMPLES
from moeq.evaluation.divergence import TOKEN_BYTES, slice_bytes
from moeq.evaluation.reference_logits import kept_logits, stored_bytes
from moeq.stages import assign, following, workers
from moeq.stages.needs import LIBRARY, PACKED_CALLS, Moment, Needs, Rates, Sizes
from moeq.stages.text_sizes import Text

CHECKED = Text(sequences=2, length=32, batch=2, whole=64)  # on which the exported checkpoint is compared
LOADING = 0.7  # seconds of building and filling a model, whatever its size
REQUEST_OBJECTS = 6000  # bytes of a request as objects
CHANGE, SCORES, ROW, EXPERT = 370, 180, 750, 14  # bytes of eval.json beside assignments, an expert's indentation last
DIVERGENCE, CELLS, SUMS = 1400, 500, 98  # bytes of one, of its cells in the table, and of what is summed of a sequence
RECORDED, COMPARED = {True: 60, False: 200}, {True: 110, False: 280}  # bytes that pass for each logit, by whether all
# are kept: of the original, and of what is compared with it
SAMPLE_ROW, SEQUENCE, REQUEST, CHARACTER = 4000, 39, 375, 1.45  # bytes of samples.json, of which for every assignment


def needs(sizes: Sizes) -> Needs:
    """The model with what is swapped in it, then the exported checkpoint, with logits in float32."""
    text, tasks, section = sizes.evaluation, sizes.tasks, sizes.recipe.eval
    given, count = [part for part in (text, tasks) if part is not None], len(sizes.placed)
    rows = count + len(section.dynamic)
    reference = 0 if text is None or sizes.images else stored_bytes(text.tokens, sizes.vocabulary, sizes.dtype.itemsize)
    walks = (text is not None) + (0 if tasks is None else tasks.batches)  # of a streamed model, for one assignment
    changes = len(section.tasks) + (len(section.tasks) > 1) + (text is not None)
    row = ROW + SCORES * len(section.tasks) + assign.assignment_bytes(sizes) + EXPERT * sizes.experts
    items = SAMPLE_ROW + sum((SEQUENCE if part is text else REQUEST) * part.sequences for part in given)
    files = {NAME: ROW + rows * row}
    if not sizes.images:
        characters = sum(part.characters for part in given)
        divergence = 0 if text is None else DIVERGENCE
        sums = 0 if text is None else CELLS + SUMS * text.sequences
        files = {
            NAME: ROW + rows * (row + CHANGE * changes + divergence),
            SAMPLES: int((1 + rows) * (items + CHARACTER * characters) + rows * (divergence + sums)),
        }

    def seconds(rates: Rates) -> float:
        forwards = sum(sizes.forward(rates, part.mean_tokens, part.batches, head=True) for part in given)
        swaps = 1 + sum(part.batches for part in given) + (count - 1) * (max(1, walks) if sizes.streams else 1)
        loads = (1 if sizes.streams else 2 + (count > 1)) + len(section.dynamic)
        readings = loads * sizes.reading(rates, sizes.disk)
        readings += walks * count * sizes.reading(rates, sizes.walked) if sizes.streams else 0.0
        fixed = loads * LOADING + (0 if tasks is None else LIBRARY)
        swapping = swaps * _swapping(sizes, rates) + _curves(sizes, rates)
        kept = reference / rates.write_bytes + rows * reference / rates.cached_bytes
        if reference and text is not None:
            whole = kept_logits(text.tokens, sizes.vocabulary, sizes.dtype.itemsize) == sizes.vocabulary
            passes = RECORDED[whole] + rows * COMPARED[whole]
            kept += text.tokens * sizes.vocabulary * passes / rates.elementwise_bytes
        one = fixed + readings + (rows + 1) * forwards + swapping + kept
        opened = openers(sizes)
        if opened is None:
            return one
        alone = (1 + len(section.dynamic)) / (1 + rows)  # of the variants, which are measured one after the other
        return one * (alone + (1 - alone) / opened.at_once)

    read = walks * count * sizes.walked + sizes.disk if sizes.streams else sizes.disk * (2 + count)
    read += sum(sizes.placed)
    read += count * (sizes.others.packed + reference) + sum(sizes.checkpoint.files(sizes.widths[0]).values())
    moments, opened = _moments(sizes, given), openers(sizes)
    apart = [] if opened is None else [{**opened.held, **sizes.tables()}]
    return Needs(moments=[*moments, *apart], files=files, read=read, temporary=reference, seconds=seconds)


def openers(sizes: Sizes) -> workers.Openers | None:
    """Workers that measure a variant each; None: the run itself measures them."""
    given = [part for part in (sizes.evaluation, sizes.tasks) if part is not None]
    model = max(sum(moment.values()) for moment in _moments(sizes, given))
    return workers.Openers.of(sizes.recipe, sizes.device, len(sizes.placed), model)


def _moments(sizes: Sizes, given: Sequence[Text]) -> Sequence[Moment]:
    """Beside a loaded model the experts that replicas stand in for, until it is dropped for the exported one."""
    text, tasks, width = sizes.evaluation, sizes.tasks, sizes.dtype.itemsize
    replaced = (sizes.expert_parameters + sizes.others.parameters) * width
    exported = {"exported checkpoint": sizes.whole - replaced + sizes.others.packed + 1.02 * sizes.placed[0]}
    once = {
        "one expert, dequantized": 12 * max(layer.parameters_per_expert for layer in sizes.layers),
        "requests": 0 if tasks is None else tasks.sequences * REQUEST_OBJECTS,
        **sizes.tables(),
    }
    loaded: Moment = {}
    held = {**sizes.held(), **sizes.words()}
    swapped = {"weights that were replaced": replaced}
    module = {"one module, dequantized": sizes.others.unpacked(width)}
    moments: list[Moment] = [{**sizes.loading(), **once}, {**held, **swapped, **module, **once}]
    if sizes.streams:
        loaded = {**sizes.model(), **sizes.words()}
        swapped = {"stopped texts": 0 if text is None else text.tokens * 2 * sizes.token}
        reading = {"being read": 0.1 * sizes.placed[0]}
        moments = [{**sizes.loading(), **swapped, **module, **once}, {**loaded, **exported, **reading, **once}]
    for part in (CHECKED, *given):
        all_logits = part.batch_tokens * sizes.vocabulary
        logits: Moment = {"logits of tasks" if part is tasks else "logits": all_logits * (width + 12)}
        if part is text and not sizes.images:
            some, scored = slice_bytes(part.length, sizes.vocabulary), TOKEN_BYTES * part.tokens
            logits = {"logits": all_logits * width, "logits in float64": some, "scored tokens": scored}
        running = {**sizes.running(part.batch_tokens), **logits, **once}
        moments += [{**held, **swapped, **running}, {**loaded, **exported, **running}]
        moments += following.moments(sizes, {**loaded, **running})
    return moments


def _swapping(sizes: Sizes, rates: Rates) -> float:
    """Seconds of dequantizing all that is packed."""
    weights = sizes.expert_parameters + sizes.others.parameters
    return weights / rates.dequantized_weights + sizes.experts * PACKED_CALLS


def _curves(sizes: Sizes, rates: Rates) -> float:
    """Seconds of the curves: a pass for every point, and in every order every expert replaced about once."""
    text, swapping, seconds = sizes.evaluation, _swapping(sizes, rates), 0.0
    if text is None:
        return seconds
    for section in sizes.recipe.eval.low_precision:
        share = min(1.0, (section.sequences or text.sequences) / text.sequences)
        point = share * sizes.forward(rates, text.batch_tokens, text.batches, head=True)
        point += sizes.reading(rates, sizes.walked) + swapping if sizes.streams else 0.0
        seconds += (2 + section.seeds) * (len(section.shares) * point + swapping)
    return seconds
