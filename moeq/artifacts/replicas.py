"""The replica store: packed replicas of experts, addressed by what made them, and the losses measured with them.

STORE/store.json                                 says that the folder is a store
STORE/{set}/layer-{l:03d}.safetensors            the replicas of one layer, keys `{entry}.{projection}.{part}`
STORE/{set}/losses/layer-{l:03d}.{entry}.json    rows of the loss table of one entry
STORE/runs/{digest}.json                         a run elsewhere that uses the store

`set` is the digest of what all its replicas have in common: model, text, settings, computing type and device. An entry
is a method at a width with the digest of the settings that only this method reads: `gptq.3.0123456789abcdef`. Part is
codes, scales or zeros, each stacked over the layer's experts on its first axis, so that one expert is a slice of a row.

A layer's file is appended to by writing it anew beside itself, what it held copied in chunks, and renaming it, under
the set's lock: readers have either the old file or the new one. An entry that is there and sound is never replaced.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from pydantic import Field, field_validator
from safetensors import safe_open

from moeq.artifacts.digests import digest_of_chunks, digest_of_part, file_key, remember
from moeq.artifacts.files import held, write_json, write_text
from moeq.artifacts.reading import PlainName, TensorHeader, parse_json, read_json_file, safetensors_header
from moeq.artifacts.stage import Frozen, check_schema_version, read_model
from moeq.artifacts.storage import check_links
from moeq.artifacts.tensor_files import dtype_name, layout_of, stored_chunks, tensor_bytes, write_in_chunks
from moeq.errors import ArtifactError
from moeq_kernels.widths import CODEBOOKS, PARTS, Encoding

if TYPE_CHECKING:
    from moeq_kernels.packed import PackedWeight

SCHEMA_VERSION = 2
REMEDY = "run `moeq losses` again"
INDEX = "replicas.json"
ROWS = "losses"
SHORT = 16  # hexadecimal digits of a digest in a name


class Made(Frozen):
    """A method at a width: the names of its replicas (None: made when they are needed) and of its loss rows."""

    method: str
    bits: int
    entry: PlainName | None
    rows: PlainName


MadeType = TypeVar("MadeType", bound=Made)


class ReplicaIndex(Frozen):
    """What a run has in the store (replicas.json of the losses stage).

    layers: {entry: SHA-256 of its tensors} of every layer; empty until all layers are made.
    """

    schema_version: int = SCHEMA_VERSION
    set: PlainName
    made: tuple[Made, ...]
    layers: tuple[dict[str, str], ...] = ()

    def entry(self, method: str, bits: int) -> str:
        """Name of a method's replicas at a width; ArtifactError when the run has none."""
        for made in self.made:
            if (made.method, made.bits) == (method, bits) and made.entry is not None:
                return made.entry
        widths = [made.bits for made in self.made if made.method == method and made.entry is not None]
        do = "add the width to losses.bits and the method to losses.methods"
        raise ArtifactError(f"no {bits}-bit replica by {method} (there are {widths})", where=INDEX, do=do)

    def entries(self) -> list[str]:
        """Names of all replicas that the store keeps for the run."""
        return [made.entry for made in self.made if made.entry is not None]


def write_index(directory: Path, index: ReplicaIndex) -> None:
    write_json(directory / INDEX, index.model_dump(mode="json"))


def read_index(directory: Path) -> ReplicaIndex:
    """The index of a run's losses directory; ArtifactError when it is missing, damaged or of another version."""
    path = directory / INDEX
    if not path.is_file():
        what = f"no index of replicas: losses of schema version 1 or none, this moeq reads {SCHEMA_VERSION}"
        raise ArtifactError(what, where=str(path), do=REMEDY)
    return read_model(path, ReplicaIndex, SCHEMA_VERSION, remedy=REMEDY)


def layer_file(directory: Path, layer: int) -> Path:
    return directory / f"layer-{layer:03d}.safetensors"


def layer_number(file: Path) -> int:
    """The layer whose replicas a file holds, by its name."""
    return int(file.name.removeprefix("layer-").removesuffix(".safetensors"))


def rows_file(directory: Path, layer: int, name: str) -> Path:
    return directory / ROWS / f"layer-{layer:03d}.{name}.json"


