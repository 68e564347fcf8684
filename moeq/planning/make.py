"""Makes the plan of a run: sizes, needs of every stage, what the machine has, and the verdict."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import torch

from moeq.artifacts.run import STORE
from moeq.errors import PlanError
from moeq.models.corpus import LocalFile
from moeq.planning import capability
from moeq.planning.disk import Disk
from moeq.planning.folding import folding_need
from moeq.planning.hours import Hours
from moeq.planning.machine import machine
from moeq.planning.memory import STAGES, Memory, peak
from moeq.planning.placed import placed_bytes, widths
from moeq.planning.probe import measure
from moeq.planning.result import Machine, Need, Plan, Shortage, Term
from moeq.planning.sizes import ModelSizes, Work, model_sizes, work_sizes
from moeq.stages.context import Context
from moeq.tables import human_bytes

FEW = 0.9  # of the sequences that are wanted: an estimate of less text than this is worth a note


def make_plan(context: Context, *, probe: bool) -> Plan:
    """Plan a whole run. Reads configuration, headers and samples of text; with `probe`, measures for a few seconds.

    Text that lies here is read as the run will read it, so that what the run would refuse is refused with its line.
    Raises what the run itself would raise first: ModelError for a model that is refused, AssignmentError, CorpusError,
    EvaluationError, EstimateError.
    """
    folds, context = context.folds, context.given()
    recipe = context.recipe
    sizes = model_sizes(context)
    capability.check_stages(context)
    context.text.check({"calibration", "evaluation"} - _remote(context))
    work = work_sizes(context)
    placed = placed_bytes(sizes, recipe.assign, recipe)
    asked = capability.Asked(
        layers=sizes.layers,
        widths=tuple(map(tuple, widths(sizes, recipe.assign, recipe))),
        group_size=recipe.losses.group_size,
        symmetric=recipe.losses.symmetric,
        all_replicas=recipe.quantize.replicas == "all",
        nested=recipe.losses.nested,
    )
    gpu = context.model.device.type == "cuda"
    model = Memory(sizes, work, recipe, streams=context.model.streams, gpu=gpu, placed=placed)
    disk = Disk(context, sizes, work)
    there = machine(context.out, context.model.device, context.store)
    rates = hours = busy = None
    if probe:
        rates, working = measure(sizes, work, recipe, context.model.source.files, context.out, context.model.device)
        how: dict[str, Any] = {"streams": context.model.streams, "free": there.ram // 2, "device": context.model.device}
        hours, busy = (Hours(sizes, work, recipe, disk, one, **how) for one in (rates, working))
    stored = {f"{STORE}/{name}": size for name, size in disk.store().items()}
    needs = tuple(
        Need(
            stage=stage,
            ram_terms=peak(model.moments(stage), gpu=False),
            gpu_terms=peak(model.moments(stage), gpu=True),
            read=disk.read(stage),
            lasting=disk.lasting(stage) | (stored if stage == "losses" and there.store_disk is None else {}),
            elsewhere=sum(stored.values()) if stage == "losses" and there.store_disk is not None else 0,
            linked=disk.linked(stage),
            temporary=disk.temporary(stage),
            seconds=None if hours is None else hours.seconds(stage),
            processor_seconds=None if busy is None else busy.seconds(stage),
        )
        for stage in STAGES
    )
    needs = (folding_need(context, sizes, work, hours, busy), *needs) if folds else needs
    return Plan(
        recipe=recipe.name,
        model=_describe(context, sizes, placed),
        stages=needs,
        machine=there,
        rates=None if rates is None else asdict(rates),
        refusals=tuple(capability.refusals(context, asked)),
        shortages=tuple(shortages(needs, there)),
        notes=tuple(_notes(context, sizes, work, probe)),
    )


def _remote(context: Context) -> set[str]:
    """The parts of the text that would have to be downloaded to be checked as the run does."""
    if context.model.takes_images:
        return set()
    parts = {"calibration": context.text.calibration_sources, "evaluation": context.text.evaluation_sources}
    return {part for part, sources in parts.items() if not all(isinstance(one, LocalFile) for one in sources)}


def shortages(needs: tuple[Need, ...], there: Machine) -> list[Shortage]:
    """Every stage and resource of which more is needed than there is; of the disk, the stage at which it runs full."""
    found = []
    lying = 0
    full = False
    for need in needs:
        if need.ram > there.ram:
            found.append(_short(need.stage, "memory", need.ram, there.ram, need.ram_terms))
        if there.gpu is not None and need.gpu > there.gpu:
            found.append(_short(need.stage, "GPU memory", need.gpu, there.gpu, need.gpu_terms))
        if there.store_disk is not None and need.elsewhere > there.store_disk:
            do = f"choose a store on another disk than {there.store_path}"
            found.append(Shortage(stage=need.stage, resource="disk", need=need.elsewhere, have=there.store_disk, do=do))
        lying += need.written
        if lying + need.temporary > there.disk and not full:
            full = True
            most = max(lying + need.temporary, sum(other.written for other in needs))
            do = f"choose an --out on another disk than {there.disk_path}"
            found.append(Shortage(stage=need.stage, resource="disk", need=most, have=there.disk, do=do))
    return found


def _short(stage: str, resource: str, need: int, have: int, terms: tuple[Term, ...]) -> Shortage:
    """A shortage of memory with the levers of the terms that matter, the largest first."""
    levers = [
        term.lever for term in sorted(terms, key=lambda term: -term.bytes) if term.lever and term.bytes > need / 20
    ]
    do = f"use {' and '.join(dict.fromkeys(levers))}" if levers else "use a machine with more"
    return Shortage(stage=stage, resource=resource, need=need, have=have, do=do)


def error_of(plan: Plan) -> PlanError | None:
    """The plan's verdict as an error, None when the run fits; shortages after the first are counted."""
    if plan.refusals:
        return PlanError(plan.refusals[0])
    if not plan.shortages:
        return None
    first = max(plan.shortages, key=lambda one: one.need / max(1, one.have))
    others = sorted({one.stage for one in plan.shortages} - {first.stage})
    more = f" (short as well: {', '.join(others)})" if others else ""
    return PlanError(first.line() + more, where="does not fit", do=first.do)


