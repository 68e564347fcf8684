"""How a run makes its checkpoint, for its provenance: model, recipe, texts, versions and the stages' results.

Nothing in it says where something lies or when it was made. The recipe stands without eval, estimate, gates, store,
stream, workers, engine, mirror and other runtimes' formats, which change no byte of a checkpoint and so need not be
asked for again; what is compared stays, by name, where the size of the whole checkpoint is limited, whose card has a
row for each, and stream as it was where quantize.tune trains, which goes layer by layer in a streamed model.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import PurePath
from typing import Any

import torch
from pydantic import ValidationError

from moeq.artifacts import making
from moeq.artifacts.digests import digest_of_file
from moeq.artifacts.files import canonical_json
from moeq.artifacts.provenance import (
    CALIBRATION,
    HARDWARE,
    MODEL,
    NO_SUBJECTS,
    RUN,
    TEXT,
    BuildDefinition,
    Digests,
    Making,
    NamedModel,
    Parameters,
    Resource,
    RunDetails,
    files_as,
)
from moeq.artifacts.run import EDITABLE
from moeq.artifacts.stage import current_digest, read_record
from moeq.errors import MoeqError
from moeq.estimator import own_hardware
from moeq.models import corpus
from moeq.models.source import CONFIG
from moeq.recipe import BUNDLED, DIGITS, HUB, each_source, naming_part
from moeq.recipe.recipe import MOST_THREADS
from moeq.registry import ALLOCATORS, EXPORTERS, QUANTIZERS
from moeq.runtimes import NATIVE, runtimes
from moeq.stages.context import Context

SHAPELESS = (
    "eval", "estimate", "gates", "store", "stream", "workers", "engine", "mirror",  # of a recipe: what changes no byte
)  # fmt: skip
TEXT_FILES = "text_files"  # in `volatile` of a record: what the text was read from
DIGEST = "0" * 64
PIN = 120  # characters that a commit, a configuration and a split add to the name of a dataset


def of_run(context: Context, runtime: str = NATIVE) -> Making:
    """How the checkpoint for a runtime is made from what the stages before the export wrote."""
    stages = {name: _digest_of(context, name) for name in ("profile", "losses", "assign", "quantize")}
    if context.folds:
        stages = {"reparam": read_record(context.finished("reparam"), "reparam").digest} | stages
    calibration = read_record(context.directory("profile"), "profile").inputs["calibration"]
    texts, threads = _texts_of(context, calibration), _threads(context, stages)
    return _making(context, runtime, _model_files(context), texts, stages, threads, calibration)


def largest(context: Context, files: Iterator[str] | list[str]) -> int:
    """Bytes of the native checkpoint's provenance, at most; files: of the checkpoint."""
    texts = [_unread(name) for name in _names(context)]
    stages = dict.fromkeys(("reparam", "profile", "losses", "assign", "quantize"), DIGEST)
    files_read = dict.fromkeys([CONFIG, *context.model.source.named_files()], DIGEST)
    threads = dict.fromkeys(stages, MOST_THREADS)
    said = _making(context, NATIVE, files_read, texts, stages, threads, DIGEST)
    statement = said.statement({name: DIGEST for name in files if name not in NO_SUBJECTS})
    return len(canonical_json(statement.as_json()).encode())


def _model_files(context: Context) -> dict[str, str]:
    """{file: SHA-256} of the model as it was given, before its norms were folded."""
    model = context.given().model
    return model.files | {CONFIG: digest_of_file(model.source.path / CONFIG)}


def text_files(context: Context) -> list[dict[str, Any]]:
    """What the calibration text is read from, for the record of a stage that reads it."""
    with context.text.reading("calibration"):
        return [one.model_dump(mode="json", by_alias=True, exclude_none=True) for one in _texts(context)]


def _threads(context: Context, stages: Iterable[str]) -> dict[str, int]:
    """How many threads computed stages, as their records have it; those of older versions do not."""
    noted = {name: read_record(context.directory(name), name).volatile.get(making.THREADS) for name in stages}
    return {name: count for name, count in noted.items() if isinstance(count, int)}


def _making(
    context: Context,
    runtime: str,
    files: dict[str, str],
    texts: list[Resource],
    stages: dict[str, str],
    threads: dict[str, int],
    text: str,
) -> Making:
    """files: of the model; stages: digests of what they wrote; threads: how many computed those before the export;
    text: of all that decides the calibration text."""
    recipe, source = context.recipe, context.model.source  # of a folded model with the name of the given one
    name = runtimes()[runtime].exporter.name
    made_by = (
        ALLOCATORS.origin(recipe.assign.method), EXPORTERS.origin(name), *map(QUANTIZERS.origin, recipe.losses.methods)
    )  # fmt: skip
    definition = BuildDefinition(
        build_type=RUN,
        parameters=Parameters(
            runtime=runtime,
            model=NamedModel(name=source.name, revision=source.revision),
            texts=_names(context),
            recipe=_recipe(context, runtime),
        ),
        dependencies=[
            *files_as(MODEL, files),
            Resource(name=CALIBRATION, digest=Digests(own=text)),
            *texts,
            *_hardware(context),
            *making.packages(name, made_by),
        ],
    )
    byproducts = [Resource(name=stage, digest=Digests(own=digest)) for stage, digest in stages.items()]
    builder = making.builder(context.model.device, torch.get_num_threads(), threads)
    return Making(definition=definition, details=RunDetails(builder=builder, byproducts=byproducts))


