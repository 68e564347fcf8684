"""The command line of `moeq eval`: what is asked for, and what is refused before a model's code is imported."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moeq import preflight
from moeq.artifacts.run import RECIPE_COPY
from moeq.errors import EvaluationError, RecipeError, nearest
from moeq.evaluation.context_options import ContextOptions
from moeq.evaluation.windows import check_windows
from moeq.models.source import check_there
from moeq.recipe import BUNDLED, Recipe, load_recipe

if TYPE_CHECKING:
    from moeq.evaluation.batching import BatchSize

RECIPES = (".yaml", ".yml")
WINDOW = 512
ORIGINAL = "original"
ALL = "*"  # every assignment of a run


@dataclass(frozen=True, kw_only=True)
class Asked:
    """The command line of `moeq eval`; words: a recipe, or what is compared."""

    words: list[str]
    model: str | None = None
    out: Path | None = None
    overrides: list[str]
    tasks: str | None = None
    include_path: Path | None = None
    num_fewshot: int | None = None
    limit: int | None = None
    batch_size: str | None = None
    text: str | None = None
    window: int | None = None
    stride: int | None = None
    context_aware: list[str]
    truncate: bool = False
    dtype: str = "auto"
    device: str = "auto"
    trust_remote_code: bool = False
    json: bool = False
    quiet: bool = False

    @property
    def recipe(self) -> Path | None:
        """Of a run's stage."""
        return Path(self.words[0]) if self.words else None

    @property
    def task_names(self) -> list[str]:
        return [name.strip() for name in (self.tasks or "").split(",") if name.strip()]

    @property
    def rows(self) -> BatchSize | None:
        """The batch size; RecipeError unless it is a number or auto."""
        if self.batch_size is None or self.batch_size == "auto":
            return None if self.batch_size is None else "auto"
        if not self.batch_size.isdigit() or int(self.batch_size) < 1:
            raise RecipeError(f"--batch-size {self.batch_size}", do="give a number of at least 1, or auto")
        return int(self.batch_size)


def needs_a_run(asked: Asked) -> bool:
    """Whether the stage of a run is meant; RecipeError for options that it does not have, or that only it has."""
    stage = not asked.words or (len(asked.words) == 1 and Path(asked.words[0]).suffix in RECIPES)
    beyond = {
        "--text": asked.text,
        "--window": asked.window,
        "--stride": asked.stride,
        "--context-aware": asked.context_aware or None,
        "--truncate": asked.truncate or None,
        "--dtype": None if asked.dtype == "auto" else asked.dtype,
        "--device": None if asked.device == "auto" else asked.device,
    }
    of_a_run = {"--model": asked.model, "--set": asked.overrides or None}
    wrong = [name for name, value in (beyond if stage else of_a_run).items() if value is not None]
    if wrong and stage:
        raise RecipeError(f"{wrong[0]} belongs to models, checkpoints and runs", where="moeq eval", do="name one")
    if wrong:
        raise RecipeError(
            f"{wrong[0]} belongs to a run's stage", where="moeq eval", do="give a recipe, or leave it out"
        )
    return stage


def recipe_overrides(asked: Asked) -> list[str]:
    """What the options change of a run's recipe."""
    given: dict[str, Any] = {
        "tasks": f"[{', '.join(asked.task_names)}]" if asked.tasks is not None else None,
        "include_path": asked.include_path,
        "num_fewshot": asked.num_fewshot,
        "limit": asked.limit,
        "batch_size": asked.rows,
    }
    return [*asked.overrides, *(f"eval.{name}={value}" for name, value in given.items() if value is not None)]


def check(asked: Asked) -> list[ContextOptions]:
    """The options of context-aware rows, and every refusal that takes no model: RecipeError, EvaluationError.

    ModelError, ArtifactError for what is named and not there.
    """
    _check_options(asked)
    _ = asked.rows
    contexts = [ContextOptions.parse(text) for text in asked.context_aware]
    preflight.check_device(asked.device)
    preflight.check_tasks(asked.include_path)
    source = text_source(asked)
    if source is not None:
        preflight.check_texts(source)
    if asked.out is not None and (asked.out.is_dir() or not asked.out.absolute().parent.is_dir()):
        raise EvaluationError("is no file that can be written", where=str(asked.out), do="give a path in a folder")
    for word in asked.words:
        _check_word(word)
    return contexts


def _check_word(word: str) -> None:
    """What is named must be there, a run's assignment in its recipe; a hub id is looked up later."""
    path = Path(word).expanduser()
    if path.suffix == ".json" and path.is_file():
        return
    folder, name = split_run(word)
    if folder is not None:
        assignments_of(load_recipe(folder / RECIPE_COPY), name, folder)
    else:
        check_there(word)


def split_run(word: str) -> tuple[Path | None, str | None]:
    """The run that a word names, and the assignment behind its colon; None for what they are not."""
    folder, colon, name = word.rpartition(":")
    if colon and (Path(folder).expanduser() / RECIPE_COPY).is_file():
        return Path(folder).expanduser(), name
    path = Path(word).expanduser()
    return (path, None) if (path / RECIPE_COPY).is_file() else (None, None)


def assignments_of(recipe: Recipe, name: str | None, run: Path) -> list[str]:
    """The assignments of a run that are meant: its own, one by its name, or all; EvaluationError for an unknown one."""
    known = [ORIGINAL, recipe.name, *(one.name for one in recipe.eval.compare)]
    if name is not None and name not in (*known, ALL):
        guess = nearest(name, known)
        hint = f"did you mean {guess!r}?" if guess else f"it has {', '.join(known)}"
        raise EvaluationError(f"no assignment {name!r}", where=str(run), do=hint)
    return known if name == ALL else [name or recipe.name]


def _check_options(asked: Asked) -> None:
    """RecipeError for options that nothing would follow, EvaluationError for windows that cannot be."""
    of_tasks = {
        "--include-path": asked.include_path,
        "--num-fewshot": asked.num_fewshot,
        "--limit": asked.limit,
        "--truncate": asked.truncate or None,
    }
    of_text = {"--window": asked.window, "--stride": asked.stride}
    if text_source(asked) is not None:
        check_windows(asked.window or WINDOW, asked.stride)
    for given, missing, there in ((of_tasks, "--tasks", asked.task_names), (of_text, "--text", text_source(asked))):
        wrong = [name for name, value in given.items() if value is not None]
        if wrong and not there:
            raise RecipeError(f"{wrong[0]} without {missing}", where="moeq eval", do=f"give {missing} too")


def text_source(asked: Asked) -> str | None:
    """The text that perplexity is measured on; the bundled one where neither a text nor a task is named."""
    return asked.text or (None if asked.task_names else BUNDLED)