def _describe(context: Context, sizes: ModelSizes, placed: int) -> dict[str, Any]:
    item = sizes.source_dtype.itemsize
    experts = [layer.num_experts for layer in sizes.layers]
    return {
        "name": context.model.source.name,
        "kind": context.model.source.config["model_type"],
        "decoder_layers": len(sizes.block_parameters),
        "moe_layers": len(sizes.layers),
        "experts_a_layer": sorted(set(experts)),
        "top_k": sizes.top_k,
        "expert_shape": sorted({f"{one.hidden_size} x {one.intermediate_size}" for one in sizes.layers}),
        "dtype": _short_name(sizes.source_dtype),
        "compute_dtype": _short_name(sizes.dtype),
        "device": str(context.model.device),
        "bytes": sizes.disk,
        "expert_bytes": sizes.experts_disk,
        "other_bytes": sizes.disk - sizes.experts_disk,
        "largest_decoder_layer_bytes": max(sizes.block_parameters) * item,
        "resident_bytes": sizes.resident_parameters * item,
        "placed_expert_bytes": placed,
        **_packed_others(sizes),
        "streamed": context.model.streams,
    }


def _packed_others(sizes: ModelSizes) -> dict[str, int]:
    """Bytes of everything else once it is packed; nothing where the recipe packs nothing but experts."""
    others = sizes.others
    if not others.modules:
        return {}
    return {"placed_other_bytes": sizes.disk - sizes.experts_disk - others.disk + others.packed}


def _short_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _notes(context: Context, sizes: ModelSizes, work: Work, probe: bool) -> list[str]:
    """What the reader should know about the figures."""
    found = []
    text = work.calibration
    if text.whole < FEW * text.tokens:
        found.append(
            f"corpus: about {text.whole} tokens, {text.tokens} are wanted; the run will refuse unless that is wrong"
        )
    if context.model.streams and work.tasks is not None:
        passes = round(work.tasks.batches * work.tasks.steps)
        found.append(
            f"eval.tasks read the streamed model {passes} times for each assignment "
            f"({human_bytes(passes * sizes.disk)}); a larger eval.batch_size or fewer items make it less"
        )
    if probe:
        found.append("the rate of reading may be flattered by the page cache, that of writing by the disk's own")
    return found
