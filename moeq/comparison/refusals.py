"""What `moeq eval` is asked for, and what it refuses before a model's code is imported."""

from __future__ import annotations

from pathlib import Path

from moeq import preflight
from moeq.artifacts.run import DIRECTORIES, RECIPE_COPY
from moeq.artifacts.storage import check_file
from moeq.comparison.eval_options import OF_SUBJECTS, OF_TASKS, OF_TEXT, EvalOptions
from moeq.errors import EvaluationError, RecipeError, hint
from moeq.evaluation.context_options import ContextOptions
from moeq.evaluation.windows import check_windows
from moeq.folders import expanded, has_recipe
from moeq.models.source import check_there
from moeq.options import OF_A_RUN, RECIPES
from moeq.recipe import BUNDLED, Recipe, load_recipe
from moeq.runtime.dynamic.options import DynamicOptions

WINDOW = 512
ORIGINAL = "original"
ALL = "*"  # every assignment of a run


def needs_a_run(asked: EvalOptions) -> bool:
    """Whether the stage of a run is meant; RecipeError for options that it does not have, or that only it has."""
    stage = not asked.recipe or (len(asked.recipe) == 1 and Path(asked.recipe[0]).suffix in RECIPES)
    mark, do = (OF_SUBJECTS, "name one") if stage else (OF_A_RUN, "give a recipe, or leave it out")
    wrong = asked.given(mark)
    if wrong:
        raise RecipeError(f"{wrong[0]} belongs to {mark}", where="eval", do=do)
    return stage


def check(asked: EvalOptions) -> list[ContextOptions | DynamicOptions]:
    """The options of rows whose experts follow the context or the workload, and every refusal that takes no model:
    RecipeError, EvaluationError.

    ModelError, ArtifactError for what is named and not there.
    """
    _check_options(asked)
    _ = asked.rows
    contexts = [ContextOptions.parse(text) for text in asked.context_aware]
    preflight.check_dynamic(next(iter(asked.dynamic), None), None, asked.dynamic_log)
    followed = [DynamicOptions.parse(text) for text in asked.dynamic]
    preflight.check_device(asked.device or "auto")
    preflight.check_tasks(asked.include_path)
    source = text_source(asked)
    if source is not None:
        preflight.check_texts(source)
    if asked.out is not None:
        check_file(asked.out)
        if asked.out.is_dir() or not asked.out.absolute().parent.is_dir():
            raise EvaluationError("is no file that can be written", where=str(asked.out), do="give a path in a folder")
    for word in asked.recipe:
        _check_word(word)
    return [*contexts, *followed]


def _check_word(word: str) -> None:
    """What is named must be there, a run's assignment in its recipe; a hub id is looked up later."""
    path = expanded(word)
    if path.suffix == ".json" and path.is_file():
        return
    folder, name = split_run(word)
    if folder is not None:
        assignments_of(load_recipe(folder / RECIPE_COPY), name, folder)
        checkpoint = folder / DIRECTORIES["export"]
        if checkpoint.is_dir():
            _check_continues(str(checkpoint))
    else:
        _check_continues(word)


def _check_continues(model: str) -> None:
    """EvaluationError for an encoder-decoder: it has no text that it continues. Raises ModelError as `check_there`."""
    if check_there(model).get("is_encoder_decoder") is True:
        raise EvaluationError(
            "an encoder-decoder continues no text", where=model, do="measure translations: eval.translation in a recipe"
        )


def split_run(word: str) -> tuple[Path | None, str | None]:
    """The run that a word names, and the assignment behind its colon; None for what they are not."""
    folder, colon, name = word.rpartition(":")
    if colon and has_recipe(expanded(folder)):
        return expanded(folder), name
    path = expanded(word)
    return (path, None) if has_recipe(path) else (None, None)


def assignments_of(recipe: Recipe, name: str | None, run: Path) -> list[str]:
    """The assignments of a run that are meant: its own, one by its name, or all; EvaluationError for an unknown one."""
    known = [ORIGINAL, recipe.name, *(compared.name for compared in recipe.eval.compare)]
    if name is not None and name not in (*known, ALL):
        raise EvaluationError(f"no assignment {name!r}", where=str(run), do=hint(name, known, "it has "))
    return known if name == ALL else [name or recipe.name]


def _check_options(asked: EvalOptions) -> None:
    """RecipeError for options that nothing would follow, EvaluationError for windows that cannot be."""
    if text_source(asked) is not None:
        check_windows(WINDOW if asked.window is None else asked.window, asked.stride)
    for mark, there in ((OF_TASKS, asked.task_names), (OF_TEXT, text_source(asked))):
        wrong = asked.given(mark)
        if wrong and not there:
            raise RecipeError(f"{wrong[0]} without {mark}", where="eval", do=f"give {mark} too")


def text_source(asked: EvalOptions) -> str | None:
    """The text that perplexity is measured on; the bundled one where neither a text nor a task is named."""
    return asked.text or (None if asked.task_names else BUNDLED)
