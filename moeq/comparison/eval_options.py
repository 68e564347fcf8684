"""The options of `moeq eval`."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from typer import Argument

from moeq.bounded import LARGEST, is_number
from moeq.errors import RecipeError
from moeq.options import RunOptions, option

if TYPE_CHECKING:
    from moeq.evaluation.batching import BatchSize

OF_SUBJECTS = "models, checkpoints and runs"  # what options belong to that no stage has
OF_TASKS, OF_TEXT = "--tasks", "--text"  # options without which another does nothing


@dataclass(frozen=True, kw_only=True)
class EvalOptions(RunOptions):
    """The command line of `moeq eval`; recipe: its path, or the words of what is compared."""

    recipe: Annotated[
        list[str],
        Argument(
            metavar="RECIPE|WHAT",
            help="YAML recipe [default: the one in the run directory]; or what is compared, the first with the others: "
            "models, packed checkpoints, runs, RUN:ASSIGNMENT (of its recipe; original; * for all), assignment files, "
            "and results of an earlier --out.",
        ),
    ] = field(default_factory=list)
    out: Path | None = option(
        "Run directory [default: moeq-out/NAME of the recipe]; of a comparison, the JSON file for its results, every "
        "sample included [default: none]."
    )
    tasks: str | None = option("lm-eval tasks, separated by commas.")
    include_path: Path | None = option("Folder of lm-eval task YAML files.", OF_TASKS, sets="eval.include_path")
    num_fewshot: int | None = option(
        "Examples in a context [default: the task's own].", OF_TASKS, sets="eval.num_fewshot", min=0
    )
    limit: int | None = option("Items a task [default: all].", OF_TASKS, sets="eval.limit", min=1)
    batch_size: str | None = option("Sequences at once, or auto: by free memory [default: 16].")
    text: str | None = option(
        "Perplexity of a file, or bundled [default: bundled, where no task is named].", OF_SUBJECTS
    )
    window: int | None = option("Tokens of a window of --text [default: 512, or fewer].", OF_SUBJECTS, OF_TEXT, min=2)
    stride: int | None = option(
        "The last tokens of a window that count [default: the window].", OF_SUBJECTS, OF_TEXT, min=1
    )
    context_aware: list[str] = option(
        "A row for every run and checkpoint named, whose experts are placed and quantized by each sequence's prefill: "
        "gpu_experts=2,code_bits=2.5,alpha=0.5,selector=true; may be given several times.",
        OF_SUBJECTS,
        default=list,
    )
    dynamic: list[str] = option(
        "A row for every checkpoint named, whose experts change between two precisions as the workload asks for it, "
        "under a budget: memory=24GiB,high=4,low=2,period=128, or auto; may be given several times.",
        OF_SUBJECTS,
        default=list,
        metavar="SETTINGS",
    )
    dynamic_log: Path | None = option(
        "With one row of --dynamic: every decision and its sums as JSON lines.", OF_SUBJECTS, metavar="FILE"
    )
    truncate: bool = option(
        "Cut too long contexts from the left, as lm-eval does, and count them.",
        OF_SUBJECTS,
        OF_TASKS,
        default=False,
    )
    dtype: Literal["auto", "float32", "float16", "bfloat16"] = option(
        "Type that a comparison computes in.", OF_SUBJECTS, default="auto"
    )

    @property
    def recipe_path(self) -> Path | None:
        return Path(self.recipe[0]) if self.recipe else None

    @property
    def task_names(self) -> list[str]:
        return [name.strip() for name in (self.tasks or "").split(",") if name.strip()]

    @property
    def rows(self) -> BatchSize | None:
        """The batch size; RecipeError unless it is a number or auto."""
        return None if self.batch_size is None else count("--batch-size", self.batch_size, "auto")

    def changes(self) -> list[str]:
        tasks = [] if self.tasks is None else [f"eval.tasks=[{', '.join(self.task_names)}]"]
        return [*super().changes(), *tasks, *([] if self.rows is None else [f"eval.batch_size={self.rows}"])]


def count(name: str, given: Any, *words: str) -> Any:
    """A number from 1 of nine digits at most, or one of the words; RecipeError for anything else."""
    if given in words:
        return given
    text = str(given)
    if not (is_number(text) and int(text) >= 1):
        raise RecipeError(f"{name} {given}", do=f"give {', or '.join((f'a number from 1 to {LARGEST}', *words))}")
    return int(text)
