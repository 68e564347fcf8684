"""The plan of a run: what every stage says that it needs, added up and compared with what the machine has."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from moeq.artifacts.run import STORE
from moeq.artifacts.stage import RECORD
from moeq.errors import FormatError, PlanError
from moeq.models import offline
from moeq.planning.capability import refusals
from moeq.planning.machine import machine
from moeq.planning.probe import measure
from moeq.planning.result import Machine, Need, Plan, Shortage
from moeq.stages.context import Context
from moeq.stages.needs import LEVERS, ON_DEVICE, Moment, Needs, Rates, Sizes
from moeq.stages.order import STAGES, Stage
from moeq.stages.workers import with_threads
from moeq.tables import human_bytes

MIB = 2**20
PROGRAM = 355 * MIB  # the interpreter with torch, transformers, pyarrow and matplotlib; measured 300 to 370
KERNELS = {True: 16 * MIB, False: 60 * MIB}  # caches once a model has run: in float32, or in 16 bits by way of it
COMPILED = 70 * MIB  # the column loop and its compiler, from losses on
TASKS = 45 * MIB  # lm-eval, from eval on
HEADER = 1300  # bytes of one tensor's entry in the tables of headers and names
RECORD_BYTES, DIGEST, STAMP, ASSIGNMENT = 850, 85, 135, 140  # of a record: each input, file and assignment in it
ORDER = [stage.name for stage in STAGES]
DOWNLOAD = "download"  # of weights, before any stage
FOLD = "reparam"  # the one stage that takes a model without experts


def make_plan(context: Context, *, probe: bool) -> Plan:
    """Plan a whole run. Reads configuration, headers and samples of text; with `probe`, measures for a few seconds.

    Text that lies here is read as the run will read it, so that what the run would refuse is refused with its line.
    Raises what the run itself would raise first: ModelError for a model that is refused, AssignmentError, CorpusError,
    EvaluationError, EstimateError.
    """
    stages = [stage for stage in STAGES if stage.name != FOLD or context.folds]
    context = context.given()
    dense = context.recipe.reparam is not None and not context.model.described[1]
    stages = [stage for stage in stages if stage.name == FOLD] if dense else stages
    sizes = _dense(context, stages) if dense else Sizes(context)
    for stage in () if dense else STAGES:
        if stage.check is not None:
            stage.check(context)
    context.text.check([part for part in ("calibration", "evaluation") if context.text.lies_here(part)])
    fetched = sum(sizes.source.to_fetch.values())
    there = machine(context.out, sizes.device, context.store, offline.cache_folder() if fetched else None)
    with with_threads(context.recipe.threads):  # as the run has them
        rates = measure(sizes, context.out) if probe and not dense else None
        needs = add_up(sizes, stages, rates, elsewhere=there.store_disk is not None)
    return Plan(
        recipe=context.recipe.name,
        model=_describe(sizes),
        stages=needs,
        machine=there,
        rates=None if rates is None else asdict(rates[0]),
        refusals=() if dense else tuple(refusals(context, sizes.widths[0])),
        shortages=tuple(shortages(needs, there, fetched)),
        notes=tuple(_notes(sizes, probe)),
        download_bytes=fetched,
    )


def _dense(context: Context, stages: Sequence[Stage]) -> Sizes:
    """Sizes of a model without experts, after what the stages would refuse of it by its class."""
    for stage in stages:
        if stage.check is not None:
            stage.check(context)
    if context.model.takes_images:
        _ = context.model.image_task
    return Sizes(context, dense=True)


def add_up(
    sizes: Sizes, stages: Sequence[Stage] = STAGES, rates: tuple[Rates, Rates] | None = None, *, elsewhere: bool = False
) -> tuple[Need, ...]:
    """What every stage needs within a run. rates: by the clock and of the processor; elsewhere: whether the store is on
    another disk.
    """
    every = []
    for stage in stages:
        own = stage.needs(sizes)
        moments = [{**_always(sizes, stage.name), **moment} for moment in own.moments]
        files = own.files | {RECORD: _record(sizes, stage, own)}
        stored = {f"{STORE}/{name}": size for name, size in own.store.items()}
        wall, processor = (None, None) if rates is None else (_seconds(own, clock) for clock in rates)
        every.append(
            Need(
                stage=stage.name,
                ram_terms=_peak(sizes, moments, gpu=False),
                gpu_terms=_peak(sizes, moments, gpu=True),
                read=int(own.read) + sum(files.values()),
                lasting=files if elsewhere else files | stored,
                elsewhere=sum(stored.values()) if elsewhere else 0,
                linked=own.linked,
                temporary=own.temporary,
                seconds=wall,
                processor_seconds=processor,
            )
        )
    return tuple(every)


def _always(sizes: Sizes, stage: str) -> Moment:
    """The interpreter, libraries and what they keep by the time of a stage."""
    compiled = COMPILED if ORDER.index(stage) >= ORDER.index("losses") else 0
    tasks = TASKS if sizes.recipe.eval.tasks and ORDER.index(stage) >= ORDER.index("eval") else 0
    return {
        "program": PROGRAM + KERNELS[sizes.dtype.itemsize == 4] + compiled + tasks,
        "headers": sizes.tensors * HEADER,
    }


def _peak(sizes: Sizes, moments: Sequence[Moment], *, gpu: bool) -> dict[str, int]:
    """What is in the GPU's memory, or in the machine's, at its fullest moment."""
    sides = [
        {what: int(size) for what, size in moment.items() if int(size) and (sizes.gpu and what in ON_DEVICE) == gpu}
        for moment in moments
    ]
    return max(sides, key=lambda terms: sum(terms.values()))


def _record(sizes: Sizes, stage: Stage, own: Needs) -> int:
    """Bytes of a stage's record."""
    digests = 3 + len(stage.reads(sizes.recipe)) + len(stage.text) + len(sizes.source.files)
    named = len(sizes.checkpoint.sections) if stage.name in ("eval", "estimate") else 0
    return RECORD_BYTES + DIGEST * digests + STAMP * len(own.files) + ASSIGNMENT * named


