"""Where a model comes from: a directory, a hub id, or the bundled demo; checked from headers before it is read."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moeq.artifacts.files import digest_of, sha256_file
from moeq.artifacts.reading import TensorHeader as TensorHeader
from moeq.artifacts.reading import plain_name, read_json_file, safetensors_header
from moeq.artifacts.stage import ModelStamp
from moeq.bundled import bundled_path
from moeq.errors import ArtifactError, ModelError

if TYPE_CHECKING:
    from torch import Tensor

BUNDLED = "bundled:"
HUB_ID = re.compile(r"[\w][\w.-]*(/[\w][\w.-]*)?")
CONFIG = "config.json"
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
SMALL_FILES = ("*.json", "*.model", "*.txt", "*.jinja")  # of a hub repository
CODE_FILES = ("*.py",)  # only where the user lets the model bring code
TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer.model", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
    "vocab.json", "vocab.txt", "merges.txt", "spiece.model", "chat_template.jinja", "chat_template.json",
    "tekken.json",
)  # fmt: skip
VOCABULARIES = {"tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "tekken.json"}
PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")
SIDE_FILES = ("generation_config.json", *PROCESSOR_FILES, *TOKENIZER_FILES)
CONFIG_BYTES = 64 << 20  # the largest config.json that is read
WHOLE_BYTES = 64 << 20  # files up to this size are hashed whole, larger ones by samples
SAMPLE_BYTES, SAMPLES = 64 << 10, 64
MODULES = re.compile(r"layers$|_layer$|^depths?$|blocks$|experts$|_stages$")  # counts of modules in a configuration
SIZES = re.compile(r"(_size|_dim|_heads|_rank|_width|_groups)$|^d_|^n_embd$")  # what sizes tensors
MODULES_FREE, SIZES_FREE = 4096, 1 << 20


@dataclass(frozen=True, kw_only=True)
class ModelSource:
    """A local model directory whose configuration and headers have been checked.

    read: how a tensor is read where it lies in no safetensors file as it is.
    """

    name: str
    path: Path
    revision: str | None
    config: dict[str, Any]
    tensors: dict[str, TensorHeader]
    read: Callable[[str], Tensor] | None = None

    @property
    def files(self) -> list[Path]:
        return sorted({header.file for header in self.tensors.values()})

    def side_files(self) -> list[Path]:
        """Tokenizer, generation and processor files, and code of its own, that an export takes along."""
        code = sorted(self.path.glob("*.py")) if "auto_map" in self.config else []
        return [self.path / name for name in SIDE_FILES if (self.path / name).is_file()] + code

    def stamp(self) -> ModelStamp:
        """Name, revision and a digest of configuration, tokenizer and weights.

        Weights up to 64 MiB a file are hashed whole; larger files by size, header and 64 evenly spaced samples, so that
        a 700 GB model is stamped in seconds.
        """
        found: dict[str, Any] = {"config": self.config}
        found |= {path.name: sha256_file(path) for path in self.side_files()}
        found |= {path.name: _weights_digest(path) for path in self.files}
        return ModelStamp(name=self.name, revision=self.revision, digest=digest_of(found))


def open_source(name: str, revision: str | None = None, *, trust_remote_code: bool = False) -> ModelSource:
    """Resolve a directory, a hub id or `bundled:NAME` and check it.

    trust_remote_code: also download the Python files of a hub model. Raises ModelError: not a model directory,
    configuration or shards missing, truncated or mismatched; a hub model that is gated, unknown or out of reach.
    """
    path, commit = _resolve(name, revision, trust_remote_code)
    config, tensors = read_config(path / CONFIG), _read_headers(path)
    check_counts(config, tensors, path / CONFIG)
    if Path(name).expanduser().is_dir():
        name = path.resolve().name  # where it lies on this machine is nobody's business
    return ModelSource(name=name, path=path, revision=commit, config=config, tensors=tensors)


def check_there(name: str, revision: str | None = None) -> None:
    """ModelError, as `open_source` raises it, for a model that is not there or whose configuration is damaged.

    Of a hub model that is asked for its configuration alone.
    """
    path, _ = _resolve(name, revision, False, only=(CONFIG,))
    read_config(path / CONFIG)


def open_config(name: str, *, beside: Sequence[str] = (), trust_remote_code: bool = False) -> ModelSource:
    """A model by its configuration alone: a directory, a config.json, a hub id or `bundled:NAME`; no tensors are read.

    Of a hub model only the configuration is downloaded, and those of the files `beside` that it has. Raises ModelError
    as `open_source` does.
    """
    path = Path(name).expanduser()
    if path.is_file():
        file, name = path, (path.resolve().parent.name if path.name == CONFIG else path.stem)
    else:
        path, _ = _resolve(name, None, trust_remote_code, only=(CONFIG, *beside))
        file, name = path / CONFIG, (path.resolve().name if Path(name).expanduser().is_dir() else name)
    config = read_config(file)
    check_counts(config, {}, file)
    return ModelSource(name=name, path=path, revision=None, config=config, tensors={})


def _resolve(
    name: str, revision: str | None, trust_remote_code: bool, *, only: Sequence[str] | None = None
) -> tuple[Path, str | None]:
    """The directory of a model and, from the hub, its commit; only: files that are all that is wanted of it."""
    if name.startswith(BUNDLED):
        try:
            return bundled_path(name.removeprefix(BUNDLED)), None
        except ArtifactError as error:
            raise ModelError(
                "no such bundled model", where=name, do="use bundled:tiny-mixtral or bundled:tiny-moe-vit"
            ) from error
    path = Path(name).expanduser()
    if path.is_dir():
        return path, None
    if path.exists():
        raise ModelError("not a directory", where=name, do="give the folder that holds config.json")
    if name.startswith((".", "/", "~")) or HUB_ID.fullmatch(name) is None:
        raise ModelError("no such directory", where=name, do="give a model directory or a hub id such as org/name")
    from moeq.models import hub  # its client takes as long to import as all else here

    if only is not None:
        path = hub.snapshot(name, revision, [*only, *(CODE_FILES if trust_remote_code else ())], error=ModelError)
        return path, path.name
    return _from_hub(name, revision, trust_remote_code)


def _from_hub(name: str, revision: str | None, trust_remote_code: bool) -> tuple[Path, str | None]:
    """Download (or find in the cache) what a hub model needs; the revision is pinned to its commit.

    Configuration and tokenizer first, then the weights that the index names: repositories often hold others beside.
    """
    from moeq.models import hub

    patterns = [*SMALL_FILES, *(CODE_FILES if trust_remote_code else ())]
    path = hub.snapshot(name, revision, patterns, error=ModelError)
    hub.snapshot(name, path.name, [*patterns, *_weight_files(path)], error=ModelError)
    return path, path.name


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
    return {key: plain_name(shard) for key, shard in weight_map.items()}


def read_config(file: Path) -> dict[str, Any]:
    """The configuration that a file holds; ModelError where there is none or it is damaged."""
    if not file.is_file():
        where = str(file.parent)
        raise ModelError("not a model directory: no config.json", where=where, do="give the folder that holds it")
    try:
        config = read_json_file(file, most=CONFIG_BYTES, tag_constants=True)
    except (OSError, ValueError) as error:
        raise ModelError(f"not valid JSON ({error})", where=str(file), do="download the file again") from None
    if not isinstance(config, dict) or not isinstance(config.get("model_type"), str):
        raise ModelError("no model_type", where=str(file), do="give a transformers model directory")
    return config


def _read_headers(path: Path) -> dict[str, TensorHeader]:
    """Headers of all shards; every tensor that the index names must be there."""
    index = path / INDEX
    if not index.is_file():
        single = path / SINGLE
        if not single.is_file():
            other = "; it has .bin weights: save it as safetensors first" if list(path.glob("*.bin")) else ""
            raise ModelError(f"no safetensors weights{other}", where=str(path), do="download the weights")
        return read_header(single)
    try:
        weight_map = _weight_map(path)
    except (OSError, ValueError) as error:
        raise ModelError(f"not a weight index ({error})", where=str(index), do="download it again") from None
    tensors: dict[str, TensorHeader] = {}
    for shard in (path / name for name in sorted(set(weight_map.values()))):  # links of the user's own are followed
        if not shard.is_file():
            raise ModelError("shard is missing", where=str(shard), do="download it")
        tensors |= read_header(shard)
    for key, name in weight_map.items():
        if key not in tensors or tensors[key].file.name != name:
            where = str(path / name)
            raise ModelError(
                f"tensor {key} is not in the shard that {INDEX} names", where=where, do="download it again"
            )
    return tensors


def read_header(path: Path) -> dict[str, TensorHeader]:
    """Parse one safetensors header and check the file against it; ModelError when truncated or damaged."""
    try:
        return safetensors_header(path)[0]
    except (OSError, ValueError) as error:
        what = str(error) if str(error).startswith("truncated") else f"not a safetensors file ({error})"
        raise ModelError(what, where=str(path), do="download it again") from None


def check_counts(config: Mapping[str, Any], tensors: Mapping[str, TensorHeader], where: Path) -> None:
    """ModelError for a configuration whose modules or sizes the weights cannot have, before a model is made of it.

    Layers and experts are modules of Python, at most as many as there are tensors or rows of one; heads and widths size
    tensors, none larger than the largest on disk. Small numbers pass whatever the weights are.
    """
    rows = max((max(header.shape, default=0) for header in tensors.values()), default=0)
    largest = max((math.prod(header.shape) for header in tensors.values()), default=0)
    for key, value in _whole_numbers(config):
        if MODULES.search(key):
            most = max(MODULES_FREE, len(tensors), rows if "expert" in key else 0)
        elif SIZES.search(key):
            most = max(SIZES_FREE, 8 * largest)
        else:
            continue
        if value > most:
            stated = str(value) if value < 10**20 else "more than 10**20"
            raise ModelError(
                f"{key} is {stated}; weights of {len(tensors)} tensors cannot have that many",
                where=str(where),
                do="download the model again",
            )


def _whole_numbers(node: Any) -> Iterator[tuple[str, int]]:
    """Keys and whole numbers of a configuration, those of its parts included."""
    parts = [node]
    while parts:
        part = parts.pop()
        for key, value in part.items() if isinstance(part, dict) else enumerate(part):
            if isinstance(value, (dict, list)):
                parts.append(value)
            elif isinstance(value, int) and isinstance(key, str):
                yield key, value


def _weights_digest(path: Path) -> str:
    size = path.stat().st_size
    if size <= WHOLE_BYTES:
        return sha256_file(path)
    digest = hashlib.sha256(str(size).encode())
    with path.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        digest.update(stream.read(length))
        for index in range(SAMPLES):
            stream.seek(8 + length + (size - 8 - length - SAMPLE_BYTES) * index // (SAMPLES - 1))
            digest.update(stream.read(SAMPLE_BYTES))
    return digest.hexdigest()
