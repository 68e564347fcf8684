"""losses: replicas of every expert at every width, and what each costs; layer by layer.

What the store has is not made again: after a kill, with further widths or methods, or in another run of the same
inputs. The forward pass is needed as soon as a single layer lacks something.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rich.markup import escape

from moeq.artifacts import expert_effects, replicas
from moeq.artifacts.effects import NAME as EFFECTS
from moeq.artifacts.effects import write_effects
from moeq.artifacts.files import make_directory
from moeq.artifacts.losses import BEYOND, NAME, summarize, write_losses
from moeq.artifacts.non_experts import INDEX as OTHERS_INDEX
from moeq.artifacts.replica_store import MARKER, is_marked, open_store
from moeq.artifacts.replicas import LayerReplicas, Made, ReplicaIndex
from moeq.artifacts.run import OLDER
from moeq.errors import ArtifactError, CorpusError, RecipeError
from moeq.models.corpus.sequences import Sequences
from moeq.models.experts import expert_math, stacked_biases, stacked_weights
from moeq.models.walk import LayerInputs
from moeq.quantizers.layer import LayerResult, quantize_layer
from moeq.quantizers.layer_data import heldout_stride
from moeq.recipe import ExpertEffectsSection, LayerEffectsSection
from moeq.registry import QUANTIZERS
from moeq.stages import effects, losses_tasks, needs_losses
from moeq.stages import non_experts as others_stage
from moeq.stages.context import Context
from moeq.stages.expert_effects import measure as measure_experts
from moeq.stages.finite import naming_the_file, say_left_out
from moeq.stages.needs import Sizes
from moeq.stages.replicas import lacking, load_index, load_losses, planned
from moeq.stages.workers import Openers, several
from moeq_kernels.freed import return_memory


def run(context: Context) -> dict[str, Any]:
    """Write losses.parquet and the index of the replicas; what the store lacks is made."""
    config = context.recipe.losses
    directory = make_directory(context.directory("losses"))
    sequences = context.text.grown_calibration
    _check_count(context, len(sequences))
    for name in OLDER:
        shutil.rmtree(directory / name, ignore_errors=True)
    index = planned(context, sequences.digest())
    open_store(context.store, None if context.owns_store else context.out)
    replicas.write_index(directory, index)  # before the first replica, so that `moeq gc` keeps it
    missing = _all_missing(context, index)
    more = others_stage.Making(context, sequences)
    if any(missing.values()) or more.needs_walk:
        _walk(context, sequences, index, missing, more)
    more.finish()
    store, entries = context.store / index.set, index.entries()
    digests = tuple(replicas.digests(store, layer.index, entries) for layer in context.model.layers)
    replicas.write_index(directory, index.model_copy(update={"layers": digests}))
    write_losses(directory / NAME, (_layer_rows(context, index, layer.index) for layer in context.model.layers))
    if config.layer_effects is not None:
        opened = _opened(context, config.layer_effects)
        write_effects(directory, effects.measure(context, config.layer_effects, opened))
    else:
        (directory / EFFECTS).unlink(missing_ok=True)
    measured = _expert_effects(context, directory)
    summary = summarize(load_losses(context)) | measured
    if summary["fallbacks"]:
        counts = ", ".join(f"{name} {count:,}" for name, count in summary["fallbacks"].items())
        context.reporter.say(f"  fallbacks of {summary['experts']:,} experts: {counts}")
    for name, count in summary["beyond_float16"].items():
        context.reporter.say(
            f"  [yellow]{name}: {count:,} of {summary['experts']:,} experts have weights too {BEYOND[name]} for the "
            "scales, which are float16, at some width; their losses say what it costs[/yellow]"
        )
    table = others_stage.table(context)
    return summary | ({} if table is None else {"others": others_stage.summarize(table)})


def _walk(
    context: Context,
    sequences: Sequences,
    index: ReplicaIndex,
    missing: dict[int, list[Made]],
    more: others_stage.Making,
) -> None:
    """Run the calibration text through the model and quantize every layer's experts: here, or by workers, who do it
    while the model runs on to the next layer."""
    batches = sequences.batches(context.recipe.corpus.batch_size)
    directory = context.store / index.set
    with (
        naming_the_file(context),
        losses_tasks.working(context, partial(_keep, directory), needs_losses.layers_ahead(context)) as workers,
        context.reporter.bar("losses", len(context.model.layers)) as advance,
        more.listening() as listening,
    ):
        for inputs in context.model.walk(batches, **listening):
            say_left_out(context, inputs)
            if workers is None:
                _finish_layer(context, inputs, index, missing[inputs.layer.index])
                advance()
            else:
                workers.add(context.model.module, inputs, calls(missing[inputs.layer.index]))
                for _ in workers.finished(workers.ahead):
                    advance()
            del inputs  # before the next layer's are gathered
            return_memory()
        for _ in workers.finished(0) if workers is not None else ():
            advance()


def more_wanted(context: Context) -> list[str] | None:
    """What the rows must say beside what they always did, the seed where it decides which experts are tried, or codes,
    and versions of others' packages."""
    recipe = context.recipe
    quantizers = [QUANTIZERS.get(method) for method in recipe.losses.methods]
    seeded = any(one.hangs_on_seed for one in quantizers) or recipe.losses.expert_effects is not None
    drawn = [f"seed {recipe.seed}"] if recipe.seed and seeded else []
    quantizers += [QUANTIZERS.get(recipe.others.method)] if recipe.others.widths() else []
    others = dict.fromkeys(package for one in quantizers for package in one.origins)
    return [*(["energies"] if recipe.drops else []), *drawn, *others] or None


