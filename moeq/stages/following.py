"""The exported checkpoint with precision that follows the workload (`eval.dynamic`), and what measuring it takes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.markup import escape

from moeq.artifacts.manifest import read_manifest
from moeq.errors import EvaluationError
from moeq.recipe import DynamicSection
from moeq.runtime.dynamic.options import DynamicOptions
from moeq.stages.context import Context
from moeq.stages.needs import Moment, Sizes
from moeq_kernels.widths import FULL

if TYPE_CHECKING:
    from moeq.runtime.dynamic.model import DynamicMoE

WHERE = "eval.dynamic"


def check(context: Context) -> None:
    """EvaluationError, before anything runs, for a model or a device on which precision cannot follow the workload;
    ModelError for widths that losses do not make."""
    sections = context.recipe.eval.dynamic
    if not sections:
        return
    if context.model.takes_images:
        raise EvaluationError("an image classifier's precision follows no workload", where=WHERE, do="leave it out")
    if context.model.device.type != "cpu":
        what = f"a recipe's precision follows the workload on the CPU alone, and this is {context.model.device}"
        do = "give --device cpu, or leave it out and use moeq eval CHECKPOINT --dynamic"
        raise EvaluationError(what, where=WHERE, do=do)
    for section in sections:
        DynamicOptions.of_recipe(section).pair({*context.recipe.losses.bits, FULL}, WHERE)


def name_of(context: Context, section: DynamicSection, taken: Sequence[str]) -> str:
    """What its row is called, as in `moeq eval --dynamic`; with a number where that is taken."""
    directory, options = context.directory("export"), DynamicOptions.of_recipe(section)
    label = options.label(options.pair(read_manifest(directory).widths_there, str(directory)))
    names = [label, *(f"{label} ({number})" for number in range(2, 2 + len(taken)))]
    return next(name for name in names if name not in taken)


def opened(context: Context, section: DynamicSection) -> DynamicMoE:
    """The checkpoint, by the kernels of the CPU's instruction set, copies between passes unless the recipe says: the
    same recipe gives the same results. To be closed."""
    from moeq.exporters.native_dynamic import open_dynamic  # which loads a compiler

    def say(text: str) -> None:
        context.reporter.say(f"  [yellow]{WHERE}: {escape(text)}[/yellow]")

    return open_dynamic(
        context.directory("export"),
        DynamicOptions.of_recipe(section),
        dtype=str(context.model.dtype).removeprefix("torch."),
        device="cpu",
        copies="between",
        policy="fixed",
        say=say,
        trust_remote_code=context.recipe.trust_remote_code,
    )


def moments(sizes: Sizes, running: Moment) -> list[Moment]:
    """What is in memory at once while each is measured; running: activations and logits."""
    width, found = sizes.dtype.itemsize, list[Moment]()
    rest = sizes.whole - (sizes.expert_parameters + sizes.others.parameters) * width + sizes.others.packed
    for section in sizes.recipe.eval.dynamic:
        experts = sizes.placed[0] if section.memory is None else max(0, section.memory - rest)
        held = {"exported checkpoint": rest + 1.02 * experts}
        copies = {"experts beside the device": min(section.host, sizes.expert_parameters * width)}
        found.append({**held, **copies, **running})
    return found