def _digest_of(context: Context, stage: str) -> str:
    """Digest of what a stage's files hold, edits by hand among it."""
    return current_digest(context.directory(stage), stage, EDITABLE.get(stage, frozenset()))


def _recipe(context: Context, runtime: str) -> dict[str, Any]:
    """The recipe as it was run for one runtime, paths reduced to their last part."""
    data = context.recipe.model_dump(mode="json")
    hardware = context.recipe.hardware_of(context.recipe.assign)
    compared = data["eval"]["compare"] if context.recipe.assign.size is not None else []  # whose rows in the card count
    for key in SHAPELESS:
        del data[key]
    if context.recipe.quantize.tune is not None:
        data["stream"] = "always" if context.model.streams else "never"
    data["eval"] = {"compare": [one | {"hardware": one["hardware"] and _last(one["hardware"])} for one in compared]}
    data["export"]["formats"] = [] if runtime == NATIVE else [runtime]  # others that are written change nothing of it
    del data["export"]["verify"], data["export"]["onnx"]
    data |= {"model": context.model.source.name, "revision": context.model.source.revision}
    data["corpus"]["source"] = _reduced(data["corpus"]["source"])
    data["assign"]["hardware"] = None if hardware is None else _last(hardware)
    return data


def _reduced(source: Any) -> Any:
    if isinstance(source, list):
        return [_reduced(one) for one in source]
    if isinstance(source, dict):  # whose domain may be called after the folder that it lies in
        return source | {"path": _last(source["path"]) if source.get("name") else naming_part(source["path"])}
    return _last(source)


def _last(name: str) -> str:
    """The last part of a path; names of the hub and of what moeq brings along as they are."""
    return name if name in (BUNDLED, DIGITS) or name.startswith(HUB) else PurePath(name).name


def _names(context: Context) -> list[str]:
    """What the recipe calibrates on, by name."""
    return [_last(one.path) for one in each_source(context.recipe.corpus.source)]


def _unread(name: str) -> Resource:
    """About a text that was not opened, as long as anything that may be said of it."""
    long = name + "x" * PIN if name.startswith(HUB) else name
    return Resource(name=f"{TEXT}{long}", digest=Digests(sha256=DIGEST))


def _texts_of(context: Context, calibration: str) -> list[Resource]:
    """The texts as the profile's record has them, by the names that the recipe has for them now; of an older record as
    they are now. Where they are not the same any more: as the record has them, or none."""
    noted = read_record(context.directory("profile"), "profile").volatile.get(TEXT_FILES)
    try:
        same, why = context.text.digest("calibration") == calibration, "it has changed since"
    except MoeqError as error:
        same, why = False, str(error)
    try:
        if isinstance(noted, list):
            found = [Resource.model_validate(one) for one in noted]
            return _renamed(context, found) if same else found
        if same:
            return _texts(context)
    except (MoeqError, ValidationError) as error:
        why = str(error)
    context.reporter.say(
        f"  [yellow]the provenance names no calibration text: {why}[/yellow]",
    )
    return []


def _renamed(context: Context, texts: list[Resource]) -> list[Resource]:
    """Texts by what they are called now: a file that was given another name is the same text."""
    names = context.text.corpus_names if context.model.takes_images else _names(context)
    return [
        text if (text.name or "").startswith(f"{TEXT}{HUB}") else text.model_copy(update={"name": f"{TEXT}{name}"})
        for text, name in zip(texts, names, strict=True)
    ]


def _texts(context: Context) -> list[Resource]:
    """What the calibration text is read from; files by the digest of their bytes, datasets by their commit."""
    text = context.text
    if context.model.takes_images:
        return [
            Resource(name=f"{TEXT}{one.public_name}", digest=Digests(own=one.digest)) for one in text.calibration_images
        ]
    found = []
    for name, source in zip(_names(context), text.calibration_sources, strict=True):
        if isinstance(source, corpus.LocalFile):
            digests = Digests(sha256=digest_of_file(source.path, cached=True))
            found.append(Resource(name=f"{TEXT}{name}", digest=digests))
        else:
            found.append(Resource(name=f"{TEXT}{source.name}", digest=Digests(git_commit=source.commit)))
    return found


def _hardware(context: Context) -> list[Resource]:
    """The file of constants that decided the assignment; none of a hardware that moeq brings along."""
    name = context.recipe.hardware_of(context.recipe.assign)
    own = None if name is None else own_hardware(name)
    return [] if own is None else files_as(HARDWARE, {own.name: digest_of_file(own, cached=True)})
