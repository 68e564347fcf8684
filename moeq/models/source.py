"""Where a model comes from: a directory, a hub id, or the bundled demo; checked from headers before it is read."""

from __future__ import annotations

import hashlib
import os
import re
import stat
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moeq.artifacts.digests import digests_of_files
from moeq.artifacts.files import digest_of
from moeq.artifacts.reading import TensorHeader as TensorHeader
from moeq.artifacts.reading import inside, read_json_file, relative_name, safetensors_header
from moeq.artifacts.remote import RemoteFile, is_remote
from moeq.artifacts.stage import ModelStamp
from moeq.bounded import shortened
from moeq.bundled import bundled_path
from moeq.errors import NOWHERE, ArtifactError, ModelError, missing
from moeq.folders import GGUF, as_word, expanded
from moeq.models.configuration import check_config, check_counts, check_name, declared_beside, read_settings
from moeq.models.drafts import draft_keys
from moeq.progress import Reporter

if TYPE_CHECKING:
    from torch import Tensor

BUNDLED = "bundled:"
HUB_ID = re.compile(r"[\w][\w.-]*(/[\w][\w.-]*)?")
CONFIG = "config.json"
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
SMALL_FILES = ("*.json", "*.model", "*.txt", "*.tiktoken", "*.jinja")  # of a hub repository
CARD_FILES = ("README.md", "LICEN[CS]E*", "NOTICE*", "USE_POLICY*")  # of a hub repository, where they can be had
CODE_FILES = ("*.py",)  # only where the user lets the model bring code
TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer.model", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
    "vocab.json", "vocab.txt", "merges.txt", "spiece.model", "chat_template.jinja", "chat_template.json",
    "tekken.json", "tiktoken.model", "hy.tiktoken",
)  # fmt: skip
VOCABULARIES = {
    "tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "tekken.json", "tiktoken.model",
    "hy.tiktoken",
}  # fmt: skip
PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")
SIDE_FILES = ("generation_config.json", *PROCESSOR_FILES, *TOKENIZER_FILES)
WEIGHTS = ".safetensors"
PARTS = re.compile(  # names of files that a model is read from, or that an export may take along
    r".*\.(json|jinja|model|txt|spm|tiktoken|tokenizer|codes|safetensors|gguf|py)|README\.md"
    r"|(LICEN[CS]E|NOTICE|COPYING|USE_POLICY)([-._].*)?", re.IGNORECASE
)  # fmt: skip
SAMPLED_BYTES = 64 << 20  # older moeq hashed files above this size by samples
SAMPLE_BYTES, SAMPLES = 64 << 10, 64


