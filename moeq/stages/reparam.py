"""reparam: norms folded into the linears that they feed, so that one static scale serves what they give.

Everything runs in float32, and every decoder layer is read once a pass: one pass to see where norms lead, one to
calibrate, one to fold and write, one over what was written.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.markup import escape
from torch import Tensor

from moeq.artifacts.files import building, make_directory
from moeq.artifacts.run import FOLDED
from moeq.errors import ModelError, QuantizationError, RecipeError, nearest
from moeq.exporters.folded import ChangedCheckpoint
from moeq.exporters.w8a8 import W8A8Checkpoint
from moeq.integers.artifacts.reparam import (
    NAME,
    ConsumerRow,
    ErrorRow,
    NormRow,
    PerplexityRow,
    ReparamReport,
    read_reparam,
    write_reparam,
)
from moeq.integers.edges import Edge, Edges, find_edges
from moeq.integers.folding import (
    ROUTER_BIAS,
    FoldedNorm,
    Ranges,
    apply_folds,
    changed_names,
    gain_router_biases,
    make_fold,
)
from moeq.integers.same_outputs import LOGIT_BYTES, Outputs, compare, outputs
from moeq.models.source import open_source
from moeq.models.streaming import StreamedModel
from moeq.models.walk import Batch, current_batch, run_batch
from moeq.recipe import ReparamSection
from moeq.recipe.earlier import reparam_in_keys
from moeq.stages import integer_forward, w8a8
from moeq.stages.context import Context
from moeq.stages.finite import naming_the_file
from moeq.stages.needs import Moment, Needs, Rates, Sizes

TOLERANCE = 1e-5  # of the float32 error
TRACED_TOKENS = 32


def run(context: Context) -> dict[str, Any]:
    """Write checkpoint/, reparam.json and its schema, and where wanted the integer forward; returns the summary.

    Raises ModelError where no norm, or not every chosen one, can be folded, QuantizationError for a channel without a
    scale, and where the folded model does not compute the same.
    """
    section = settings(context)
    context.model.say_left_behind()
    directory = make_directory(context.directory("reparam"))
    batches = sample(context, section)
    if w8a8.notes(context, section):
        batches = [one for batch in batches for one in without_pads(batch)]
    with naming_the_file(context), context.reporter.bar("reparam", 3 * len(context.model.described[1])) as advance:
        streamed = context.model.in_float32()
        gained = gain_router_biases(streamed.model, streamed.device) if section.bias == "auto" else []
        edges = find_edges(streamed.model, streamed.layers, streamed.blocks, _calls(streamed, batches))
        chosen, left = choose(edges, section.norms, streamed)
        before, ranges, largest = _calibrate(context, section, streamed, chosen, batches, advance)
        folds = [_fold(edge, ranges, section) for edge in chosen]
        int8 = nullcontext(None) if section.w8a8 is None else building(directory / w8a8.FOLDER)
        with building(directory / FOLDED) as unfinished, int8 as beside:
            writers, form = _writers(context, section, streamed, (folds, gained), largest, (unfinished, beside))
            exact = compare(before, _fold_and_write(streamed, (folds, gained), writers, batches, advance))
            _check(context, exact)
            written = open_source(str(unfinished), trust_remote_code=context.recipe.trust_remote_code)
            stored = compare(before, outputs(context.model.in_float32(written), batches, advance=advance))
    del before, streamed
    perplexity = w8a8.compare(context, folds, largest, form) if section.compare else None
    report = _report(section, batches, folds, left, (exact, stored), perplexity)
    write_reparam(directory, report)
    _say(context, report)
    integer_forward.remove(directory)
    if section.integer is None:
        return summarize(report)
    scales = {norm.path: norm.scale for norm in report.norms}
    return summarize(report) | {"integer": integer_forward.write(context, section.integer, scales, directory)}


def check(context: Context) -> None:
    """What the section can be asked before anything runs: RecipeError, FormatError."""
    integer_forward.check(context)
    w8a8.check(context)


def settings(context: Context) -> ReparamSection:
    """The recipe's section, or its defaults."""
    return context.recipe.reparam or ReparamSection()


def inputs(context: Context) -> dict[str, Any]:
    """What the stage reads beside the corpus: its section and, where perplexities are compared, their text."""
    section = settings(context)
    asked = reparam_in_keys(section.model_dump(mode="json"))
    read: dict[str, Any] = {"reparam": asked, "device": context.model.device.type}
    if section.compare and context.text.perplexity is not None:
        read["text"] = context.text.digest("evaluation")
        read["perplexity"] = context.text.perplexity.model_dump(mode="json", exclude={"source"})
    if w8a8.notes(context, section):
        read["w8a8"] = w8a8.REVISION
    if section.integer is not None:
        read["integer"] = integer_forward.inputs(context)
    return read | context.model.beside()


