"""What decides beside the weights what a model does: configuration, tokenizer, processor and generation files."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from moeq.artifacts.digests import digest_of_file
from moeq.artifacts.manifest import NAME as MANIFEST
from moeq.artifacts.provenance import NAME as PROVENANCE
from moeq.bounded import shown
from moeq.exporters.packed_source import PackedSource
from moeq.models.configuration import read_settings
from moeq.models.loading import load_config
from moeq.models.side_files import DATA, DATA_PATTERN, without_code
from moeq.models.source import CONFIG, ModelSource

NO_COMPUTATION = re.compile(  # keys of config.json that say how weights are stored or loaded, not what is computed
    r"_.*|quantization(_config)?|compression_config|(torch_)?dtype|transformers_version|use_cache|auto_map|"
    r"custom_pipelines"
)
OF_THE_WRITER = frozenset(  # keys of other files that whoever saves them again writes anew
    {"transformers_version", "_from_model_config", "_commit_hash", "name_or_path", "tokenizer_class", "processor_class"}
    | {"local_files_only"}  # an option of whoever loaded it
)
LICENCE = re.compile(r"(LICEN[CS]E|NOTICE|COPYING|USE_POLICY)", re.IGNORECASE)
ABSENT = object()


@dataclass(frozen=True, kw_only=True)
class Settings:
    """compared: how many files; problems: what is not as in the original; notes: what another tool may well have
    written anew, to be looked at by people."""

    compared: int
    problems: tuple[str, ...]
    notes: tuple[str, ...]


def compare_settings(packed: PackedSource, source: ModelSource, trust_remote_code: bool) -> Settings:
    """Compare a checkpoint's settings with those of what it was made of.

    moeq takes files along as they are. Other tools save them anew: of theirs, what stands in both must be equal, and
    what only one has is a note.
    """
    here = packed.source.path
    faithful = (here / MANIFEST).is_file() or (here / PROVENANCE).is_file()
    problems = [*_config_differences(packed, source, trust_remote_code)]
    notes: list[str] = []
    ours, theirs = _files(here), _files(source.path)
    for name in sorted(ours.keys() | theirs.keys()):
        if name not in ours or name not in theirs:
            what = f"is not there, {source.name} has it" if name not in ours else f"is there, {source.name} has none"
            (problems if faithful else notes).append(f"{name} {what}")
            continue
        for what, one_sided in _file_differences(ours[name], theirs[name]):
            said = f"{name} is not as in {source.name}: {what}"
            (notes if one_sided and not faithful else problems).append(said)
    return Settings(compared=1 + len(ours.keys() & theirs.keys()), problems=tuple(problems), notes=tuple(notes))


def _config_differences(packed: PackedSource, source: ModelSource, trust: bool) -> Iterator[str]:
    """Keys of both configurations, each as transformers understands it, that change what is computed."""
    ours = load_config(replace(packed.source, config=packed.config), trust).to_dict()
    theirs = load_config(source, trust).to_dict()
    for key, mine, other in _unequal(_computing(ours), _computing(theirs)):
        yield f"{CONFIG}: {key} is {_said(mine)}, in {source.name} {_said(other)}"


def _computing(settings: Any) -> Any:
    if not isinstance(settings, Mapping):
        return settings
    kept = {key: value for key, value in settings.items() if not NO_COMPUTATION.fullmatch(str(key))}
    return {key: _computing(value) for key, value in kept.items()}


def _unequal(ours: Any, theirs: Any, key: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Where two settings differ, and what each has there."""
    if isinstance(ours, Mapping) and isinstance(theirs, Mapping):
        for name in sorted({*ours, *theirs}, key=str):
            inside = f"{key}.{name}" if key else str(name)
            yield from _unequal(ours.get(name, ABSENT), theirs.get(name, ABSENT), inside)
    elif isinstance(ours, list | tuple) and isinstance(theirs, list | tuple) and len(ours) == len(theirs):
        for place, (mine, other) in enumerate(zip(ours, theirs, strict=True)):
            yield from _unequal(mine, other, f"{key}[{place}]")
    elif ours is not theirs and (ours != theirs or isinstance(ours, bool) != isinstance(theirs, bool)):
        yield key, ours, theirs


def _said(value: Any) -> str:
    return "not there" if value is ABSENT else shown(value)


def _files(directory: Path) -> dict[str, Path]:
    """Tokenizer, processor and generation files of a directory."""
    return {
        path.name: path
        for path in directory.iterdir()
        if path.is_file()
        and (path.name in DATA or DATA_PATTERN.fullmatch(path.name))
        and LICENCE.match(path.name) is None
    }


def _file_differences(ours: Path, theirs: Path) -> Iterator[tuple[str, bool]]:
    """The first thing in which two files of a name differ, and whether only one of them has it."""
    if digest_of_file(ours) == digest_of_file(theirs):
        return
    if ours.suffix != ".json":
        yield "other bytes", False
        return
    mine, other = (without_code(read_settings(path))[0] for path in (ours, theirs))
    if isinstance(mine, dict) and isinstance(other, dict):
        mine, other = ({k: v for k, v in one.items() if k not in OF_THE_WRITER} for one in (mine, other))
    found = [*_unequal(mine, other)]
    for one_sided in (False, True):
        where = [key for key, *values in found if (ABSENT in map(_marker, values)) == one_sided]
        if where:
            more = f" (and {len(where) - 1} more)" if len(where) > 1 else ""
            yield f"{shown(where[0])}{more}", one_sided


def _marker(value: Any) -> Any:
    return value if value is ABSENT else None