@dataclass(frozen=True, kw_only=True)
class ModelSource:
    """A local model directory whose configuration and headers have been checked.

    read: how a tensor is read where it lies in no safetensors file as it is. drafts: tensors of layers that draft later
    tokens, which are not among the others: nothing is made of them. to_fetch: bytes of files whose headers alone were
    read, in the hub; the others are there.
    """

    name: str
    path: Path
    revision: str | None
    config: dict[str, Any]
    tensors: dict[str, TensorHeader]
    read: Callable[[str], Tensor] | None = None
    drafts: Mapping[str, TensorHeader] = field(default_factory=dict)
    to_fetch: Mapping[str, int] = field(default_factory=dict)

    @property
    def is_remote(self) -> bool:
        """Whether its weights lie in an object store."""
        return any(isinstance(file, RemoteFile) for file in self.files)

    @property
    def files(self) -> list[Path]:
        return sorted({header.file for header in (*self.tensors.values(), *self.drafts.values())})

    def weights_bytes(self) -> int:
        """Of all files of its weights, also of those that are in the hub yet."""
        return sum(self.to_fetch.get(self.name_of(path)) or path.stat().st_size for path in self.files)

    def name_of(self, path: Path) -> str:
        """What a file of it is called: its path below the model's directory, as the index of its weights names it."""
        return path.name if isinstance(path, RemoteFile) else path.relative_to(self.path).as_posix()

    def named_files(self) -> dict[str, Path]:
        """Tokenizer, side files and weights, by name."""
        return {self.name_of(path): path for path in (*self.side_files(), *self.files)}

    def side_files(self) -> list[Path]:
        """Tokenizer, generation and processor files, and code of its own: what makes it the model that it is."""
        code = sorted(self.path.glob("*.py")) if "auto_map" in self.config else []
        return [self.path / name for name in SIDE_FILES if (self.path / name).is_file()] + code

    def file_digests(self, *, cached: bool = True, reporter: Reporter | None = None) -> dict[str, str]:
        """{name: SHA-256} of tokenizer, side files and weights, every byte of them.

        cached: of files that were read before and have not changed since, the digest that was found then.
        """
        paths = self.named_files()
        digests = digests_of_files(paths.values(), cached=cached, reporter=reporter, title="hashing the model")
        return {name: digests[path] for name, path in paths.items()}

    def stamp(self, files: Mapping[str, str] | None = None) -> ModelStamp:
        """Name, revision and a digest of configuration, tokenizer and weights; files: the digests, where known."""
        parts = {"config": self.config, **(self.file_digests() if files is None else files)}
        return ModelStamp(name=self.name, revision=self.revision, digest=digest_of(parts))

    def sampled_digest(self, files: Mapping[str, str]) -> str:
        """The digest that older moeq gave this model: of weights above 64 MiB it read the size, the header and 64
        samples. Only to know the model of an older run again."""
        sampled = {self.name_of(path): _sampled(path) for path in self.files if path.stat().st_size > SAMPLED_BYTES}
        return digest_of({"config": self.config, **files, **sampled})


def shown_name(url: str) -> str:
    """What artifacts call a model of an object store: the last part of its address, as of a directory."""
    return url.rstrip("/").rpartition("/")[2] or "model"


def open_source(
    name: str, revision: str | None = None, *, trust_remote_code: bool = False, weights: bool = True
) -> ModelSource:
    """Resolve a directory, a hub id, `bundled:NAME` or the address of a folder in an object store, and check it.

    trust_remote_code: also download the Python files of a hub model; weights: and its weights, else the headers of
    those that are not in the cache, to which `to_fetch` adds their sizes. Raises ModelError: not a model directory,
    configuration or shards missing, truncated or mismatched, links that lead out of it; a hub model that is gated,
    unknown or out of reach.
    """
    shards: Mapping[str, Path] = {}
    if is_remote(name):
        (path, shards), commit = _remote(name, trust_remote_code), None
    else:
        path, commit = _resolve(name, revision, trust_remote_code, weights=weights)
    check_parts(path)
    config, to_fetch = read_config(path / CONFIG), dict[str, int]()
    if weights or commit is None:
        tensors = _read_headers(path, shards)
    else:
        tensors, to_fetch = map(dict, _heads(name, path, _absent(path)))  # type: ignore[arg-type]
    config = declared_beside(config, tensors, path)
    check_counts(config, tensors, path / CONFIG)
    if is_remote(name) or expanded(name).is_dir():
        name = shown_name(name) if is_remote(name) else path.resolve().name  # where it lies is nobody's business
    drafts = {key: tensors.pop(key) for key in draft_keys(list(tensors), config)}
    if not tensors:
        raise ModelError("its weights are no tensors at all", where=str(path), do="download the weights again")
    return ModelSource(
        name=name, path=path, revision=commit, config=config, tensors=tensors, drafts=drafts, to_fetch=to_fetch
    )


def check_parts(directory: Path) -> None:
    """ModelError where a file that a model is read from, or that goes into its exports, is not the directory's own.

    A link that leads out of it would put a file of this machine into what is published; a pipe or a device is no file.
    Weights in safetensors may lie elsewhere: only the model's own tensors are taken from them.
    """
    try:
        names = sorted(os.listdir(directory))
    except OSError as error:
        raise ModelError(f"cannot be listed: {error.strerror}", where=str(directory), do="check the path") from None
    for name in names:
        if PARTS.fullmatch(name):
            check_part(directory, name)


