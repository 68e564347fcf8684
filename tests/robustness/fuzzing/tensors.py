"""Targets: safetensors and GGUF files, profiles among them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf_made import gguf_bytes
from robustness.fuzzing.target import BytesTarget, Check, JsonTarget, Place, TensorsTarget
from safetensors import SafetensorError, safe_open

from moeq.artifacts.gguf_file import read_gguf
from moeq.artifacts.profile import Coverage, ExpertProfile, read_profile, write_profile
from moeq.artifacts.reading import ELEMENT_BITS
from moeq.artifacts.replicas import LayerReplicas, add_replicas, layer_file
from moeq.artifacts.tensor_files import write_tensors
from moeq.artifacts.trace import HEADER, RoutingTrace, is_trace, read_trace, write_trace
from moeq.errors import ArtifactError
from moeq.models.source import read_header
from moeq_kernels.packed import PackedWeight, packed_shapes
from moeq_kernels.widths import Encoding


def made_weight(bits: int) -> PackedWeight:
    """A stack of two small weights [2, 4, 20] in groups of 8."""
    generator = torch.Generator().manual_seed(bits)
    parts = {
        name: torch.randint(0, 200, (2, *shape), generator=generator, dtype=torch.uint8).to(dtype)
        for name, (shape, dtype) in packed_shapes(4, 20, bits, Encoding(group_size=8, symmetric=False)).items()
    }
    return PackedWeight(
        codes=parts["codes"], scales=parts["scales"], zeros=parts.get("zeros"), bits=bits, group_size=8, inputs=20,
        symmetric=False,
    )  # fmt: skip


class Header(TensorsTarget):
    """A safetensors file: what is read lies in it, and safetensors itself reads it alike."""

    name = "header"

    def prepare(self, place: Place) -> None:
        tensors = {"a.weight": torch.arange(24.0).reshape(4, 6), "b": torch.zeros(3, dtype=torch.uint8)}
        write_tensors(self.folder / "valid.safetensors", tensors, {"format": "pt"})
        self.data = (self.folder / "valid.safetensors").read_bytes()

    def read(self, data: bytes) -> Check:
        path = self.file("fuzzed.safetensors", data)
        found = read_header(path)
        return lambda: _is_sound(path, found, len(data))


def _is_sound(path: Path, found: dict[str, Any], size: int) -> None:
    for header in found.values():
        elements = 1
        for axis in header.shape:
            elements *= axis
        assert elements * ELEMENT_BITS[header.dtype] == 8 * header.bytes
        assert 8 <= header.offset <= header.offset + header.bytes <= size
    try:
        with safe_open(path, "np") as handle:
            for key in handle.keys():  # noqa: SIM118
                assert tuple(handle.get_slice(key).get_shape()) == found[key].shape
    except SafetensorError as error:
        raise AssertionError(f"safetensors refuses it: {error}") from None


class Store(TensorsTarget):
    """A layer of the replica store: what it has gives values."""

    name, inner = "store", "entries"

    def prepare(self, place: Place) -> None:
        add_replicas(self.folder, 0, {"gptq.3.x": {"up_proj": made_weight(3), "down_proj": made_weight(3)}})
        self.data = layer_file(self.folder, 0).read_bytes()

    def read(self, data: bytes) -> None:
        layer_file(self.folder, 0).write_bytes(data)
        replicas = LayerReplicas(self.folder, 0)
        for entry, said in replicas.entries.items():
            for projection in said["projections"]:
                replicas.expert(entry, projection, 1).dequantize()


class Trace(TensorsTarget):
    """A routing trace: tokens as its sequences have them, experts that there are."""

    name, inner = "trace", HEADER

    def prepare(self, place: Place) -> None:
        write_trace(self.folder / "valid.safetensors", _trace())
        self.data = (self.folder / "valid.safetensors").read_bytes()

    def read(self, data: bytes) -> None:
        path = self.file("fuzzed.safetensors", data)
        is_trace(path)
        found = read_trace(path)
        assert found.num_tokens == int(found.lengths.sum()) == len(found.sequence)
        assert (found.experts < np.array(found.num_experts)[:, None]).all()


def _trace() -> RoutingTrace:
    """Two sequences of three tokens, two layers of five experts."""
    return RoutingTrace(
        layers=("layers.0", "layers.1"), num_experts=(5, 5), top_k=2,
        experts=np.arange(24, dtype=np.int16).reshape(6, 2, 2) % 5,
        weights=np.full((6, 2, 2), 0.5, dtype=np.float16), images=np.arange(6, dtype=np.uint8) % 2,
        lengths=np.array([3, 3], dtype=np.int32), prefill=np.array([1, 2], dtype=np.int32),
        domains=("a", "b"), text="0" * 64,
    )  # fmt: skip


def write_valid_profile(folder: Path) -> None:
    """Three sequences, two layers of four and five experts."""
    counts = [np.arange(6 * size, dtype=np.int64).reshape(3, 2, size) for size in (4, 5)]
    profile = ExpertProfile(
        layers=("layers.0", "layers.1"), top_k=(2, 1), counts=tuple(counts),
        scores=tuple(each * 0.25 for each in counts), tokens=np.full((3, 2), 30, dtype=np.int64), text="0" * 64,
        corpus=("bundled",),
    )  # fmt: skip
    write_profile(folder, profile, Coverage(min_tokens=4, below=(1, 0), experts=(4, 5)))


def check_profile(found: ExpertProfile) -> None:
    """Everything that later stages take for granted; they work with it."""
    sequences = len(found.tokens)
    assert found.tokens.shape == (sequences, 2)
    assert (found.tokens >= 0).all()
    for name, top_k, counts, scores in zip(found.layers, found.top_k, found.counts, found.scores, strict=True):
        assert isinstance(name, str)
        assert counts.shape == scores.shape == (sequences, 2, counts.shape[-1])
        assert 1 <= top_k <= counts.shape[-1]
        assert (counts >= 0).all()
        assert np.isfinite(scores).all()
    found.activation()
    found.similarity()
    found.coverage(4, 5)


class Profile(JsonTarget):
    """profile.json beside its tensors."""

    name = "profile"

    def prepare(self, place: Place) -> None:
        write_valid_profile(self.folder)
        import json

        self.value = json.loads((self.folder / "profile.json").read_text("utf-8"))

    def read(self, data: bytes) -> Check:
        self.file("profile.json", data)
        found = read_profile(self.folder)
        return lambda: check_profile(found)


class ProfileTensors(TensorsTarget):
    """profile.safetensors beside its table."""

    name = "profile_tensors"

    def prepare(self, place: Place) -> None:
        write_valid_profile(self.folder)
        self.data = (self.folder / "profile.safetensors").read_bytes()

    def read(self, data: bytes) -> Check:
        self.file("profile.safetensors", data)
        found = read_profile(self.folder)
        return lambda: check_profile(found)


class Gguf(BytesTarget):
    """A GGUF file: its tensors lie in it."""

    name = "gguf"

    def prepare(self, place: Place) -> None:
        self.data = gguf_bytes(
            {"general.architecture": "llama", "llama.block_count": 2, "tokens": ["a", "b"], "sizes": [1, 2, 3]},
            {"a": (2, (2, 64), bytes(72)), "b": (0, (3,), bytes(12))},
        )

    def read(self, data: bytes) -> None:
        path = self.file("fuzzed.gguf", data)
        try:
            found = read_gguf(path)
        except ValueError as error:
            raise ArtifactError(str(error), where=str(path), do="as its readers do") from None
        for tensor in found.tensors.values():
            assert 0 < tensor.offset <= tensor.offset + tensor.bytes <= len(data)
