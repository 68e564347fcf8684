"""A run's directory: whose it is before anything is written to it, and the recipe that lies in it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from rich.markup import escape

from moeq.artifacts.files import write_text
from moeq.artifacts.mirror import Mirror
from moeq.artifacts.places import ELSEWHERE
from moeq.artifacts.run import EDITABLE, RECIPE_COPY, STAGES
from moeq.artifacts.stage import QUANTIZED, StageRecord, current_digest, read_record
from moeq.artifacts.storage import is_dangling
from moeq.errors import ArtifactError, RecipeError
from moeq.estimator import own_hardware
from moeq.models.corpus import BUNDLED, DIGITS, Source, pinned
from moeq.recipe import load_recipe
from moeq.recipe.earlier import RECORDED
from moeq.recipe.editing import as_yaml, in_decimals
from moeq.stages.context import Context
from moeq.stages.recorded import changed_files

CODES_OF = {QUANTIZED: ("losses", "assign"), "export": ("assign", QUANTIZED)}  # what decides the codes that lie there
SHOWN = 8  # changed keys of a recipe that are named


def record_of(directory: Path, stage: str) -> StageRecord | None:
    """A stage's record; None where there is none that can be read."""
    try:
        return read_record(directory, stage)
    except ArtifactError:
        return None


def check_model(context: Context, stages: Iterable[str], mirror: Mirror | None = None) -> None:
    """ArtifactError where another model's artifacts lie in the run directory, or in its mirror, where that is given.

    context: before norms are folded. The same model is one of the same digest, whatever it is called and wherever it
    lies; where norms were folded, the model that this was done to counts.
    """
    folders = {name: context.finished(name) for name in stages}
    records = {
        name: record_of(folder, name) if mirror is None else mirror.record(folder.name)
        for name, folder in folders.items()
    }
    what = _another_model(context, records)
    if what is not None and mirror is not None:
        raise ArtifactError(what, where=f"mirror: {mirror.url}", do="give another address")
    if what is not None:
        raise ArtifactError(what, where=f"--out {context.out}", do=ELSEWHERE)


def check_run(run: Context) -> None:
    """ArtifactError where a run that is read was made from another model than lies where its recipe has it."""
    context = run.given()
    what = _another_model(context, {name: record_of(context.finished(name), name) for name in STAGES})
    if what is not None:
        do = "put back what it was made from, or make the run again in another --out"
        raise ArtifactError(what, where=str(run.out), do=do)


def _another_model(context: Context, records: dict[str, StageRecord | None]) -> str | None:
    """What is said of stages that were made from another model than the run's, before norms are folded; None where none
    was."""
    first, model = records.pop("reparam", None), context.model
    if first is None and context.recipe.reparam is not None:
        return None  # what is there may be of the folded model, and is remade
    for record in records.values() if first is None else [first]:
        if record is not None and record.model.digest != model.stamp.digest:
            changed = changed_files(record, model.files) if record.model.name == model.stamp.name else []
            more = f": {changed[0]} is not the file that it read" if changed else ""
            return f"the run in it was made from another model ({record.model.name}){more}"
    return None


def check_codes(context: Context, name: str) -> None:
    """ArtifactError where the codes that a stage has left were made of something else than lies there now."""
    record = read_record(context.finished(name), name)
    for other in (one for one in CODES_OF[name] if is_another(context, one, record)):
        what = f"made of another {other}/ than lies there now"
        raise ArtifactError(what, where=str(context.finished(name)), do=f"run `moeq {name}` again")


def is_another(context: Context, name: str, record: StageRecord) -> bool:
    """Whether what a record was made from is not what the stage of that name has left."""
    made = record.inputs.get(name)
    if made is None or record_of(context.finished(name), name) is None:
        return False
    return made != digest_before(context, name, cached=not context.check)


