"""What goes along with a model's weights into a checkpoint that is made of it: data by name, code where it is trusted.

Files are taken by name, never because they are there: tokenizer, processor and generation settings, chat templates and
licences. Python files go along only where the user trusts them, and the entries of JSON files that would have a loader
run code (`auto_map`, `custom_pipelines`) with them: an export asks for `trust_remote_code=True` so that its own hook is
run, and must not bring along what nobody has read. Pickles, libraries and folders never go along.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moeq.artifacts.digests import digest_of_file
from moeq.artifacts.files import copy_file, write_json
from moeq.models.configuration import read_settings
from moeq.models.drafts import without_drafting
from moeq.models.source import CONFIG, SIDE_FILES, VOCABULARIES, check_part

HOOK_FILE = "configuration_moeq.py"
SOURCE_CARD = "README.source.md"  # the card of the checkpoint that one was converted from
DATA = frozenset(SIDE_FILES) | {  # what the tokenizers and processors of transformers are made of
    "audio_tokenizer_config.json", "byte_maps.json", "dict.txt", "emoji.json", "entity_vocab.json", "normalizer.json",
    "target_vocab.json", "vocab-src.json", "vocab-tgt.json", "word_pronunciation.json", "word_shape.json", "bpe.codes",
}  # fmt: skip
LICENCE = r"(LICEN[CS]E|NOTICE|COPYING|USE_POLICY)([-._][\w.-]*)?"
DATA_PATTERN = re.compile(
    rf".+\.(jinja|model|spm|tiktoken|tokenizer)|(vocab|merges|bpe)[\w.-]*\.txt|{LICENCE}", re.IGNORECASE
)
CODE_SUFFIXES = {".py", ".pyc", ".pyd", ".so", ".dll", ".dylib", ".sh"}
PICKLES = {".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt", ".joblib", ".npy", ".npz"}
UNSAID = re.compile(  # what an export has of its own, or needs no mention
    r"\..*|README(\.source)?\.md|.*\.safetensors|.*\.safetensors\.index\.json|config\.json|SHA256SUMS|stage\.json"
    r"|model\.gguf|placement(\.schema)?\.json|provenance\.json|model\.sig"
)  # fmt: skip
CODE_KEYS = frozenset({"auto_map", "custom_pipelines"})  # of JSON files: what they name is imported and run
NO_SETTINGS = VOCABULARIES | {name for name in DATA if "vocab" in name or name.startswith("word_")}
TRUST = "--trust-remote-code"
SHOWN = 6  # names in a line


@dataclass(frozen=True, kw_only=True)
class SideFiles:
    """What goes along, and what does not.

    data: files that are copied; cleaned: what is written of those among them that had entries for code; code: trusted
    Python files; entries: where entries for code stood, as `auto_map of config.json`; left_code, left_others: names of
    what stays behind. trusted: whether code goes along.
    """

    data: tuple[Path, ...]
    cleaned: Mapping[str, Any]
    code: tuple[Path, ...]
    entries: tuple[str, ...]
    left_code: tuple[str, ...]
    left_others: tuple[str, ...]
    trusted: bool

    def config(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """A configuration as it goes along."""
        return without_drafting(config if self.trusted else without_code(config)[0])

    def sizes(self) -> dict[str, int]:
        """Bytes of every file that goes along as it lies there."""
        return {path.name: path.stat().st_size for path in (*self.data, *self.code)}

    def code_digests(self) -> dict[str, str]:
        """{name: SHA-256} of the code that goes along."""
        return {path.name: digest_of_file(path) for path in self.code}

    def of_the_text(self) -> list[Path]:
        """What a tokenizer or a processor is made of: all data but licences, and code that settings among it name."""
        data = [path for path in self.data if re.fullmatch(LICENCE, path.name, re.IGNORECASE) is None]
        return data + (list(self.code) if self.trusted and _cleaned({}, self.data)[1] else [])

    def copy(self, directory: Path) -> None:
        """Write them all into a directory; ModelError for what has become a link that leads out, or no file."""
        for path in (*self.data, *self.code):
            check_part(path.parent, path.name)
            if path.name in self.cleaned:
                write_json(directory / path.name, self.cleaned[path.name])
            else:
                copy_file(path, directory / path.name, digest_of_file(path, cached=True))

    def said(self) -> str | None:
        """One line on what stays behind, or None."""
        parts = []
        if self.entries or self.left_code:
            named = _listed([*self.left_code, *self.entries])
            trust = f"code and pickles; Python files go along with {TRUST}, once you have read them"
            parts.append(f"{named} ({'libraries and pickles never go along' if self.trusted else trust})")
        if self.left_others:
            parts.append(_listed(self.left_others))
        return f"left out: {'; '.join(parts)}" if parts else None


def find_side_files(directory: Path, config: Mapping[str, Any], trust_remote_code: bool = False) -> SideFiles:
    """What of a model's directory goes along; config: the model's configuration, as it would go along.

    Raises ModelError for a link that leads out of it, for what is no regular file, and for settings that are no JSON.
    """
    data: list[Path] = []
    code: list[Path] = []
    left_code: list[str] = []
    left_others: list[str] = []
    for path in sorted(directory.iterdir()):
        name = path.name
        if path.is_dir():
            if not name.startswith((".", "__pycache__")) and not _holds_weights_alone(path):
                (left_code if any(path.glob("*.py")) else left_others).append(f"{name}/")
        elif name in DATA or DATA_PATTERN.fullmatch(name):
            check_part(directory, name)
            data.append(path)
        elif name == HOOK_FILE or UNSAID.fullmatch(name):
            continue
        elif path.suffix == ".py" and trust_remote_code:
            check_part(directory, name)
            code.append(path)
        else:
            (left_code if path.suffix.lower() in CODE_SUFFIXES | PICKLES else left_others).append(name)
    cleaned, entries = ({}, []) if trust_remote_code else _cleaned(config, data)
    return SideFiles(
        data=tuple(data),
        cleaned=cleaned,
        code=tuple(code),
        entries=tuple(entries),
        left_code=tuple(left_code),
        left_others=tuple(left_others),
        trusted=trust_remote_code,
    )


def _holds_weights_alone(folder: Path) -> bool:
    """Whether it is one of shards, or of others' weights, which need no mention beside the model's either."""
    files = [path.name for path in folder.rglob("*") if path.is_file()]
    return bool(files) and all(map(UNSAID.fullmatch, files))


def _cleaned(config: Mapping[str, Any], data: Iterable[Path]) -> tuple[dict[str, Any], list[str]]:
    """Settings that have entries for code, without them, and where these stood; those of config.json too."""
    cleaned: dict[str, Any] = {}
    entries = [f"{key} of {CONFIG}" for key in without_code(config)[1]]
    for path in data:
        if path.suffix != ".json" or path.name in NO_SETTINGS:
            continue
        settings, keys = without_code(read_settings(path))
        if keys:
            cleaned[path.name] = settings
            entries += [f"{key} of {path.name}" for key in keys]
    return cleaned, entries


def without_code(settings: Any) -> tuple[Any, list[str]]:
    """Settings without the entries that have a loader run code, at any depth, and the keys of these, each once."""
    keys: dict[str, None] = {}

    def plain(node: Any) -> Any:
        if isinstance(node, Mapping):
            keys.update(dict.fromkeys(sorted(CODE_KEYS & set(node))))
            return {name: plain(part) for name, part in node.items() if name not in CODE_KEYS}
        return [plain(part) for part in node] if isinstance(node, list) else node

    return plain(settings), list(keys)


def _listed(names: Iterable[str]) -> str:
    """Names on one line, as many as that allows."""
    shown = [name if name.isprintable() else repr(name) for name in names]
    more = f" and {len(shown) - SHOWN} more" if len(shown) > SHOWN else ""
    return f"{', '.join(shown[:SHOWN])}{more}"