class _ProjectionText(Frozen, strict=True):
    """What a layer's file says of one projection of an entry."""

    inputs: int = Field(ge=1)
    group_size: int = Field(ge=-1)
    symmetric: bool
    nested: bool = False
    state_bits: int = Field(0, ge=0, le=16)
    codebook: Literal[CODEBOOKS] = ""  # type: ignore[valid-type]

    @field_validator("group_size")
    @classmethod
    def _is_a_size(cls, group_size: int) -> int:
        if group_size == 0:
            raise ValueError("group_size is 0")
        return group_size


class _EntryText(Frozen, strict=True):
    """What a layer's file says of an entry."""

    bits: int = Field(ge=1, le=8)
    projections: dict[str, _ProjectionText]
    sha256: str


class LayerReplicas:
    """The replicas of one layer in the store."""

    def __init__(self, directory: Path, layer: int) -> None:
        """Read the file's header; ArtifactError when it is missing, damaged or of another schema version."""
        self.path = layer_file(directory, layer)
        self._read: set[str] = set()  # entries whose bytes were hashed
        self._open()

    def _open(self) -> None:
        """Read the header of the file that is there now: another run may put a longer one in its place."""
        self._file = file_key(self.path)
        self.tensors, metadata = _read_header(self.path)
        check_schema_version(metadata.get("moeq_schema_version"), str(SCHEMA_VERSION), self.path, remedy=REMEDY)
        self.entries: dict[str, dict[str, Any]] = _entries(self.path, metadata)
        self._handle: Any = None

    def keys(self, entry: str) -> list[str]:
        """Names of an entry's tensors."""
        return sorted(key for key in self.tensors if key.startswith(f"{entry}."))

    def bytes(self, entry: str) -> int:
        return sum(self.tensors[key].bytes for key in self.keys(entry))

    def is_sound(self, entry: str, *, cached: bool = False) -> bool:
        """Whether an entry's tensors hold what was written: read and hashed; cached: done of this very file before."""

        def read() -> str:
            if file_key(self.path) != self._file:
                self._open()
            self._read.add(entry)
            return digest_of_chunks(chunk for key in self.keys(entry) for chunk in stored_chunks(self.tensors[key]))

        if entry not in self.entries:
            return False
        found = digest_of_part(self.path, entry, read, cached=cached)
        return entry in self.entries and found == self.entries[entry]["sha256"]

    def check(self, wanted: Mapping[str, str], *, cached: bool = False) -> None:
        """ArtifactError unless the entries are there with these digests and sound."""
        for entry, digest in wanted.items():
            self._check_sound(entry, stated=self.digest(entry) == digest, cached=cached)

    def digest(self, entry: str) -> str:
        """SHA-256 that the file states of an entry; ArtifactError when it lacks it."""
        if entry not in self.entries:
            raise ArtifactError(f"no replicas {entry}", where=str(self.path), do=REMEDY)
        return str(self.entries[entry]["sha256"])

    def _check_sound(self, entry: str, *, stated: bool = True, cached: bool = False) -> None:
        if not stated or not self.is_sound(entry, cached=cached):
            raise ArtifactError(f"replicas {entry} are damaged", where=str(self.path), do=REMEDY)

    def expert(self, entry: str, projection: str, expert: int) -> PackedWeight:
        """One expert's matrix of an entry, whose bytes are checked before the first is given out.

        Raises ArtifactError when the file lacks it, when its tensors are of other sizes, or damaged.
        """
        if entry not in self.entries or projection not in self.entries[entry]["projections"]:
            raise ArtifactError(f"no replicas {entry} of {projection}", where=str(self.path), do=REMEDY)
        from moeq_kernels.packed import PackedWeight  # what lies in a store is known without torch

        self._check_stack(entry, projection, expert)
        if entry not in self._read:
            self._check_sound(entry)
        if self._handle is None:
            self._handle = safe_open(self.path, "pt")
        stated = self.entries[entry]
        prefix = f"{entry}.{projection}"
        keys = {part: f"{prefix}.{part}" for part in PARTS if f"{prefix}.{part}" in self.tensors}
        parts = {part: self._handle.get_slice(key)[expert] for part, key in keys.items()}
        said = stated["projections"][projection]
        return PackedWeight.of(parts, stated["bits"], said["inputs"], Encoding.described(said))

    def _check_stack(self, entry: str, projection: str, expert: int) -> None:
        """ArtifactError unless a projection's tensors are a stack of what its entry says, with this expert in it."""
        from moeq_kernels.packed import packed_shapes

        stated = self.entries[entry]
        scales = self.tensors.get(f"{entry}.{projection}.scales")
        shape = () if scales is None else scales.shape
        if len(shape) != 3 or expert >= shape[0]:
            raise ArtifactError(f"no replica {entry} of expert {expert}", where=str(self.path), do=REMEDY)
        said = stated["projections"][projection]
        wanted = {
            part: (dtype_name(dtype), (shape[0], *size))
            for part, (size, dtype) in packed_shapes(
                shape[1], said["inputs"], stated["bits"], Encoding.described(said)
            ).items()
        }
        there = {part: self.tensors.get(f"{entry}.{projection}.{part}") for part in PARTS}
        if wanted != {part: (header.dtype, header.shape) for part, header in there.items() if header is not None}:
            what = f"replicas {entry} of {projection} have other sizes than the file says"
            raise ArtifactError(what, where=str(self.path), do=REMEDY)