def check_part(directory: Path, name: str) -> None:
    """ModelError for one file as `check_parts` raises it; folders are let be, they are never read as files."""
    path = directory / name
    try:
        if path.suffix != WEIGHTS:
            path = inside(directory, name)
    except ValueError as error:
        do = (
            "copy the file into the directory, or give the one that holds it; if it is not the model's, remove the link"
        )
        raise ModelError(str(error), where=str(directory / name), do=do) from None
    try:
        mode = path.stat().st_mode
    except OSError as error:
        what = f"{NOWHERE}: {error.strerror}" if path.is_symlink() else f"{error.strerror}"
        raise ModelError(what, where=str(path), do="remove it, or download the file again") from None
    if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
        raise ModelError("no regular file but a pipe, a socket or a device", where=str(path), do="remove it")


def check_there(name: str, revision: str | None = None) -> dict[str, Any]:
    """The configuration of a model; ModelError, as `open_source` raises it, for one that is not there or damaged.

    Of a hub model that is asked for its configuration alone.
    """
    path, _ = _resolve(name, revision, False, only=(CONFIG,))
    return read_config(path / CONFIG)


def known_positions(name: str, revision: str | None = None) -> int | None:
    """How many tokens a model knows positions for; None where its configuration does not say. ModelError as above."""
    config = check_there(name, revision)
    positions = (config.get("text_config") or config).get("max_position_embeddings")
    return positions if isinstance(positions, int) and positions > 1 else None


def open_config(name: str, *, beside: Sequence[str] = (), trust_remote_code: bool = False) -> ModelSource:
    """A model by its configuration alone: a directory, a config.json, a hub id or `bundled:NAME`; no tensors are read.

    Of a hub model only the configuration is downloaded, and those of the files `beside` that it has. Raises ModelError
    as `open_source` does.
    """
    path = expanded(name)
    if path.is_file():
        file, name = path, (path.resolve().parent.name if path.name == CONFIG else path.stem)
    else:
        path, _ = _resolve(name, None, trust_remote_code, only=(CONFIG, *beside))
        file, name = path / CONFIG, (path.resolve().name if expanded(name).is_dir() else name)
    config = read_config(file)
    check_counts(config, {}, file)
    return ModelSource(name=name, path=path, revision=None, config=config, tensors={})


def _resolve(
    name: str,
    revision: str | None,
    trust_remote_code: bool,
    *,
    only: Sequence[str] | None = None,
    weights: bool = True,
) -> tuple[Path, str | None]:
    """The directory of a model and, from the hub, its commit; only: files that are all that is wanted of it."""
    if name.startswith(BUNDLED):
        try:
            return bundled_path(name.removeprefix(BUNDLED)), None
        except ArtifactError as error:
            known = "bundled:tiny-mixtral, bundled:tiny-moe-vit or bundled:tiny-moe-vit-65"
            raise ModelError("no such bundled model", where=name, do=f"use {known}") from error
    if is_remote(name):
        return _remote(name, trust_remote_code)[0], None
    path = expanded(name)
    try:
        if path.is_dir():
            check_name(path)
            return path, None
        there = path.exists()
    except OSError as error:  # a name that is too long for a file
        raise missing(name, "give a model directory or a hub id such as org/name", str(error.strerror)) from None
    if there:
        raise ModelError("not a directory", where=name, do="give the folder that holds config.json")
    if name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise missing(name, "give a model directory or a hub id such as org/name")
    if HUB_ID.fullmatch(name) is None:
        what = "neither a directory that is there nor a hub id"
        raise ModelError(what, where=shortened(name), do="give a model directory or a hub id such as org/name")
    from moeq.models import offline

    if offline.has_nothing(name):
        what, do = offline.explain(revision)
        raise ModelError(what, where=name, do=do)
    from moeq.models import hub  # its client takes as long to import as all else here

    if only is not None:
        path = hub.snapshot(name, revision, [*only, *(CODE_FILES if trust_remote_code else ())], error=ModelError)
        return path, path.name
    return _from_hub(name, revision, trust_remote_code, weights)


