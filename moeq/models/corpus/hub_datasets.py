"""Which files of a dataset repository are a configuration's split: as its card says, or as their names do."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import PurePosixPath
from typing import Any

from moeq.bounded import YamlError, parse_yaml
from moeq.errors import CorpusError
from moeq.models.corpus.rows import kind_of

DEFAULT = "default"
CARD_BYTES = 4 << 20  # of a card's front matter: those of data sets with thousands of configurations are long
PATH_CHARACTERS = 1024  # of a pattern: no path is longer, and time goes by the square of a pattern's length
KINDS = (".parquet", ".jsonl", ".json", ".txt")  # of a split's files, the first kind that there is
NOT_DATA = {"dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json", "config.json", "README.txt"}
SPLIT_WORDS = {
    "train": "train", "training": "train", "validation": "validation", "valid": "validation", "val": "validation",
    "dev": "validation", "test": "test", "testing": "test", "eval": "test", "evaluation": "test",
}  # fmt: skip
NUMBERED = re.compile(r"(?P<split>[\w.-]*?)-\d{5}-of-\d{5}(-\w+)?\.")  # how the datasets library names files
PREFERRED = {"calibration": ("train",), "evaluation": ("test", "validation")}

Splits = dict[str, list[str]]


@dataclass(frozen=True, kw_only=True)
class Chosen:
    config: str
    split: str
    files: tuple[str, ...]


def choose_files(
    files: Sequence[str], readme: str, config: str | None, split: str | None, part: str, *, where: str
) -> Chosen:
    """The files of a configuration's split.

    Without a split, calibration takes train, evaluation takes test or else validation. Raises CorpusError naming what
    there is when the choice is not clear or holds no file that can be read.
    """
    configs, default = _from_card(files, readme, where)
    if not configs:
        configs, default = _from_names(files)
    if not configs:
        what = "no Parquet, JSON or text files in it"
        raise CorpusError(what, where=where, do="try @refs/convert/parquet after its name, or give a local file")
    name = config or default or (next(iter(configs)) if len(configs) == 1 else None)
    if name is None or name not in configs:
        problem = f"no configuration {config!r}" if config else "which configuration"
        raise CorpusError(f"{problem} (there are: {_listed(configs)})", where=where, do="write hub:ORG/NAME:CONFIG")
    splits = configs[name]
    chosen = split or next((name for name in PREFERRED[part] if name in splits), None)
    if chosen is None or chosen not in splits:
        problem = f"no split {chosen!r}" if chosen else f"no split for {part}"
        what = f"{problem} (there are: {_listed(splits)})"
        raise CorpusError(what, where=where, do=f"write hub:ORG/NAME:{name}:SPLIT")
    return Chosen(config=name, split=chosen, files=tuple(splits[chosen]))


def _listed(names: dict[str, Any]) -> str:
    shown = ", ".join(list(names)[:12])
    return f"{shown} and {len(names) - 12} more" if len(names) > 12 else shown


def _from_card(files: Sequence[str], readme: str, where: str) -> tuple[dict[str, Splits], str | None]:
    """Configurations as the front matter of README.md names them, and the default; CorpusError where it is no YAML."""
    match = re.match(r"---\s*\n(.*?)\n---", readme, re.DOTALL)
    try:
        front = parse_yaml(match[1], most=CARD_BYTES).value if match else None
    except YamlError as error:
        what = f"its card cannot be read ({error})"
        raise CorpusError(what, where=error.at(f"{where}, README.md"), do="give files of your own") from None
    entries = front.get("configs") if isinstance(front, dict) else None
    configs: dict[str, Splits] = {}
    default = None
    for entry in entries if isinstance(entries, list) else []:
        if isinstance(entry, dict):
            name = str(entry.get("config_name", DEFAULT))
            splits = _splits_of_entry(files, entry)
            if splits:
                configs[name] = splits
                default = name if entry.get("default") or name == DEFAULT else default
    return configs, default


def _splits_of_entry(files: Sequence[str], entry: dict[str, Any]) -> Splits:
    folder = str(entry.get("data_dir") or "").strip("/")
    inside = [file for file in files if not folder or file.startswith(f"{folder}/")]
    wanted = entry.get("data_files")
    if wanted is None:
        return _splits_by_name(_data(inside))
    if isinstance(wanted, str) or (isinstance(wanted, list) and all(isinstance(path, str) for path in wanted)):
        pairs: list[tuple[str, Any]] = [("train", wanted)]
    elif isinstance(wanted, dict):
        pairs = [(str(split), paths) for split, paths in wanted.items()]
    else:
        parts = [part for part in wanted if isinstance(part, dict)] if isinstance(wanted, list) else []
        pairs = [(str(part.get("split", "train")), part.get("path")) for part in parts]
    splits: Splits = {}
    for split, paths in pairs:
        several = paths if isinstance(paths, list) else [paths]
        patterns = [path for path in several if isinstance(path, str) and len(path) <= PATH_CHARACTERS]
        full = [path if not folder or path.startswith(f"{folder}/") else f"{folder}/{path}" for path in patterns]
        matching = [file for file in inside if any(_matches(file, pattern) for pattern in full)]
        if matching:
            splits[split] = splits.get(split, []) + _one_kind(matching)
    return {split: chosen for split, chosen in splits.items() if chosen}


def _matches(file: str, pattern: str) -> bool:
    """A pattern's `*` stays within a folder, `**` does not."""
    if "**" in pattern:
        return fnmatchcase(file, pattern.replace("**/", "*")) or fnmatchcase(file, pattern)
    return file.count("/") == pattern.count("/") and fnmatchcase(file, pattern)


def _from_names(files: Sequence[str]) -> tuple[dict[str, Splits], str | None]:
    """Configurations as folders name them (beside `data` and splits), else one called default."""
    grouped: dict[str, list[str]] = {}
    for file in _data(files):
        folders = (part for part in PurePosixPath(file).parts[:-1] if part != "data" and part not in SPLIT_WORDS)
        grouped.setdefault(next(folders, DEFAULT), []).append(file)
    configs = {name: _splits_by_name(in_folder) for name, in_folder in grouped.items()}
    return configs, DEFAULT if DEFAULT in grouped else None


def _data(files: Sequence[str]) -> list[str]:
    names = [file for file in sorted(files) if PurePosixPath(file).name not in NOT_DATA and not file.startswith(".")]
    return _one_kind(names)


def _one_kind(files: Sequence[str]) -> list[str]:
    """Files of the first kind that is there: repositories often hold the same rows twice."""
    by_kind = (sorted(file for file in files if kind_of(file) == kind) for kind in KINDS)
    return next(filter(None, by_kind), [])


def _splits_by_name(files: Sequence[str]) -> Splits:
    splits: Splits = {}
    for file in files:
        splits.setdefault(_split_of(file), []).append(file)
    return splits


def _split_of(file: str) -> str:
    """What a file's name, or else a folder, says about its split; train where nothing is said."""
    path = PurePosixPath(file)
    numbered = NUMBERED.match(path.name)
    named = numbered["split"] if numbered else ""
    if not named and path.stem.isdigit():  # 0000.parquet, as the hub converts
        named = path.parent.name
    if named:
        return SPLIT_WORDS.get(named, named)
    for part in (path.name, *reversed(path.parts[:-1])):
        words = [word for word in re.split(r"[^a-z]+", part.lower()) if word in SPLIT_WORDS]
        if words:
            return SPLIT_WORDS[words[0]]
    return "train"