def sample(context: Context, section: ReparamSection) -> list[Batch]:
    """The calibration sequences (or images) that the section asks for, once for every task of the model."""
    batches: list[Batch] = []
    left = section.samples
    for batch in context.text.calibration.batches(context.recipe.corpus.batch_size):
        if left > 0:
            batches.append(first_rows(batch, left))
            left -= len(batches[-1].sequences)
    tasks = getattr(context.model.skeleton.config, "num_tasks", 1)
    if tasks == 1:
        return batches
    return [  # sequences are numbered apart from those of the other tasks
        replace(batch, sequences=batch.sequences * tasks + task, extra=batch.extra | {"task": torch.tensor(task)})
        for task in range(tasks)
        for batch in batches
    ]


def first_rows(batch: Batch, rows: int, tokens: int | None = None) -> Batch:
    """The first sequences of a batch, and of those that are tokens alone the first tokens."""
    if batch.extra and len(batch.sequences) == 1:
        return batch
    return Batch(
        input_ids=batch.input_ids[:rows, : None if batch.extra else tokens],
        mask=batch.mask[:rows, : None if batch.extra else tokens],
        sequences=batch.sequences[:rows],
        extra={name: value[:rows] if value.dim() else value for name, value in batch.extra.items()},
    )


def without_pads(batch: Batch) -> list[Batch]:
    """The sequences of a batch with pads, each by itself without them; any other batch as it is."""
    if batch.extra or bool(batch.mask.all()):
        return [batch]
    return [
        Batch(input_ids=ids[real][None], mask=real[real][None], sequences=number[None])
        for ids, real, number in zip(batch.input_ids, batch.mask.bool(), batch.sequences, strict=True)
    ]


def _calls(streamed: StreamedModel, batches: Sequence[Batch]) -> list[Any]:
    """Forward passes on few tokens, or one image; one for every task of the model."""
    by_task = {int(batch.extra.get("task", torch.tensor(0))): batch for batch in reversed(batches)}
    few = [first_rows(batch, 1, TRACED_TOKENS) for batch in by_task.values()]
    return [partial(run_batch, streamed.model, batch, streamed.device, None) for batch in few]


def choose(edges: Edges, norms: str | list[str], streamed: StreamedModel) -> tuple[list[Edge], dict[str, str]]:
    """The edges to fold, and why the other norms are left; ModelError for a wanted norm that cannot be folded."""
    names = [edge.norm.name for edge in edges.edges] + [*edges.refused, *edges.left]
    if isinstance(norms, list):
        for pattern in norms:
            if not any(fnmatchcase(name, pattern) for name in names):
                close = nearest(pattern, names)
                like = f"norms are called like {names[0]}" if names else "it has none"
                do = f"did you mean {close!r}?" if close else like
                raise RecipeError(f"no norm is called {pattern!r}", where="reparam.norms", do=do)
        wanted = {name for name in names if any(fnmatchcase(name, pattern) for pattern in norms)}
    else:
        wanted = {name for name in names if norms == "all" or streamed.block_of(name)}
    stuck = edges.refused | (edges.left if isinstance(norms, list) else {})
    for name in names:
        if name in wanted and name in stuck:
            raise ModelError(
                f"this norm cannot be folded: {stuck[name]}",
                where=name,
                do="name the norms to fold, without this one, in reparam.norms",
            )
    chosen = [edge for edge in edges.edges if edge.norm.name in wanted]
    if not chosen:
        raise ModelError(
            "no norm feeds linears alone, there is nothing to fold",
            where=type(streamed.model).__name__,
            do="leave reparam out for this model",
        )
    left = {name: "not among reparam.norms" for name in names if name not in wanted}
    return chosen, left | edges.refused | edges.left


def _calibrate(
    context: Context,
    section: ReparamSection,
    streamed: StreamedModel,
    edges: Sequence[Edge],
    batches: Sequence[Batch],
    advance: Any,
) -> tuple[Outputs, Ranges, dict[str, float]]:
    """Outputs of the original, ranges of the norms, and the largest input of every linear."""
    ranges = Ranges(section.percentile if section.range == "percentile" else None, _real_rows)
    by_block: dict[str, list[str]] = {}
    for edge in edges:
        by_block.setdefault(streamed.block_of(edge.norm.name), []).append(edge.norm.name)
    noted = w8a8.noting(context, section, streamed)
    with ranges.watching(streamed.model, [edge.norm.name for edge in edges]), noted or nullcontext():
        before = outputs(streamed, batches, left=lambda block: ranges.settle(by_block.get(block, ())), advance=advance)
    return before, ranges, {} if noted is None else noted.largest