def check(context: Context) -> None:
    """RecipeError for modules, and methods that the model's matrices do not suit; CorpusError for too few sequences
    where they do not grow."""
    others_stage.check(context)
    losses_tasks.check(context)
    _check_packages(context)
    _check_sides(context)
    if context.recipe.corpus.until_covered is None:
        _check_count(context, context.recipe.corpus.sequences)


def _check_packages(context: Context) -> None:
    """RecipeError for a method that needs what is not installed."""
    for quantizer in (QUANTIZERS.get(method) for method in context.recipe.losses.methods):
        for package, do in quantizer.packages.items():
            if find_spec(package) is None:
                where = f"losses.methods: {quantizer.name}"
                raise RecipeError(f"the package {package} is not installed", where=where, do=do)


def _check_sides(context: Context) -> None:
    """RecipeError for a method whose codes the matrices of some layer have no place in."""
    for quantizer in (QUANTIZERS.get(method) for method in context.recipe.losses.methods):
        for layer in context.model.layers:
            for projection in layer.projections:
                rows, inputs = layer.shape(projection)
                if rows % quantizer.sides or inputs % quantizer.sides:
                    what = f"{quantizer.name} takes multiples of {quantizer.sides}"
                    where = f"losses.methods: {layer.name}, {projection}"
                    raise RecipeError(f"{rows} x {inputs} weights; {what}", where=where, do="use another method")


def _check_count(context: Context, sequences: int) -> None:
    """CorpusError where no sequence is left to measure on."""
    stride = heldout_stride(context.recipe.losses.heldout_fraction)
    if sequences < stride:
        raise CorpusError(
            f"{sequences} sequences leave none to measure on (one of {stride} is held out)",
            where="corpus.sequences",
            do=f"use at least {stride}",
        )


def progress(context: Context) -> tuple[str, ...]:
    """What a run that was broken off goes on with: measured effects, and the indices by which `gc` keeps replicas."""
    return (expert_effects.MEASURED, replicas.INDEX, OTHERS_INDEX)


def _expert_effects(context: Context, directory: Path) -> dict[str, Any]:
    """Write what single experts do to the output where the recipe asks for it; returns how many were measured."""
    section = context.recipe.losses.expert_effects
    if section is None:
        expert_effects.remove_effects(directory)
        return {}
    by_expert = measure_experts(context, section, _opened(context, section))
    expert_effects.write_effects(directory, by_expert)
    return {"expert_effects": {"measured": by_expert.measured, "of_experts": sum(map(len, by_expert.divergence))}}