def _seconds(own: Needs, rates: Rates) -> float:
    """Seconds of a stage, its files written, synced and hashed."""
    size = sum(own.files.values()) + sum(own.store.values())
    return own.seconds(rates) + (size - own.linked) / rates.write_bytes + size / rates.hash_bytes


def shortages(needs: Sequence[Need], there: Machine, fetched: int = 0) -> list[Shortage]:
    """Every stage and resource of which more is needed than there is; of the disk, the stage at which it runs full.

    fetched: bytes of weights that are downloaded before, to the hub's cache.
    """
    short: list[Shortage] = []
    before, full = fetched if there.hub_disk is None else 0, False
    room = there.disk if there.hub_disk is None else there.hub_disk
    if fetched > room:
        do, before = f"set HF_HOME to a folder on another disk than {there.hub_path or there.disk_path}", 0
        short.append(Shortage(stage=DOWNLOAD, resource="disk", need=fetched, have=room, do=do))
    lying = before
    for need in needs:
        compared = [
            ("memory", need.ram, there.ram, _levers(need.ram_terms)),
            ("GPU memory", need.gpu, there.gpu, _levers(need.gpu_terms)),
            ("disk", need.elsewhere, there.store_disk, f"choose a store on another disk than {there.store_path}"),
        ]
        lying += need.written
        if lying + need.temporary > there.disk and not full:
            full = True
            most = max(lying + need.temporary, before + sum(other.written for other in needs))
            compared.append(("disk", most, there.disk, f"choose an --out on another disk than {there.disk_path}"))
        short += [
            Shortage(stage=need.stage, resource=resource, need=size, have=have, do=do)
            for resource, size, have, do in compared
            if have is not None and size > have
        ]
    return short


def _levers(terms: Mapping[str, int]) -> str:
    """What makes the terms that matter less, the largest first."""
    large = [what for what, size in terms.items() if LEVERS.get(what) and size > sum(terms.values()) / 20]
    levers = dict.fromkeys(str(LEVERS[what]) for what in sorted(large, key=lambda what: -terms[what]))
    return f"use {' and '.join(levers)}" if levers else "use a machine with more"


def error_of(plan: Plan) -> FormatError | PlanError | None:
    """The plan's verdict as an error, None when the run fits; shortages after the first are counted."""
    if plan.refusals:
        return FormatError(plan.refusals[0])
    if not plan.shortages:
        return None
    first = max(plan.shortages, key=lambda shortage: shortage.need / max(1, shortage.have))
    others: dict[str, list[str]] = {}  # by resource, the stages
    for shortage in plan.shortages:
        if shortage != first:
            others.setdefault(shortage.resource, []).append(shortage.stage)
    stages = [f"{', '.join(names)} of {resource}" for resource, names in others.items()]
    more = f" (short as well: {'; '.join(stages)})" if others else ""
    return PlanError(first.line() + more, where="does not fit", do=first.do)


def _describe(sizes: Sizes) -> dict[str, Any]:
    item, rest = sizes.source_dtype.itemsize, sizes.disk - sizes.experts_disk
    packed: dict[str, int] = {}
    if sizes.layers and sizes.others.modules:
        packed = {"placed_other_bytes": rest - sizes.others.disk + sizes.others.packed}
    return {
        "name": sizes.source.name,
        "kind": sizes.source.config["model_type"],
        "decoder_layers": len(sizes.block_parameters),
        "moe_layers": len(sizes.layers),
        "experts_a_layer": sorted({layer.num_experts for layer in sizes.layers}),
        "top_k": sizes.geometry.top_k,
        "expert_shape": sorted({f"{layer.hidden_size} x {layer.intermediate_size}" for layer in sizes.layers}),
        "dtype": str(sizes.source_dtype).removeprefix("torch."),
        "compute_dtype": str(sizes.dtype).removeprefix("torch."),
        "device": str(sizes.device),
        "bytes": sizes.disk,
        "expert_bytes": sizes.experts_disk,
        "other_bytes": rest,
        "largest_decoder_layer_bytes": max(sizes.block_parameters) * item,
        "resident_bytes": sizes.resident_parameters * item,
        "placed_expert_bytes": sizes.placed[0] if sizes.layers else 0,
        **packed,
        "streamed": sizes.streams,
    }


def _notes(sizes: Sizes, probe: bool) -> list[str]:
    """What the reader should know about the figures."""
    notes, fetched = [], sizes.source.to_fetch
    if fetched:
        files = f"{len(fetched)} file{'s' if len(fetched) > 1 else ''}"
        notes.append(
            f"the weights are in the hub: a run downloads {human_bytes(sum(fetched.values()))} in {files} to "
            f"{offline.cache_folder()}, for which no time is counted; their headers alone were read now"
        )
    if not sizes.layers:
        notes.append("a model without experts: `moeq reparam` alone, whose time is not foreseen")
    if sizes.layers and sizes.streams and sizes.tasks is not None:
        passes = round(sizes.tasks.batches)
        notes.append(
            f"eval.tasks read the streamed model {passes} times for each assignment "
            f"({human_bytes(passes * sizes.walked)}); a larger eval.batch_size or fewer items make it less"
        )
    if probe and sizes.layers:
        notes.append("the rate of reading may be flattered by the page cache, that of writing by the disk's own")
    return notes
