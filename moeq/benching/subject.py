"""What is measured: a loaded model, what it stores, and what it takes in memory."""

from __future__ import annotations

import gc
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from moeq.artifacts.bench import manifest_digest
from moeq.artifacts.manifest import read_manifest
from moeq.artifacts.sums import check_sums
from moeq.errors import ModelError
from moeq.folders import checkpoint_of, is_run
from moeq.models.declared import is_dequantized, quantization_of
from moeq.models.experts import ExpertLayer, find_expert_layers
from moeq.models.loading import compute_dtype, load_config, load_model, model_class, no_text, skeleton
from moeq.models.source import ModelSource, open_source
from moeq.models.streaming import blocks_of
from moeq.models.visits import visits
from moeq.progress import Reporter
from moeq.runtime.checkpoint import CARD, OWN
from moeq.runtime.grouped_attention import group
from moeq.runtime.packed_modules import TiedHead
from moeq.runtimes import NATIVE, to_convert
from moeq_kernels.widths import METHOD

STATM, PAGE = Path("/proc/self/statm"), os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A model that is loaded, with its MoE layers.

    expert_bytes: by the layer's path, [E] what is stored of each expert; shared_bytes: what every decode step reads
    beside experts and caches; row_bytes: of what a token looks up in tables of embeddings; resident_bytes: growth of
    the process's memory by loading (CUDA: allocated), tensor_bytes: of the tensors that are held; manifest_sha256: of
    a packed one's placement.json.
    """

    name: str
    model: Any
    layers: Sequence[ExpertLayer]
    packed: bool
    dtype: torch.dtype
    device: torch.device
    bits: float
    expert_bytes: dict[str, Tensor]
    shared_bytes: int
    row_bytes: int
    resident_bytes: int
    tensor_bytes: int
    manifest_sha256: str | None

    def kernels(self) -> dict[str, int]:
        """MoE layers by how they compute, once they have run; empty of a dense model."""
        modules = (self.model.get_submodule(layer.name) for layer in self.layers)
        return dict(Counter(map(computes, modules))) if self.packed else {}

    def as_json(self) -> dict[str, Any]:
        """What is said of it before anything is timed."""
        return {
            "model": self.name,
            "packed": self.packed,
            "bits_per_weight": self.bits,
            "compute_dtype": str(self.dtype).removeprefix("torch."),
            "expert_bytes": int(sum(int(each.sum()) for each in self.expert_bytes.values())),
            "shared_bytes_per_step": self.shared_bytes,
            "tensor_bytes": self.tensor_bytes,
            "resident_bytes": self.resident_bytes,
            "manifest_sha256": self.manifest_sha256,
        }


def source_of(name: str) -> ModelSource:
    """Where a model's weights are, of a run those of its checkpoint; a hub id is taken as it is."""
    return open_source(str(checkpoint_of(Path(name))) if is_run(Path(name)) else name)


def compute_type(name: str, wanted: str, device: torch.device) -> torch.dtype:
    """The type that a model computes in: as --dtype says, or the checkpoint's own."""
    return compute_dtype(source_of(name), wanted, device)


def load_subject(
    name: str, dtype: torch.dtype, device: torch.device, trust_remote_code: bool, reporter: Reporter
) -> Subject:
    """Load a packed or a dense checkpoint; ModelError for one in another packed format, or that makes no text.

    Files of a packed one that changed since they were written are refused.
    """
    source = source_of(name)
    declared = quantization_of(source.config)
    method = declared.get("quant_method")
    packed = method == METHOD
    if method is not None and not packed and not is_dequantized(source):
        what = f"packed in another format than moeq's own ({method})"
        do = f"give a checkpoint of moeq, or a dense one: {to_convert(source.path, declared, NATIVE, OWN)}"
        raise ModelError(what, where=str(source.path), do=do)
    check_makes_text(source, trust_remote_code)
    sums = check_sums(source.path, only=lambda file: file != CARD, cached=True, reporter=reporter) if packed else None
    if sums is not None:
        sums.require_inactive(source.path)
    layers = find_expert_layers(skeleton(source, dtype, trust_remote_code, packed=True))  # imports the family's code
    before = memory(device)
    model: Any = load_model(source, dtype, device, trust_remote_code)
    group(model)  # the dense one as well, so that what differs is the weights
    _touch(model)
    resident = memory(device) - before
    stored = _packed_bytes(source) if packed else _dense_bytes(layers, dtype)
    bits = 8 * sum(int(each.sum()) for each in stored.values())
    return Subject(
        name=name,
        model=model,
        layers=layers,
        packed=packed,
        dtype=dtype,
        device=device,
        bits=bits / sum(layer.num_experts * layer.weights_per_expert for layer in layers),
        expert_bytes=stored,
        shared_bytes=_shared_bytes(model, layers),
        row_bytes=_row_bytes(model),
        resident_bytes=max(resident, 0),
        manifest_sha256=manifest_digest(source.path),
        tensor_bytes=_held(model.modules()),
    )


