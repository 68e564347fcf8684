"""What `moeq inspect` says of a packed checkpoint: from config.json and the headers, without a model."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from moeq.artifacts.gguf_file import GgufFile, read_gguf
from moeq.errors import ArtifactError
from moeq.exporters.gguf import ERRORS, FILE
from moeq.exporters.readers import layout_of
from moeq.exporters.readers.layout import CHECKED, Layout, packed_modules
from moeq.exporters.readers.mlx import Mlx, unstacked
from moeq.models.configuration import check_counts
from moeq.models.source import CONFIG, ModelSource, TensorHeader, check_parts, open_source, read_config
from moeq.models.stored_experts import LAYERS, Shape, checked_layers, stated

COMPARED = "every tensor has the shape and type that config.json says"
AGAIN = "make or download the checkpoint again"


def packed(path: Path, label: str, trust_remote_code: bool = False) -> dict[str, Any]:
    """A checkpoint of another tool's, or for it; ArtifactError where a header is not as config.json says.

    ModelError for a directory that is damaged, or whose experts are not alike. Where config.json declares modules by
    names that they have in memory alone, the model is made after all, without weights.
    """
    source = open_source(str(path))
    layout = layout_of(source)
    source = _by_expert(source, layout)
    modules = packed_modules(source, layout)
    if layout is not None and any(layout.grid([module]) is None for module in modules):
        return _by_model(path, label, trust_remote_code)
    parts = {f"{module}.{part}" for module, headers in modules.items() for part in headers}
    layers = checked_layers(shapes_of(source), source.config, str(path))
    if not layers:
        raise ArtifactError("no module holds routed experts", where=str(path), do=AGAIN)
    of_experts = {key for layer in layers for key in layer.keys}
    plain_bytes = sum(source.tensors[key].bytes for key in source.tensors if key not in parts | of_experts)
    return {
        "kind": f"packed checkpoint ({label})",
        "model_type": source.config["model_type"],
        "moe_layers": len(layers),
        "experts_a_layer": sorted({layer.num_experts for layer in layers}),
        "packed_modules_beside_experts": sum(f"{module}.weight" not in of_experts for module in modules),
        "packed_bytes": sum(header.bytes for header in source.tensors.values()) - plain_bytes,
        "plain_bytes": plain_bytes,
        "check": CHECKED,
    }


def _by_model(path: Path, label: str, trust_remote_code: bool) -> dict[str, Any]:
    """As `packed`, by the names that transformers' model has."""
    from moeq.exporters.packed_source import Checkable
    from moeq.exporters.readers import open_packed

    opened = open_packed(path, trust_remote_code=trust_remote_code, as_values=True)
    if isinstance(opened, Checkable):
        opened.check()
    tensors = opened.source.tensors
    plain_bytes = sum(tensors[key].bytes for key in opened.rest())
    return {
        "kind": f"packed checkpoint ({label})",
        "model_type": opened.config["model_type"],
        "moe_layers": len(opened.layers),
        "experts_a_layer": sorted({layer.num_experts for layer in opened.layers}),
        "packed_modules_beside_experts": len(opened.other_names()),
        "packed_bytes": sum(header.bytes for header in tensors.values()) - plain_bytes,
        "plain_bytes": plain_bytes,
        "check": COMPARED,
    }


def shapes_of(source: ModelSource) -> dict[str, Shape]:
    """{key: shape} of the tensors of a plain or packed checkpoint, a packed matrix as MODULE.weight.

    Raises ArtifactError for a packed one whose parts are not those of its grid, or a format that is not read.
    """
    layout = layout_of(source)
    if layout is None:
        return {key: header.shape for key, header in source.tensors.items()}
    source = _by_expert(source, layout)
    modules = packed_modules(source, layout)
    parts = {f"{module}.{part}" for module, headers in modules.items() for part in headers}
    shapes = {f"{module}.weight": _checked(module, headers, layout) for module, headers in modules.items()}
    return shapes | {key: header.shape for key, header in source.tensors.items() if key not in parts}


