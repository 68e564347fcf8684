"""RoutingTrace: which experts every token chose in every layer, in the order in which the tokens came.

On disk one file, trace.safetensors: `experts` int16 [N, L, k], `weights` float16 [N, L, k] (where they were kept),
`images` uint8 [N] (1: stands for a part of an image; where the model was given images), `lengths`, `prefill` and
`domain` int32 [S]. Its metadata holds, below the key `moeq_trace`, a JSON object (`Header`):
versions, the model, the digest of the text, the layers, the names that `domain` counts, the SHA-256 of every tensor;
below `moeq_trace_sha256` the SHA-256 of that text, which traces that an older moeq wrote are without.

Letters: N tokens of all sequences, S sequences, L MoE layers, k experts a token at most, E experts of a layer.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, ValidationError

from moeq.artifacts.reading import TensorHeader, parse_json, safetensors_header
from moeq.artifacts.stage import Frozen, ModelStamp, check_schema_version
from moeq.artifacts.tensor_files import write_in_chunks
from moeq.errors import ArtifactError
from moeq.recipe.wording import refusal_of
from moeq.version import __version__

SCHEMA_VERSION = 1
NAME = "trace.safetensors"
HEADER, SEAL = "moeq_trace", "moeq_trace_sha256"
REMEDY = "run `moeq profile` with profile.trace: true again"
CHUNK_BYTES = 1 << 22
BYTES_PER_CHOICE, BYTES_PER_SEQUENCE = 4, 12  # on disk: expert and weight; length, prefill and domain
_DTYPES: Mapping[str, tuple[str, type]] = {  # of every tensor on disk: as safetensors calls it, as numpy does
    "experts": ("I16", np.int16),
    "weights": ("F16", np.float16),
    "images": ("U8", np.uint8),
    "lengths": ("I32", np.int32),
    "prefill": ("I32", np.int32),
    "domain": ("I32", np.int32),
}
_OPTIONAL = {"weights", "images"}
NONE = -1  # in `experts`: no expert, of a token that chose fewer or was left out in this layer
MOST_EXPERTS = 32767  # that int16 can number


@dataclass(frozen=True, kw_only=True, eq=False)
class RoutingTrace:
    """A recorded trace: tokens stand sequence after sequence, each in the order of its steps.

    experts: int16 [N, L, k], -1 for none; weights: float16 [N, L, k] routing weights, or None; images: uint8 [N], 1
    where a token stands for a part of an image, or None where there were no images or the model cannot tell; lengths:
    int32 [S] tokens of every sequence, N in all; prefill: int32 [S] how many of them, from the front, are its prompt;
    domains: what kind of text each of the S sequences is; layers: names of the L MoE layers; num_experts: E of each;
    top_k: k; model: which model it was recorded from; text: digest of the sequences.

    Raises ArtifactError where these do not fit together or an expert is out of range.
    """

    layers: tuple[str, ...]
    num_experts: tuple[int, ...]
    top_k: int
    experts: NDArray[np.int16]
    weights: NDArray[np.float16] | None = None
    images: NDArray[np.uint8] | None = None
    lengths: NDArray[np.int32]
    prefill: NDArray[np.int32]
    domains: tuple[str, ...]
    model: ModelStamp | None = None
    text: str = ""

    def __post_init__(self) -> None:
        problem = _problem_with(self)
        if problem is not None:
            of = self.model.name if self.model is not None else "a model"
            raise ArtifactError(problem, where=f"routing trace of {of}", do=REMEDY)

    @property
    def num_layers(self) -> int:
        """L."""
        return len(self.layers)

    @property
    def num_sequences(self) -> int:
        """S."""
        return len(self.lengths)

    @property
    def num_tokens(self) -> int:
        """N."""
        return len(self.experts)

    @cached_property
    def starts(self) -> NDArray[np.int64]:
        """Row [S] of every sequence's first token."""
        return np.asarray(np.cumsum(self.lengths, dtype=np.int64) - self.lengths, dtype=np.int64)

    @cached_property
    def sequence(self) -> NDArray[np.int32]:
        """Sequence [N] of every token."""
        return np.repeat(np.arange(self.num_sequences, dtype=np.int32), self.lengths)

    @cached_property
    def step(self) -> NDArray[np.int32]:
        """Place [N] of every token in its sequence, 0 the first."""
        return np.asarray(np.arange(self.num_tokens) - self.starts[self.sequence], dtype=np.int32)

    @cached_property
    def is_prefill(self) -> NDArray[np.bool_]:
        """Whether every token [N] belongs to its sequence's prompt."""
        return np.asarray(self.step < self.prefill[self.sequence], dtype=np.bool_)