def check_makes_text(source: ModelSource, trust_remote_code: bool) -> None:
    """ModelError for a model of images, or of another task."""
    what = no_text(model_class(source, load_config(source, trust_remote_code), trust_remote_code))
    if what is not None:
        raise ModelError(f"{what} makes no text", where=str(source.path), do="give a language model")


def memory(device: torch.device) -> int:
    """Bytes that this process has in the machine's memory, or allocated on the GPU."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        return int(torch.cuda.memory_allocated(device))
    return int(STATM.read_text().split()[1]) * PAGE


def _touch(model: nn.Module) -> None:
    """Read a byte of every page on the machine, so that weights that are still only mapped from the disk count."""
    for tensor in (tensor for module in model.modules() for tensor in _own(module)):
        if tensor.device.type == "cpu":
            torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())[::PAGE].sum()


def _packed_bytes(source: ModelSource) -> dict[str, Tensor]:
    """What the manifest states of every placed expert."""
    return {
        layer.name: torch.tensor(
            [sum(one.bytes for one in expert.replicas if one.placed) for expert in layer.experts], dtype=torch.int64
        )
        for layer in read_manifest(source.path).layers
    }


def _dense_bytes(layers: Sequence[ExpertLayer], dtype: torch.dtype) -> dict[str, Tensor]:
    return {layer.name: torch.full([layer.num_experts], layer.weights_per_expert * dtype.itemsize) for layer in layers}


def _own(module: nn.Module) -> Iterator[Tensor]:
    yield from module.parameters(recurse=False)
    yield from module.buffers(recurse=False)


def _held(modules: Iterable[nn.Module]) -> int:
    """Bytes of the modules' own tensors, of shared memory once, and of what kernels hold of them instead."""
    own: dict[int, int] = {}
    by_kernels = 0
    for module in modules:
        own |= {tensor.data_ptr(): tensor.nbytes for tensor in _own(module) if tensor.nbytes}
        prepared: Any = getattr(module, "prepared", None)
        by_kernels += 0 if prepared is None else int(prepared.nbytes)
    return sum(own.values()) + by_kernels


def computes(module: nn.Module) -> str:
    """How a packed experts module computes, in words: a kernel and its form, or without one and why."""
    prepared: Any = getattr(module, "prepared", None)
    if prepared is None:
        why = getattr(module, "reason", None) or getattr(module, "refused", None)
        return "no kernel: unpacked, then multiplied" + ("" if why is None else f" ({why})")
    prepared = getattr(prepared, "prepared", None) or prepared  # of the experts that are left where some are dropped
    package, form = type(prepared).__module__.split("."), getattr(prepared, "form", None)
    name = package[1] if package[0] == "moeq_kernels" else type(prepared).__name__
    return name if form is None else f"{name}, {form.name}"


def _shared_bytes(model: Any, layers: Sequence[ExpertLayer]) -> int:
    """Bytes of all modules that a decode step runs whatever is routed, as often as it does: no expert, no tables of
    embeddings (of which it looks up rows) unless the head is the same tensor."""
    left_out = {id(inner) for layer in layers for inner in model.get_submodule(layer.name).modules()}
    left_out |= {id(table) for table in _tables(model)}
    if isinstance(model.get_output_embeddings(), TiedHead):
        left_out.discard(id(model.get_input_embeddings()))
    once = _held(module for module in _run_by_tokens(model) if id(module) not in left_out)
    blocks = [model.get_submodule(path) for path in blocks_of(model) for _ in range(1, visits(model, path))]
    return once + sum(_held(module for module in block.modules() if id(module) not in left_out) for block in blocks)


def _run_by_tokens(model: Any) -> list[nn.Module]:
    """The modules that a token of text goes through: of the table of words, the decoder and the head; no encoder of
    texts, images or sounds."""
    parts = (model.get_input_embeddings(), model.get_decoder(), model.get_output_embeddings())
    return list(dict.fromkeys(inner for part in parts if part is not None for inner in part.modules()))


def _tables(model: Any) -> list[Any]:
    """Tables of embeddings of which a token looks up a row: its word's, and those that some layers have."""
    others = (module for module in _run_by_tokens(model) if isinstance(module, nn.Embedding))
    return list(dict.fromkeys([model.get_input_embeddings(), *others]))


def _row_bytes(model: Any) -> int:
    """Bytes of a row of every table, of tables that are one tensor once."""
    rows: dict[int, int] = {}
    for table in _tables(model):
        first = next(_own(table)).data_ptr()
        rows[first] = _held([table]) // int(getattr(table, "num_embeddings", None) or len(table.weight))
    return sum(rows.values())