def _remote(url: str, trust_remote_code: bool) -> tuple[Path, dict[str, Path]]:
    """A folder with copies of a model's small files, and {name: shard} of the weights, which stay where they are."""
    from moeq.models import remote_source

    found = remote_source.files_of(url, PARTS)
    shards = {name: remote_source.as_path(file) for name, file in found.items() if file.suffix == WEIGHTS}
    small = {
        name: file
        for name, file in found.items()
        if file.suffix not in (WEIGHTS, ".gguf") and (trust_remote_code or file.suffix != ".py")
    }
    path = remote_source.copied(url, small)
    folders = remote_source.folders_of(_weight_files(path))
    if any(folders):
        below = remote_source.files_of(url, PARTS, folders)
        shards |= {name: remote_source.as_path(file) for name, file in below.items() if file.suffix == WEIGHTS}
    return path, shards


def _from_hub(name: str, revision: str | None, trust_remote_code: bool, weights: bool) -> tuple[Path, str | None]:
    """Download (or find in the cache) what a hub model needs; the revision is pinned to its commit.

    Configuration and tokenizer first, then the weights that the index names: repositories often hold others beside.
    """
    from moeq.models import hub, offline

    patterns = [*SMALL_FILES, *(CODE_FILES if trust_remote_code else ())]
    path = hub.snapshot(name, revision, patterns, error=ModelError)
    if not weights and not offline.is_set():
        return path, path.name
    if absent := _absent(path):
        hub.check_to_come(name, path, absent, error=ModelError)
    hub.snapshot(name, path.name, [*patterns, *_weight_files(path)], error=ModelError)
    with suppress(ModelError):  # what an export says of its origin; a cache without them serves as well
        hub.snapshot(name, path.name, [*patterns, *_weight_files(path), *CARD_FILES], error=ModelError)
    return path, path.name


@lru_cache(maxsize=2)
def _heads(name: str, path: Path, absent: tuple[str, ...]) -> tuple[dict[str, TensorHeader], dict[str, int]]:
    """Headers of a hub model's weights, and the bytes of the files that are not in its snapshot `path`, by name."""
    from moeq.models import hub, remote_source

    found: dict[str, RemoteFile] = {}
    if absent:
        with hub.hub_errors(name, "model", path.name, ModelError):
            found = remote_source.heads(f"hf://{name}@{path.name}", absent)
    headers = _read_headers(path, {file: remote_source.as_path(there) for file, there in found.items()})
    for key, header in headers.items():
        if isinstance(header.file, RemoteFile):
            headers[key] = replace(header, file=path / header.file.name)
    return headers, {file: there.size for file, there in found.items()}


def _absent(path: Path) -> tuple[str, ...]:
    """Files of its weights that a snapshot has not yet."""
    return tuple(file for file in _weight_files(path) if not (path / file).is_file())


def _weight_files(path: Path) -> list[str]:
    """The shards that the index names, or the one file of a model without an index."""
    if not (path / INDEX).is_file():
        return [SINGLE]
    try:
        return sorted(set(_weight_map(path).values()))
    except (OSError, ValueError):
        return []  # the index is judged when the headers are read


def _weight_map(path: Path) -> dict[str, str]:
    """{tensor: shard} of a directory's index; ValueError when it is none or names a file elsewhere, OSError."""
    index = read_json_file(path / INDEX, tag_constants=True)
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weight_map, dict):
        raise ValueError("it has no weight_map")
    return {key: relative_name(shard) for key, shard in weight_map.items()}