def add_replicas(directory: Path, layer: int, entries: Mapping[str, Mapping[str, PackedWeight]]) -> LayerReplicas:
    """Append {entry: {projection: stack over experts}} to a layer's file; returns the file as it is then.

    Entries that are there and sound stay as they are. A file that cannot be read is replaced.
    """
    with held(directory):
        old = existing(directory, layer)
        kept = {} if old is None else {
            name: text for name, text in old.entries.items() if name not in entries or old.is_sound(name)
        }  # fmt: skip
        new = {name: weights for name, weights in entries.items() if name not in kept}
        if new or old is None:
            _write(directory, layer, old, kept, new)
        return LayerReplicas(directory, layer)


def drop_replicas(directory: Path, layer: int, keep: Iterable[str]) -> None:
    """Write a layer's file anew with only these of its entries; without any of them, delete it."""
    with held(directory):
        old = LayerReplicas(directory, layer)
        kept = {name: text for name, text in old.entries.items() if name in set(keep)}
        if kept:
            _write(directory, layer, old, kept, {})
        else:
            old.path.unlink()


def existing(directory: Path, layer: int) -> LayerReplicas | None:
    """A layer's file, None when it is missing or cannot be read."""
    try:
        return LayerReplicas(directory, layer)
    except ArtifactError:
        return None


def digests(directory: Path, layer: int, entries: Sequence[str]) -> dict[str, str]:
    """{entry: SHA-256} of a layer's replicas, as its file says; nothing where none are asked for."""
    files = [LayerReplicas(directory, layer)] if entries else []
    return {entry: file.digest(entry) for file in files for entry in entries}


def lacking(
    directory: Path, layer: int, made: Iterable[MadeType], damaged: Callable[[Path], None], *, cached: bool = True
) -> list[MadeType]:
    """Those whose replicas or rows of a layer a store lacks; files that are damaged are named, and lacking.

    cached: as in `LayerReplicas.is_sound`; whoever reads replicas checks them then.
    """
    path = layer_file(directory, layer)
    there = existing(directory, layer)
    if there is None and path.exists():
        damaged(path)
    missing = []
    for wanted in made:
        sound = wanted.entry is None or (there is not None and there.is_sound(wanted.entry, cached=cached))
        if not sound and there is not None and wanted.entry in there.entries:
            damaged(path)
        rows = rows_file(directory, layer, wanted.rows)
        measured = read_rows(directory, layer, wanted.rows) is not None
        if not measured and rows.exists():
            damaged(rows)
        if not (sound and measured):
            missing.append(wanted)
    return missing