def digest_before(context: Context, name: str, *, cached: bool) -> str:
    """Digest of an earlier stage's files; ArtifactError for one that is not what the stage wrote, nor may be edited."""
    editable = EDITABLE.get(name, frozenset())
    return current_digest(context.directory(name), name, editable, cached=cached, reporter=context.reporter)


def recipe_data(context: Context) -> dict[str, Any]:
    """The recipe as it was run: paths absolute, hub models and datasets at their commit."""
    before = _recipe_before(context.out)
    data = context.recipe.model_dump(mode="json") | {"model": absolute(context.model_name)}
    data["revision"] = context.model.source.revision or data["revision"]
    if not is_dangling(context.store):
        data["store"] = None if context.owns_store else str(context.store.resolve())
    if context.model.takes_images:
        data["corpus"]["source"] = absolute(data["corpus"]["source"])
        data["eval"]["perplexity"] = None
    elif before is None or before["corpus"]["source"] != data["corpus"]["source"]:
        data["corpus"]["source"] = _pinned(data["corpus"]["source"], context.text.calibration_sources)
    if data["eval"]["images"] is not None:
        data["eval"]["images"]["source"] = absolute(data["eval"]["images"]["source"])
    measured = data["eval"]["perplexity"]
    if measured is not None and _text_of(before) != measured["source"]:
        measured["source"] = _pinned(measured["source"], context.text.evaluation_sources)
    for key in ("source", "target") if data["eval"]["translation"] is not None else ():
        data["eval"]["translation"][key] = absolute(data["eval"]["translation"][key])
    data["eval"]["include_path"] = absolute(data["eval"]["include_path"])
    for section in (data["assign"], data["estimate"], *data["eval"]["compare"]):
        own = None if section["hardware"] is None else own_hardware(section["hardware"])
        section["hardware"] = section["hardware"] if own is None else absolute(str(own))
    return data


def _recipe_before(out: Path) -> dict[str, Any] | None:
    """The recipe that lies in a run directory; None where there is none that can be read."""
    path = out / RECIPE_COPY
    if not path.is_file():
        return None
    try:
        return load_recipe(path).model_dump(mode="json")
    except RecipeError:
        return None


def _text_of(recipe: dict[str, Any] | None) -> Any:
    """What perplexity is measured on."""
    section = None if recipe is None else recipe["eval"]["perplexity"]
    return None if section is None else section["source"]


def write_recipe(context: Context) -> None:
    """Write the recipe to the run directory unless it is there already, and say which of its keys have changed."""
    data, before = recipe_data(context), _recipe_before(context.out)
    if data == before:
        return
    write_text(context.out / RECIPE_COPY, f"{RECORDED}\n{as_yaml(data)}")
    if before is not None:
        changed = list(_changes(in_decimals(before), in_decimals(data)))
        more = f" and {len(changed) - SHOWN} more" if len(changed) > SHOWN else ""
        context.reporter.say(escape(f"{RECIPE_COPY}: {', '.join(changed[:SHOWN])}{more}"))


def _changes(before: Any, after: Any, key: str = "") -> Iterator[str]:
    """`key before -> after` of everything that differs between two recipes."""
    if isinstance(before, dict) and isinstance(after, dict):
        for name in dict.fromkeys((*before, *after)):
            yield from _changes(before.get(name), after.get(name), f"{key}.{name}" if key else name)
    elif before != after:
        yield f"{key} {_short(before)} -> {_short(after)}"


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _pinned(source: Any, opened: list[Source]) -> Any:
    """Files by their absolute path, hub datasets at their commit."""
    return absolute(pinned(source, opened))


def absolute(name: Any) -> Any:
    """Paths that exist become absolute, so that the copied recipe works from any directory; other names stay."""
    if isinstance(name, list):
        return [absolute(part) for part in name]
    if isinstance(name, dict):
        return name | {"path": absolute(name["path"])}
    own = not isinstance(name, str) or name in (BUNDLED, DIGITS)
    return name if own or not Path(name).exists() else str(Path(name).resolve())