def read_config(file: Path) -> dict[str, Any]:
    """The configuration that a file holds; ModelError where there is none or it is damaged."""
    if not file.is_file():
        where = str(file.parent)
        raise ModelError("not a model directory: no config.json", where=where, do="give the folder that holds it")
    config = read_settings(file)
    if not isinstance(config, dict) or not isinstance(config.get("model_type"), str):
        raise ModelError("no model_type", where=str(file), do="give a transformers model directory")
    check_config(config, file)
    return config


def _read_headers(path: Path, remote: Mapping[str, Path]) -> dict[str, TensorHeader]:
    """Headers of all shards; every tensor that the index names must be there. remote: those that lie elsewhere."""
    index = path / INDEX
    if not index.is_file():
        single = remote.get(SINGLE, path / SINGLE)
        if not single.is_file():
            if any(path.glob("*.bin")):
                do = "load it with transformers and save_pretrained it, which writes safetensors"
                raise ModelError("no safetensors weights, only .bin files", where=str(path), do=do)
            if others := sorted(file.name for file in path.glob(f"*{WEIGHTS}")):
                do = f"if it holds all weights, call it {SINGLE}" if len(others) == 1 else f"download {INDEX}"
                raise ModelError(f"neither {SINGLE} nor {INDEX}, but {others[0]}", where=str(path), do=do)
            if (path / GGUF).is_file():
                here = f"moeq convert {as_word(path)} --to native --out OTHER"
                do = f"run it with llama.cpp; `{here}` makes one that loads here"
                raise ModelError(f"no safetensors weights, but {GGUF}", where=str(path), do=do)
            do = f"download the weights; {CONFIG} alone is what `moeq families` and `moeq estimate --model` read"
            raise ModelError(f"no safetensors weights, neither {SINGLE} nor {INDEX}", where=str(path), do=do)
        return read_header(single)
    try:
        weight_map = _weight_map(path)
    except (OSError, ValueError) as error:
        raise ModelError(f"not a weight index ({error})", where=str(index), do="download it again") from None
    if SINGLE not in weight_map.values() and (SINGLE in remote or os.path.lexists(path / SINGLE)):
        what = f"beside {INDEX}, which names others: transformers would take these weights, moeq those"
        raise ModelError(what, where=str(path / SINGLE), do="remove what is not the model's")
    tensors: dict[str, TensorHeader] = {}
    shards = {name: remote.get(name, path / name) for name in sorted(set(weight_map.values()))}
    for name, shard in shards.items():
        if name not in remote and os.path.lexists(shard):
            check_part(shard.parent, shard.name)
        if not shard.is_file():
            raise missing(str(shard), "download it", "shard is missing")
        tensors |= read_header(shard)
    for key, name in weight_map.items():
        if key not in tensors or tensors[key].file != shards[name]:
            what = f"tensor {key} is not in the shard that {INDEX} names"
            if key in tensors and key in read_header(shards[name]):
                what = f"tensor {key} is in it and in {tensors[key].file.name}: transformers would take that one"
            raise ModelError(what, where=str(path / name), do="download it again")
    return tensors


def read_header(path: Path) -> dict[str, TensorHeader]:
    """Parse one safetensors header and check the file against it.

    ModelError when truncated or damaged, MissingError when it is not there.
    """
    try:
        return safetensors_header(path)[0]
    except FileNotFoundError:
        raise missing(str(path), "download or make it again") from None
    except (OSError, ValueError) as error:
        what = str(error) if str(error).startswith("truncated") else f"not a safetensors file ({error})"
        raise ModelError(what, where=str(path), do="download it again") from None


def _sampled(path: Path) -> str:
    size = path.stat().st_size
    digest = hashlib.sha256(str(size).encode())
    with path.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        digest.update(stream.read(length))
        for index in range(SAMPLES):
            stream.seek(8 + length + (size - 8 - length - SAMPLE_BYTES) * index // (SAMPLES - 1))
            digest.update(stream.read(SAMPLE_BYTES))
    return digest.hexdigest()