def _real_rows(output: Tensor) -> Tensor:
    """Rows of a norm's output [..., D] that belong to real tokens, where it has one a token."""
    mask = current_batch().mask
    rows = output.flatten(0, -2)
    return rows[mask.reshape(-1).to(rows.device)] if len(rows) == mask.numel() else rows


def _fold(edge: Edge, ranges: Ranges, section: ReparamSection) -> FoldedNorm:
    seen = ranges.of(edge.norm.name)
    if seen is None:
        raise QuantizationError(
            "calibration never came to this norm", where=edge.norm.name, do="leave it out of reparam.norms"
        )
    return make_fold(edge, *seen, section.bits, shift=section.bias == "auto")


def _writers(
    context: Context,
    section: ReparamSection,
    streamed: StreamedModel,
    made: tuple[Sequence[FoldedNorm], Sequence[str]],
    largest: dict[str, float],
    directories: tuple[Path, Path | None],
) -> tuple[list[ChangedCheckpoint], w8a8.Form | None]:
    """What writes the folded checkpoint and, where it is wanted, the one in int8; and the model which that holds.

    made: the folds, and the biases that the model was given for them; largest: inputs in calibration.
    """
    folds, gained = made
    changed = {name for folded in folds for name in changed_names(folded)}
    used = set(gained) if changed & set(gained) else set()
    how: dict[str, Any] = {
        "float32": section.dtype == "float32",
        "gained": used,
        "settings": {ROUTER_BIAS: True} if used else {},
        "trust_remote_code": context.recipe.trust_remote_code,
    }
    given = context.model.source, streamed.reader, context.model.skeleton
    plain = ChangedCheckpoint(*given, directories[0], changed, **how)
    if directories[1] is None:
        return [plain], None
    parts = w8a8.parts(context, folds, largest)
    form = w8a8.form_of(parts, folds, {name: plain.dtype_of(name) for name in changed})
    return [plain, W8A8Checkpoint(*given, directories[1], changed, parts=parts, **how)], form


def _fold_and_write(
    streamed: StreamedModel,
    made: tuple[Sequence[FoldedNorm], Sequence[str]],
    writers: Sequence[ChangedCheckpoint],
    batches: Sequence[Batch],
    advance: Any,
) -> Outputs:
    """Fold every block right after it is read, write it, and run the batches through it; returns their outputs.

    made: the folds, and the biases that the model was given for them.
    """
    folds, gained = made
    written: set[str] = set()

    def fold(_: Any, block: str) -> None:
        fold_block(streamed, folds, block, gained)
        if block not in written:
            written.add(block)
            for writer in writers:
                writer.add([*streamed.names[block], *(name for name in gained if streamed.block_of(name) == block)])

    fold(None, "")
    streamed.block_overlay = fold
    folded = outputs(streamed, batches, advance=advance)
    for block in streamed.blocks:  # those that the batches did not come to
        if block not in written:
            streamed.load(block)
            streamed.drop(block)
    for writer in writers:
        writer.finish()
    return folded


def fold_block(streamed: StreamedModel, folds: Iterable[FoldedNorm], block: str, gained: Iterable[str] = ()) -> None:
    """Fold the parameters of one block, or (empty) those of none; gained: biases that start from zero."""
    for name in gained:
        if streamed.block_of(name) == block:
            streamed.model.get_parameter(name).data.zero_()
    apply_folds(streamed.model, folds, lambda name: streamed.block_of(name) == block)


def _check(context: Context, exact: ErrorRow) -> None:
    if not exact.error <= TOLERANCE:
        raise QuantizationError(
            f"the folded model's float32 logits are off by {exact.error:.2g} relative, more than {TOLERANCE:g}",
            where=context.model.source.name,
            do="fold fewer norms (reparam.norms); if one alone is off, report the model's family; if none is, this "
            "model makes much of rounding",
        )


def _report(
    section: ReparamSection,
    batches: Sequence[Batch],
    folds: Sequence[FoldedNorm],
    left: dict[str, str],
    errors: tuple[ErrorRow, ErrorRow],
    perplexity: PerplexityRow | None,
) -> ReparamReport:
    return ReparamReport(
        bits=section.bits,
        range=section.range,
        percentile=section.percentile if section.range == "percentile" else None,
        samples=sum(len(batch.sequences) for batch in batches),
        tokens=sum(int(batch.mask.sum()) for batch in batches),
        dtype=section.dtype,
        norms=tuple(_row(folded) for folded in folds),
        left=left,
        float32=errors[0],
        stored=errors[1],
        perplexity=perplexity,
    )