def _by_expert(source: ModelSource, layout: Layout | None) -> ModelSource:
    """A checkpoint with a tensor for each expert's matrix, where its layout has stacks of them."""
    return unstacked(source)[0] if isinstance(layout, Mlx) else source


def _checked(module: str, headers: dict[str, TensorHeader], layout: Layout) -> Shape:
    """Rows and inputs of a packed matrix whose parts are those of its grid; ArtifactError for others."""
    where = str(next(iter(headers.values())).file)
    grid = layout.grid([module])
    if grid is None:
        raise ArtifactError(f"{module}: it is packed, config.json says that it is not", where=where, do=AGAIN)
    try:
        rows, inputs = layout.shape(headers, grid)
        layout.check(headers, grid, rows, inputs)
    except ValueError as error:
        raise ArtifactError(f"{module}: {error}", where=where, do=AGAIN) from None
    return rows, inputs


def gguf_headers(path: Path) -> tuple[GgufFile, dict[str, Any], dict[str, TensorHeader]]:
    """The header of a directory's model.gguf, its config.json, and its tensors as safetensors' headers have them.

    ArtifactError and ModelError for what is damaged.
    """
    where = path / FILE
    check_parts(path)
    try:
        file = read_gguf(where)
    except (OSError, ValueError) as error:
        raise ArtifactError(f"cannot be read as GGUF ({error})", where=str(where), do=AGAIN) from None
    config = read_config(path / CONFIG)
    headers = {
        name: TensorHeader(file=where, dtype="U8", shape=tensor.shape, offset=tensor.offset, bytes=tensor.bytes)
        for name, tensor in file.tensors.items()
    }
    check_counts(config, headers, path / CONFIG)
    return file, config, headers


def gguf(path: Path, trust_remote_code: bool) -> dict[str, Any]:
    """A directory with model.gguf: its stacks of experts are as its own metadata and config.json say.

    Raises ArtifactError for a damaged file, ModelError for a damaged config.json. The rest of the model is compared
    where it is made: `moeq verify`.
    """
    where = path / FILE
    file, config, _ = gguf_headers(path)
    arch = str(file.fields.get("general.architecture"))[:60]
    stacks = file.expert_stacks
    layers = {name.rpartition(".ffn_")[0] for name in stacks}
    count, blocks = file.fields.get(f"{arch}.expert_count"), file.fields.get(f"{arch}.block_count")
    for name, tensor in stacks.items():
        if len(tensor.shape) != 3 or tensor.shape[0] != count:
            what = f"tensor {name} is {list(tensor.shape)}, the file says {count} experts"
            raise ArtifactError(what, where=str(where), do=AGAIN)
    if not stacks or blocks != stated(config, LAYERS):
        what = f"{blocks} blocks, {len(layers)} of them with experts; config.json says {stated(config, LAYERS)}"
        raise ArtifactError(what, where=str(where), do=AGAIN)
    types = Counter(stacks[name].type.name for name in sorted(stacks))
    expert_bytes = sum(tensor.bytes for tensor in stacks.values())
    errors = [error for name in stacks for error in _errors(file.fields.get(f"{ERRORS}{name}"))]
    rounded = {} if not any(errors) else {"rounded_scales": f"values are off by up to {max(errors):.2g} relative"}
    return {
        "kind": f"GGUF ({arch})",
        "model": str(file.fields.get("general.name", ""))[:200],
        "moe_layers": len(layers),
        "experts": ", ".join(f"{number} stacks of {kind}" for kind, number in types.items()),
        **rounded,
        "expert_bytes": expert_bytes,
        "non_expert_bytes": sum(tensor.bytes for tensor in file.tensors.values()) - expert_bytes,
        "check": "the experts' stacks have the numbers that the file and config.json state; `moeq verify` compares all",
        "loads_in": {"llama.cpp": None},
    }


def _errors(stated: Any) -> Iterable[float]:
    """What a file says of how far matrices are from what they were converted from; nothing where it says nothing."""
    return stated if isinstance(stated, array) else ()