def _problem_with(trace: RoutingTrace) -> str | None:
    """What does not fit together in a trace, or None."""
    shape = (int(trace.lengths.sum()) if trace.lengths.ndim == 1 else -1, len(trace.layers), trace.top_k)
    arrays: Mapping[str, tuple[NDArray[Any] | None, type, tuple[int, ...]]] = {
        "experts": (trace.experts, np.int16, shape),
        "weights": (trace.weights, np.float16, shape),
        "images": (trace.images, np.uint8, shape[:1]),
        "lengths": (trace.lengths, np.int32, (len(trace.domains),)),
        "prefill": (trace.prefill, np.int32, (len(trace.domains),)),
    }
    for name, (array, dtype, wanted) in arrays.items():
        if array is not None and (array.dtype != dtype or array.shape != wanted):
            return f"{name} are {array.dtype} {list(array.shape)}, not {np.dtype(dtype)} {list(wanted)}"
    if trace.num_tokens == 0 or trace.top_k < 1 or not trace.layers:
        return f"{trace.num_tokens} tokens, {len(trace.layers)} layers, {trace.top_k} experts a token: nothing in it"
    if len(trace.num_experts) != len(trace.layers):
        return f"numbers of experts for {len(trace.num_experts)} layers, {len(trace.layers)} are named"
    if not all(trace.top_k <= experts <= MOST_EXPERTS for experts in trace.num_experts):
        return f"layers of {sorted(set(trace.num_experts))} experts, {trace.top_k} a token"
    if (trace.lengths < 1).any() or (trace.prefill < 0).any() or (trace.prefill > trace.lengths).any():
        return "a sequence without tokens, or with a longer prefill than it has tokens"
    if trace.images is not None and trace.images.max() > 1:
        return f"images are {trace.images.max()} somewhere, neither 0 nor 1"
    bounds = np.array(trace.num_experts)
    highest, lowest = trace.experts.max(axis=(0, 2)), trace.experts.min(axis=(0, 2))
    wrong = np.flatnonzero((highest >= bounds) | (lowest < NONE))
    if len(wrong):
        layer = int(wrong[0])
        value = highest[layer] if highest[layer] >= bounds[layer] else lowest[layer]
        return f"expert {value} in layer {trace.layers[layer]}, which has {bounds[layer]}"
    return None


class LayerHeader(Frozen):
    """One MoE layer of the model."""

    name: str
    num_experts: int = Field(ge=1, le=MOST_EXPERTS)


class Header(Frozen):
    """What a trace's file says of itself; sha256: of every tensor's bytes."""

    schema_version: int = SCHEMA_VERSION
    moeq_version: str = __version__
    model: ModelStamp | None
    text_digest: str
    layers: tuple[LayerHeader, ...]
    domains: tuple[str, ...]
    sha256: dict[str, str]


def join_traces(parts: Sequence[RoutingTrace]) -> RoutingTrace:
    """Traces of some sequences, and of those after them, as one."""
    if len(parts) == 1:
        return parts[0]
    weights = [part.weights for part in parts if part.weights is not None]
    images = [np.zeros(part.num_tokens, np.uint8) if part.images is None else part.images for part in parts]
    return replace(
        parts[0],
        experts=np.concatenate([part.experts for part in parts]),
        weights=np.concatenate(weights) if len(weights) == len(parts) else None,
        images=np.concatenate(images) if any(part.images is not None for part in parts) else None,
        lengths=np.concatenate([part.lengths for part in parts]),
        prefill=np.concatenate([part.prefill for part in parts]),
        domains=tuple(domain for part in parts for domain in part.domains),
    )


def write_trace(path: Path, trace: RoutingTrace) -> None:
    """Write a trace, atomically; the bytes depend only on what is in it."""
    names = tuple(dict.fromkeys(trace.domains))
    arrays: dict[str, NDArray[Any]] = {
        "experts": trace.experts,
        "lengths": trace.lengths,
        "prefill": trace.prefill,
        "domain": np.array([names.index(domain) for domain in trace.domains], dtype=np.int32),
    }
    optional = {"weights": trace.weights, "images": trace.images}
    arrays |= {name: array for name, array in optional.items() if array is not None}
    data = {name: _bytes(array) for name, array in arrays.items()}
    header = Header(
        model=trace.model,
        text_digest=trace.text,
        layers=tuple(
            LayerHeader(name=name, num_experts=experts)
            for name, experts in zip(trace.layers, trace.num_experts, strict=True)
        ),
        domains=names,
        sha256={name: hashlib.sha256(block).hexdigest() for name, block in data.items()},
    )
    text = json.dumps(header.model_dump(mode="json"), sort_keys=True, separators=(",", ":"))
    write_in_chunks(
        path,
        {name: (_DTYPES[name][0], array.shape, array.nbytes) for name, array in arrays.items()},
        lambda name: (bytes(data[name][at : at + CHUNK_BYTES]) for at in range(0, len(data[name]), CHUNK_BYTES)),
        {HEADER: text, SEAL: hashlib.sha256(text.encode()).hexdigest()},
    )