def _opened(context: Context, section: LayerEffectsSection | ExpertEffectsSection) -> Openers | None:
    """Workers that measure effects; None: the run itself."""
    if not several(context.recipe, context.model.device):
        return None
    return needs_losses.effect_openers(Sizes(context), section)


def _all_missing(context: Context, index: ReplicaIndex) -> dict[int, list[Made]]:
    """What the store lacks of every layer; says how much of the rest is there."""
    if not (context.store / index.set).is_dir():
        return {layer.index: list(index.made) for layer in context.model.layers}
    missing = {}
    with context.reporter.bar("checking the store", len(context.model.layers)) as advance:
        for layer in context.model.layers:
            missing[layer.index] = lacking(context, index.set, layer.index, index.made)
            advance()
    wanted = len(index.made) * len(context.model.layers)
    there = wanted - sum(map(len, missing.values()))
    context.reporter.say(f"  {there} of {wanted} sets of losses and replicas are in the store")
    return missing


def _finish_layer(context: Context, inputs: LayerInputs, index: ReplicaIndex, missing: list[Made]) -> None:
    """Quantize and measure what is missing of one layer and store it; nothing of it stays in memory."""
    layer, directory = inputs.layer, context.store / index.set
    for here in calls(missing):
        result = quantize_layer(
            inputs,
            stacked_weights(context.model.module, layer, slice(None)),
            expert_math(context.model.module, layer),
            losses_tasks.section_of(context.recipe.losses, here),
            stacked_biases(context.model.module, layer, slice(None)),
            seed=context.recipe.seed,
        )
        _keep(directory, layer.index, here, result)


def _keep(directory: Path, layer: int, here: Sequence[Made], result: LayerResult) -> None:
    """Store what one call made of a layer."""
    new = {
        made.entry: {name: widths[made.bits] for name, widths in result.replicas.items()}
        for made in here
        if made.entry is not None
    }
    if new:
        replicas.add_replicas(directory, layer, new)
    for made in here:
        rows = [row for row in result.rows if (row["method"], row["bits"]) == (made.method, made.bits)]
        replicas.add_rows(directory, layer, made.rows, rows)


def calls(missing: Sequence[Made]) -> list[list[Made]]:
    """What one call of `quantize_layer` makes: methods of the same widths, only one of them with replicas to keep."""
    together: list[list[Made]] = []
    for method in dict.fromkeys(made.method for made in missing):
        widths = [made for made in missing if made.method == method]
        for others in together:
            same = [made.bits for made in widths] == [made.bits for made in others if made.method == others[0].method]
            if same and any(all(made.entry is None for made in some) for some in (widths, others)):
                others += widths
                break
        else:
            together.append(widths)
    return together


def _layer_rows(context: Context, index: ReplicaIndex, layer: int) -> list[dict[str, Any]]:
    """Rows of one layer by expert, method and width, whoever made them when."""
    directory = context.store / index.set
    rows = [row for made in index.made for row in replicas.made_rows(directory, layer, made.rows)]
    return sorted(rows, key=lambda row: row["expert"])


def is_intact(context: Context) -> bool:
    """Whether the store still has every replica that the index names; what is damaged is said."""
    try:
        index = load_index(context)
        count = len(context.model.layers) if index.entries() else 0
        if (count or context.store.is_dir()) and not is_marked(context.store):
            raise ArtifactError("missing or damaged", where=str(context.store / MARKER))
        with context.reporter.bar("checking the store", count) as advance:
            for layer in range(count):
                there = LayerReplicas(context.store / index.set, layer)
                there.check(index.layers[layer], cached=not context.check)
                if context.check:
                    _layer_rows(context, index, layer)
                advance()
    except IndexError:
        return False
    except ArtifactError as error:
        context.reporter.say(f"  [yellow]{escape(error.where or '')}: {escape(error.what)}[/yellow]")
        return False
    return others_stage.is_intact(context)