def described(entry: str, sha256: str, projections: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """What a layer's file says of an entry; projections: {name: inputs and encoding}."""
    return {"bits": int(entry.split(".")[1]), "projections": projections, "sha256": sha256}


def layer_metadata(layer: int, entries: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """Metadata of a layer's file."""
    return {
        "moeq_schema_version": str(SCHEMA_VERSION),
        "layer": str(layer),
        "entries": json.dumps(entries, sort_keys=True),
    }


def add_rows(directory: Path, layer: int, name: str, rows: list[dict[str, Any]]) -> None:
    """Keep the loss rows of one layer and entry; those that are there and sound stay as they are."""
    with held(directory):
        if read_rows(directory, layer, name) is None:
            write_text(rows_file(directory, layer, name), rows_text(rows))


def rows_text(rows: list[dict[str, Any]]) -> str:
    """The file of loss rows."""
    text = json.dumps(rows, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return f'{{"schema_version":{SCHEMA_VERSION},"sha256":"{_text_digest(text)}","rows":{text}}}\n'


def read_rows(directory: Path, layer: int, name: str) -> list[dict[str, Any]] | None:
    """Loss rows of one layer and entry; None when they are missing or damaged."""
    try:
        stored = read_json_file(rows_file(directory, layer, name))
        rows: list[dict[str, Any]] = stored["rows"]
        text = json.dumps(rows, sort_keys=True, separators=(",", ":"))
        return rows if (stored["schema_version"], stored["sha256"]) == (SCHEMA_VERSION, _text_digest(text)) else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def check_rows(file: Path) -> None:
    """ArtifactError for a file of rows that is not as it was written."""
    layer, _, name = file.stem.partition(".")
    made_rows(file.parents[1], layer_number(Path(layer)), name)


def made_rows(directory: Path, layer: int, name: str) -> list[dict[str, Any]]:
    """What `read_rows` reads; ArtifactError where it is missing or damaged."""
    rows = read_rows(directory, layer, name)
    if rows is None:
        raise ArtifactError("missing or damaged", where=str(rows_file(directory, layer, name)), do=REMEDY)
    return rows


def _text_digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _write(
    directory: Path,
    layer: int,
    old: LayerReplicas | None,
    kept: Mapping[str, dict[str, Any]],
    new: Mapping[str, Mapping[str, PackedWeight]],
) -> None:
    """Write a layer's file: `kept` entries out of the old one, new ones beside them."""
    tensors: dict[str, Any] = {}
    entries = dict(kept)
    for name, weights in new.items():
        own = {f"{name}.{projection}.{part}": tensor for projection, weight in weights.items()
               for part, tensor in weight.parts().items()}  # fmt: skip
        shapes = {
            projection: {"inputs": weight.inputs} | weight.encoding.describe() for projection, weight in weights.items()
        }
        entries[name] = described(name, digest_of_chunks(tensor_bytes(own[key]) for key in sorted(own)), shapes)
        tensors |= own
    stored = {} if old is None else {key: old.tensors[key] for name in kept for key in old.keys(name)}
    layout = {key: (header.dtype, header.shape, header.bytes) for key, header in stored.items()} | layout_of(tensors)
    chunks = partial(_chunks, stored, tensors)
    path = layer_file(directory, layer)
    write_in_chunks(path, layout, chunks, layer_metadata(layer, entries), hashed=False)
    for name in new:
        remember(path, entries[name]["sha256"], name)


def _chunks(stored: Mapping[str, TensorHeader], tensors: Mapping[str, Any], key: str) -> Iterator[Any]:
    if key in tensors:
        yield tensor_bytes(tensors[key])
    else:
        yield from stored_chunks(stored[key])


def _entries(path: Path, metadata: Mapping[str, str]) -> dict[str, dict[str, Any]]:
    """What a layer's file says of its entries; ArtifactError when that is damaged."""
    try:
        entries = parse_json(metadata["entries"])
        return {
            name: _EntryText.model_validate(entry).model_dump(exclude_unset=True) for name, entry in entries.items()
        }
    except (KeyError, ValueError, AttributeError):
        raise ArtifactError("damaged: its entries cannot be read", where=str(path), do=REMEDY) from None


def _read_header(path: Path) -> tuple[dict[str, TensorHeader], dict[str, str]]:
    """Tensors and metadata of a safetensors file; ArtifactError when it is missing, cut off or damaged.

    StorageError where a link on the way to it leads to nothing.
    """
    try:
        return safetensors_header(path)
    except (OSError, ValueError) as error:
        check_links(path.parent)  # the store, or what lies in it
        what = "no such file" if isinstance(error, FileNotFoundError) else f"damaged ({error})"
        raise ArtifactError(what, where=str(path), do=REMEDY) from None