def _row(folded: FoldedNorm) -> NormRow:
    def ends(values: Tensor) -> tuple[float, float]:
        return float(values.min()), float(values.max())

    norm, fold = folded.edge.norm, folded.fold
    return NormRow(
        path=norm.name,
        kind=norm.kind,
        eps=norm.eps,
        plus_one=norm.plus_one,
        mode="asymmetric" if folded.why is None else "scale-only",
        why=folded.why,
        scale=fold.scale,
        r1=ends(fold.r1),
        r2=ends(fold.r2),
        low=ends(folded.low),
        high=ends(folded.high),
        consumers=tuple(
            ConsumerRow(weight=consumer.weight, axis=consumer.axis, bias=consumer.bias if folded.why is None else None)
            for consumer in folded.edge.consumers
        ),
    )


def _say(context: Context, report: ReparamReport) -> None:
    say = context.reporter.say
    full = sum(norm.mode == "asymmetric" for norm in report.norms)
    say(
        f"  norms folded: {len(report.norms)}, {full} of them with zero points, into "
        f"{sum(len(norm.consumers) for norm in report.norms)} weights; left: {len(report.left)}"
    )
    say(f"  relative error of logits: {report.float32.error:.1e} before quantization, {report.stored.error:.1e} stored")
    if report.float32.left_out:
        say(f"  left out for ties in routing: {report.float32.left_out} of {report.float32.sequences} sequences")
    if report.perplexity is not None:
        row = report.perplexity
        written = "" if row.w8a8_written is None else f", as written {row.w8a8_written:.4f}"
        say(
            f"  perplexity: original {row.original:.4f}, W8A8 {row.w8a8:.4f}, W8A8 folded {row.w8a8_folded:.4f}"
            f"{written}"
        )
    for name in (FOLDED, w8a8.FOLDER) if settings(context).w8a8 is not None else (FOLDED,):
        say(f"  {escape(str(context.finished('reparam') / name))}")


def summarize(report: ReparamReport) -> dict[str, Any]:
    """Figures for the terminal and the record."""
    return {
        "norms": len(report.norms),
        "asymmetric": sum(norm.mode == "asymmetric" for norm in report.norms),
        "left": len(report.left),
        "float32_error": report.float32.error,
        "stored_error": report.stored.error,
        "sequences_left_out": report.float32.left_out,
        "perplexity": None if report.perplexity is None else report.perplexity.model_dump(mode="json"),
    }


def load(context: Context) -> ReparamReport:
    return read_reparam(context.directory("reparam"))


PROGRAM = 700 << 20  # bytes of Python, torch and transformers
PASSES = 4  # over the model: where norms lead, calibration, the folded model, what was written
COMPARED = 3  # versions whose perplexity is measured
BLOCKS = 3  # a block, its changed parameters, and those as they are written
STATES = 4  # hidden states that a stopped batch holds a token
NORM = 4 << 10  # bytes of a layer's norms in the report


def needs(sizes: Sizes) -> Needs:
    """Before a run begins: two float32 versions of what is resident, a block, the folded checkpoint."""
    section, text, width = settings(sizes.context), sizes.calibration, 4
    tokens = min(section.samples, text.sequences) * text.length
    weights = sum(sizes.block_parameters) + sizes.resident_parameters
    stored = width if section.dtype == "float32" else sizes.source_dtype.itemsize
    disk = weights * stored
    moment = {
        "program": PROGRAM, "resident weights, twice": 2 * sizes.resident_parameters * width,
        "decoder block in float32": BLOCKS * max(sizes.block_parameters) * width,
        "logits of both": 2 * min(LOGIT_BYTES, tokens * sizes.vocabulary * width),
        "stopped samples": STATES * tokens * sizes.geometry.hidden_size * width,
    }  # fmt: skip

    def seconds(rates: Rates) -> float:
        passes = sizes.reading(rates, sizes.walked) + sizes.forward(
            rates, tokens / text.batches, text.batches, head=True
        )
        measured = sizes.evaluation if section.compare else None
        if measured is None:
            return PASSES * passes
        versions = COMPARED if section.w8a8 is None else COMPARED + 1
        return PASSES * passes + versions * sizes.forward(rates, measured.batch_tokens, measured.batches, head=True)

    files = {FOLDED: disk, NAME: NORM * len(sizes.block_parameters)}
    if section.w8a8 is not None:
        files[w8a8.FOLDER] = disk - w8a8.saved_bytes(sizes.context, stored)
    if section.integer is not None:
        files[integer_forward.FOLDER] = integer_forward.foreseen_bytes(sizes.context, section.integer)
    moments: list[Moment] = [moment]
    if section.integer is not None:
        measured = 0 if sizes.evaluation is None else sizes.evaluation.sequences
        moments.append({"program": PROGRAM, **integer_forward.held(sizes.context, text.sequences + measured)})
    return Needs(moments=moments, files=files, read=PASSES * sizes.walked + disk, seconds=seconds)