def read_trace(path: Path) -> RoutingTrace:
    """Read a trace; ArtifactError of one line when it is missing, damaged, truncated or of another schema version."""
    try:
        tensors, metadata = safetensors_header(path)
    except FileNotFoundError:
        raise ArtifactError("no such file", where=str(path), do=REMEDY) from None
    except IsADirectoryError:
        raise ArtifactError("is a directory", where=str(path), do=f"give {NAME}, as `moeq profile` wrote it") from None
    except (OSError, ValueError) as error:
        raise ArtifactError(f"cannot be read ({error})", where=str(path), do=REMEDY) from None
    header = _read_header(path, metadata)
    _check_tensors(path, tensors)
    arrays = {name: _array(path, name, tensors[name], header.sha256.get(name, "")) for name in tensors}
    domain = arrays["domain"]
    if len(domain) and not 0 <= int(domain.min()) <= int(domain.max()) < len(header.domains):
        raise ArtifactError("a domain that has no name", where=str(path), do=REMEDY)
    try:
        return RoutingTrace(
            layers=tuple(layer.name for layer in header.layers),
            num_experts=tuple(layer.num_experts for layer in header.layers),
            top_k=arrays["experts"].shape[-1],
            experts=arrays["experts"],
            weights=arrays.get("weights"),
            images=arrays.get("images"),
            lengths=arrays["lengths"],
            prefill=arrays["prefill"],
            domains=tuple(header.domains[index] for index in domain.tolist()),
            model=header.model,
            text=header.text_digest,
        )
    except ArtifactError as error:
        raise ArtifactError(error.what, where=str(path), do=REMEDY) from None


def sequence_counts(trace: RoutingTrace, layer: int, tokens: NDArray[np.bool_]) -> NDArray[np.int64]:
    """How often [S, E] each sequence chose every expert of one layer, over the tokens [N] that are marked."""
    return sequence_sums(trace, layer, tokens, None).astype(np.int64)


def sequence_sums(
    trace: RoutingTrace, layer: int, tokens: NDArray[np.bool_], weights: NDArray[np.float64] | None
) -> NDArray[Any]:
    """Sums [S, E] of what the choices of the marked tokens [N] weigh: [marked, k], None: 1 each."""
    experts = trace.num_experts[layer]
    chosen = trace.experts[tokens, layer]
    there = chosen != NONE
    cell = (trace.sequence[tokens].astype(np.int64)[:, None] * experts + chosen)[there]
    sums = np.bincount(
        cell, weights=None if weights is None else weights[there], minlength=trace.num_sequences * experts
    )
    return sums.reshape(trace.num_sequences, experts)


def is_trace(path: Path) -> bool:
    """Whether a file is safetensors whose metadata says that it holds a trace."""
    try:
        return HEADER in safetensors_header(path)[1]
    except (OSError, ValueError):
        return False


def _read_header(path: Path, metadata: Mapping[str, str]) -> Header:
    if HEADER not in metadata:
        raise ArtifactError("not a routing trace", where=str(path), do="give a trace.safetensors of `moeq profile`")
    try:
        stated = parse_json(metadata[HEADER])
        version = stated.get("schema_version") if isinstance(stated, dict) else None
        check_schema_version(version, SCHEMA_VERSION, path, remedy=REMEDY)
        sealed = hashlib.sha256(metadata[HEADER].encode()).hexdigest()
        if metadata.keys() - {HEADER, SEAL} or metadata.get(SEAL, sealed) != sealed:
            raise ArtifactError(f"{HEADER} is damaged: another SHA-256 than was written", where=str(path), do=REMEDY)
        return Header.model_validate(stated)
    except ValidationError as error:
        what = f"{HEADER}: {refusal_of(error, stated).sentence()}"
        raise ArtifactError(what, where=str(path), do=REMEDY) from None
    except ValueError as error:
        raise ArtifactError(f"{HEADER} is not JSON ({error})", where=str(path), do=REMEDY) from None


def _check_tensors(path: Path, tensors: Mapping[str, TensorHeader]) -> None:
    """ArtifactError unless the tensors are those of a trace, in type and number of axes."""
    for name in sorted(set(_DTYPES) - _OPTIONAL - set(tensors)):
        raise ArtifactError(f"no tensor {name!r} in it", where=str(path), do=REMEDY)
    for name, tensor in tensors.items():
        if name not in _DTYPES:
            raise ArtifactError(f"a tensor {name!r}, which no trace has", where=str(path), do=REMEDY)
        dtype, axes = _DTYPES[name][0], 3 if name in ("experts", "weights") else 1
        if tensor.dtype != dtype or len(tensor.shape) != axes:
            what = f"{name} is {tensor.dtype} of {len(tensor.shape)} axes, not {dtype} of {axes}"
            raise ArtifactError(what, where=str(path), do=REMEDY)


def _bytes(array: NDArray[Any]) -> memoryview:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def _array(path: Path, name: str, tensor: TensorHeader, sha256: str) -> NDArray[Any]:
    """One tensor's values; ArtifactError when its bytes are not those that were written."""
    dtype = np.dtype(_DTYPES[name][1]).newbyteorder("<")
    array = np.fromfile(path, dtype, count=tensor.bytes // dtype.itemsize, offset=tensor.offset)
    if hashlib.sha256(_bytes(array)).hexdigest() != sha256:
        raise ArtifactError(f"{name} is damaged: another SHA-256 than was written", where=str(path), do=REMEDY)
    array.flags.writeable = False
    return array.astype(_DTYPES[name][1], copy=False).reshape(tensor.shape)
