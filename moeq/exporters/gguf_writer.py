"""A GGUF file: the experts of a layer stacked by projection, one type a stack.

Every matrix goes into the type of ggml that holds its grid exactly (`numerics.ggml_types`); what none holds is refused
or, with options.widen, stored in a wider symmetric grid of the same values, which brings a stack to one width too. For
a target with rounded scales it goes into the type that comes nearest (`numerics.ggml_refit`), and the file says how
near. All else keeps its type, but vectors and routers, which llama.cpp wants in float32.

The tensors are written as they come, one layer in memory; the header, whose length does not depend on the types, is put
before them last. E experts, N output rows, K inputs.
"""

from __future__ import annotations

import importlib
import math
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import IO, Any, cast

import torch
from torch import Tensor

from moeq.artifacts.files import read_back
from moeq.artifacts.storage import storage_errors
from moeq.artifacts.targets import ANY_GRID, ONE_WIDTH, WIDEN, Grid, refuse_stack, widest_of
from moeq.artifacts.tensor_files import dtype_name, tensor_bytes
from moeq.errors import FormatError, RecipeError
from moeq.exporters.foreign import Draft, check_other, grid_of
from moeq.exporters.gguf import ERRORS, FILE
from moeq.exporters.gguf_families import (
    Piece,
    bias_name,
    expert_shapes,
    family_of,
    is_beside,
    is_beyond,
    made,
    of_text,
    parameters,
    pieces,
    remarks,
    stack_name,
    stack_shapes,
)
from moeq.exporters.gguf_known import Family
from moeq.exporters.gguf_parameters import Value
from moeq.exporters.gguf_tokenizer import tokenizer
from moeq.models.disk_names import DiskNames
from moeq.models.experts import ExpertLayer
from moeq.models.source import ModelSource
from moeq.models.weights import is_ignored, plain_chunks, plain_header, plain_tensor
from moeq.numerics import ggml
from moeq.numerics.ggml_refit import refit
from moeq.numerics.ggml_types import FLOATS, NEAREST, TYPES
from moeq.numerics.matrix_error import relative_error
from moeq.version import __version__
from moeq_kernels import iq
from moeq_kernels.iq_types import type_of
from moeq_kernels.packed import PackedWeight

WHERE = "format gguf"
ALIGNMENT = 32
QUANTIZATION_VERSION = 2  # of ggml's blocks


@dataclass(kw_only=True)
class Entry:
    """A tensor of the file: its shape, row by row, and, when it is written, its type and bytes."""

    shape: tuple[int, ...]
    type: str = "F32"
    bytes: int = 0


@dataclass(kw_only=True)
class Writer:
    """The file while it is written; arch: None for one that is no model; entries: its tensors in order; errors:
    relative, of the matrices of some, by how much they are not as in the checkpoint."""

    gguf: Any
    arch: str | None
    stream: IO[bytes]
    fields: dict[str, Value]
    entries: dict[str, Entry]
    scratch: Path
    written: list[str] = field(default_factory=list)
    errors: dict[str, list[float]] = field(default_factory=dict)
    start: int = 0
    crc: int = 0  # of the tensors

    def begin(self) -> None:
        """Leave room for the header."""
        self.start = self.stream.write(bytes(len(self._header())))

    def add(self, name: str, kind: str, chunks: Iterable[bytes | memoryview]) -> None:
        """Write the next tensor's bytes; they are padded to the alignment."""
        entry = self.entries[name]
        assert name == list(self.entries)[len(self.written)], name
        self.written.append(name)
        rows = TYPES[kind].row_bytes(entry.shape[-1])
        entry.type, entry.bytes = kind, rows * int(torch.Size(entry.shape[:-1]).numel())
        written = sum(self._write(chunk) for chunk in chunks)
        assert written == entry.bytes, (name, written, entry.bytes)
        self._write(bytes(-written % ALIGNMENT))

    def _write(self, chunk: bytes | memoryview) -> int:
        self.crc = zlib.crc32(chunk, self.crc)
        return self.stream.write(chunk)

    def finish(self) -> None:
        """Put the header before the tensors."""
        assert self.written == list(self.entries)
        self.stream.seek(0)
        self.stream.write(self._header())

    def _header(self) -> bytes:
        """The header, padded, as gguf's own writer has it."""
        writer = self.gguf.GGUFWriter(self.scratch, self.arch or "")  # which leaves empty texts out
        if self.arch is not None:
            kinds = Counter(entry.type for name, entry in self.entries.items() if name.endswith("_exps.weight"))
            common = next(iter(kinds)) if len(kinds) == 1 else None
            writer.add_file_type(_file_type(self.gguf, common))
        for key, value in self.fields.items():
            _add(writer, key, value)
        for name, errors in self.errors.items():
            _add(writer, f"{ERRORS}{name}", errors)
        for name, entry in self.entries.items():
            number = self.gguf.GGMLQuantizationType[entry.type]
            writer.add_tensor_info(name, entry.shape, torch.empty(0).numpy().dtype, entry.bytes, raw_dtype=number)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        writer.close()
        header = self.scratch.read_bytes()
        self.scratch.unlink()
        return header + bytes(-len(header) % ALIGNMENT)


def _file_type(gguf: Any, common: str | None) -> int:
    """What the file says of its weights as a whole: the type of all stacks, where they have one."""
    names = {"F32": "ALL_F32", "Q3_K": "MOSTLY_Q3_K_M", "Q4_K": "MOSTLY_Q4_K_M", "Q5_K": "MOSTLY_Q5_K_M"}
    name = "GUESSED" if common is None else names.get(common, f"MOSTLY_{common}")
    return int(gguf.LlamaFileType[name])


def _add(writer: Any, key: str, value: Value) -> None:
    if isinstance(value, list):
        writer.add_array(key, value)
    elif isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    else:
        writer.add_string(key, value)


def package() -> Any:
    """The gguf package; RecipeError where it is not installed."""
    try:
        return importlib.import_module("gguf")
    except ImportError:
        raise RecipeError("the package gguf is not installed", where=WHERE, do="pip install 'moeq[gguf]'") from None


def check(source: ModelSource, model: Any) -> None:
    """What stands in the way of a model whatever its experts become; model: its structure.

    Raises RecipeError without the gguf package, FormatError for a family or a tokenizer that llama.cpp has otherwise.
    """
    package()
    family_of(model.config)
    tokenizer(source, model.config.get_text_config().vocab_size)


def write(draft: Draft) -> None:
    """Write the file and what lies beside it; FormatError for what llama.cpp would not load as it is meant."""
    gguf, source, config = package(), draft.source, cast(Any, draft.model.config)
    family = family_of(config)
    plain, packed = _plain(draft, family), _packed(draft, family)
    shapes = {name: shape for layer in source.layers for name, shape in expert_shapes(layer).items()}
    shapes |= {piece.name: piece.shape for parts in (*plain.values(), *packed.values()) for piece in parts}
    added = family.made(config.get_text_config())
    shapes |= {name: tuple(tensor.shape) for name, tensor in added.items()}
    path = draft.directory / FILE
    with storage_errors(path), path.open("wb") as stream:
        writer = Writer(
            gguf=gguf,
            arch=family.arch,
            stream=stream,
            fields=_fields(draft, family),
            entries={name: Entry(shape=shape) for name, shape in shapes.items()},
            scratch=draft.directory / f"{FILE}.header",
        )
        if draft.target.runs is not None:
            modules = {piece.name: 1 for parts in packed.values() for piece in parts}
            stacks = {name: shape[0] for name, shape in stack_shapes(source.layers).items()}
            writer.errors = {name: [0.0] * count for name, count in (stacks | modules).items()}
        writer.begin()
        for layer in source.layers:
            _write_layer(draft, writer, layer)
        for key, parts in plain.items():
            for piece in parts:
                writer.add(piece.name, *_contents(draft, config, key, piece))
        for name, weight in source.others():
            for piece in packed[name]:
                writer.add(piece.name, *_packed_module(draft, writer, name, piece, weight))
        for name, tensor in added.items():
            writer.add(name, "F32", [tensor_bytes(tensor)])
        writer.finish()
    read_back(path, writer.start, writer.crc)
    draft.notes += [*_rounded(writer), *remarks(config, family, _tokenizer(draft))]
    draft.complete(draft.sides.config(source.config))


def _fields(draft: Draft, family: Family) -> dict[str, Value]:
    """The header's keys and values but for the architecture and the type."""
    config: Any = draft.model.config
    return {
        "general.type": "model",
        "general.name": draft.options.model_name or draft.source.source.name,
        "general.quantization_version": QUANTIZATION_VERSION,
        "general.quantized_by": f"moeq {__version__}",
        **{f"{family.arch}.{key}": value for key, value in parameters(config, family).items()},
        **{f"tokenizer.{key}": value for key, value in _tokenizer(draft).items()},
    }


def _tokenizer(draft: Draft) -> dict[str, Value]:
    config: Any = draft.model.config
    return tokenizer(draft.source.source, config.get_text_config().vocab_size)


def _plain(draft: Draft, family: Family) -> dict[str, list[Piece]]:
    """{key: what the file holds of it} of all tensors that are neither of routed experts nor packed, but for those
    beside the language model, and those that transformers passes over (rotary embeddings' frequencies, which older
    checkpoints have)."""
    config: Any = draft.model.config
    own = draft.model.state_dict()
    tied = _is_tied(draft)
    return {
        key: pieces(config, family, key, plain_header(draft.source.source, key)[1], tied=tied)
        for key in draft.source.rest()
        if not is_beside(config, draft.names.in_memory(key))
        and not is_beyond(config, key)
        and (draft.names.in_memory(key) in own or not is_ignored(draft.model, key))
    }


def _packed(draft: Draft, family: Family) -> dict[str, list[Piece]]:
    """{module: what the file holds of it} of the packed modules outside of the experts.

    Raises FormatError for those that no type holds, or that GGUF keeps otherwise than as matrices of blocks.
    """
    packed, tied = {}, _is_tied(draft)
    for name, weight in draft.source.others():
        grid = grid_of(weight)
        check_other(draft.runtime, draft.names, name, grid, widen=draft.options.widen)
        packed[name] = _pieces_of(draft.names, family, name, (grid.rows, grid.inputs), tied)
    return packed


def _is_tied(draft: Draft) -> bool:
    """Whether the head is the embeddings: transformers does not tie what a checkpoint has twice with other values."""
    source, (head, table) = draft.source, (f"{name}.weight" for name in ("lm_head", "model.embed_tokens"))
    config: Any = draft.model.config
    if not config.tie_word_embeddings or head.removesuffix(".weight") in source.other_names():
        return False
    plain = {of_text(key): key for key in source.rest()}
    if head not in plain:
        return True
    head, table = plain[head], plain.get(table, "")
    if not table or plain_header(source.source, head) != plain_header(source.source, table):
        return False
    both = zip_longest(*(plain_chunks(source.source, key) for key in (head, table)))
    return all(first == second for first, second in both)


def _pieces_of(names: DiskNames, family: Family, name: str, shape: tuple[int, int], tied: bool) -> list[Piece]:
    """What a file holds of a module outside of the experts."""
    return pieces(names.model.config, family, names.renamed(f"{name}.weight"), shape, tied=tied)


def refuse_other(names: DiskNames, name: str, shape: tuple[int, int]) -> tuple[str, str] | None:
    """Why GGUF keeps a module outside of the experts otherwise than as a matrix of blocks."""
    for piece in _pieces_of(names, family_of(names.model.config), name, shape, False):
        if piece.split or piece.in_float32 or piece.columns is not None:
            how = "transposed" if piece.split else "in float32"
            how = how if piece.columns is None else "with its columns in another order"
            return f"GGUF keeps it {how}, and not packed", f"leave {name} out of `others`, or {ANY_GRID}"
    return None


def _write_layer(draft: Draft, writer: Writer, layer: ExpertLayer) -> None:
    """Write the stacks of one layer."""
    experts = [draft.expert(layer, expert) for expert in range(layer.num_experts)]
    for projection in layer.projections:
        matrices = [expert[0].pop(projection) for expert in experts]
        kind, stack = _stack(draft, writer, layer, projection, matrices)
        writer.add(stack_name(layer, projection), kind, stack)
    for projection in layer.projections if layer.biased else ():
        biases = (tensor_bytes(expert[1][projection].float()) for expert in experts)
        writer.add(bias_name(layer, projection), "F32", biases)


def _rounded(writer: Writer) -> list[str]:
    """One line on the matrices whose scales were rounded; none where there are none."""
    errors = [error for name in writer.errors for error in writer.errors[name] if error > 0]
    if not errors:
        return []
    worst = max(writer.errors, key=lambda name: max(writer.errors[name]))
    every = sum(len(values) for values in writer.errors.values())
    mean = sum(errors) / len(errors)
    return [
        f"{len(errors)} of {every} matrices have rounded scales: values off by {mean:.2g} relative on average, by at "
        f"most {max(errors):.2g} ({worst})"
    ]


def _stack(
    draft: Draft, writer: Writer, layer: ExpertLayer, projection: str, matrices: list[PackedWeight | Tensor]
) -> tuple[str, Iterator[bytes | memoryview]]:
    """One matrix of all experts in one type, and its bytes, expert by expert; FormatError where they do not fit one."""
    names = [f"{layer.name}.{expert}.{projection}" for expert in range(len(matrices))]
    packed = [matrix for matrix in matrices if isinstance(matrix, PackedWeight)]
    full = [matrix for matrix in matrices if isinstance(matrix, Tensor)]
    if not packed:
        draft.plain += names
        kind = _float_type(dtype_name(full[0].dtype), names[0])
        return kind, (tensor_bytes(matrix) for matrix in full)
    bits = _common_width(draft, f"{layer.name}, {projection}", [grid_of(weight) for weight in packed], bool(full))
    wide = [draft.loadable(name, weight, bits) for name, weight in zip(names, packed, strict=True)]
    (one,) = {_kind(grid_of(weight)) for weight in wide}
    assert one is not None, names[0]
    stack = stack_name(layer, projection)
    every = enumerate(zip(names, wide, strict=True))
    return one, (_blocks(draft, writer, name, weight, stack, place) for place, (name, weight) in every)


def _common_width(draft: Draft, what: str, grids: list[Grid], full: bool) -> int | None:
    """The width that all of a stack are widened to; None where each stays as it is, or goes into a wider one alone.

    full: whether some of the stack are in full precision. FormatError where no type holds them all.
    """
    refused = refuse_stack(draft.target, grids, full=full, widen=draft.options.widen)
    if refused is not None:
        raise FormatError(refused[0], where=f"{WHERE}: {what}", do=refused[1])
    if len({_kind(grid) for grid in grids}) == 1:
        return None
    bits = widest_of(draft.target, grids) if draft.options.widen else None
    if bits is None:
        listed = ", ".join(map(str, sorted({grid.bits for grid in grids})))
        zeros = "" if "," in listed else ", with and without zero points,"
        raise FormatError(
            f"{listed} bits{zeros} among its experts; llama.cpp has one type for all",
            where=f"{WHERE}: {what}",
            do=ONE_WIDTH if draft.options.widen else f"{ONE_WIDTH}; or {WIDEN}",
        )
    return bits


def _kind(grid: Grid) -> str | None:
    """The type that holds what is packed in a grid, or i-quants; None where none does."""
    return type_of(grid.bits, grid.codebook) if grid.codebook else NEAREST.get((grid.bits, grid.symmetric))


def _blocks(draft: Draft, writer: Writer, name: str, weight: PackedWeight, tensor: str, place: int = 0) -> memoryview:
    """The blocks of one matrix, the place-th of a tensor; of rounded ones the error is noted."""
    try:
        if weight.encoding.codes == "iq":
            return tensor_bytes(iq.joined(weight.codes, weight.scales))
        if draft.target.runs is None or ggml.holds(weight):
            return tensor_bytes(ggml.encode(weight))
        kind, blocks = refit(weight)
        error = relative_error(ggml.decode(kind, blocks, weight.inputs), weight.dequantize())
        if not math.isfinite(error):
            raise ValueError("a scale that float16 does not hold")
        writer.errors[tensor][place] = error
        return tensor_bytes(blocks)
    except ValueError as error:
        raise FormatError(str(error), where=f"{WHERE}: {name}", do=ANY_GRID) from None


def _contents(draft: Draft, config: Any, key: str, piece: Piece) -> tuple[str, Iterable[bytes | memoryview]]:
    """The type and the bytes of a tensor that is neither of a routed expert nor packed."""
    source = draft.source.source
    dtype = plain_header(source, key)[0]
    if piece.as_it_is and (dtype == "F32" or not piece.in_float32):
        return _float_type(dtype, key), plain_chunks(source, key)
    tensor = made(config, piece, plain_tensor(source, key))
    tensor = tensor.float() if piece.in_float32 else tensor
    return _float_type(dtype_name(tensor.dtype), key), [tensor_bytes(tensor)]


def _float_type(dtype: str, key: str) -> str:
    """The type of a floating-point tensor, which ggml calls as safetensors does; FormatError for others."""
    if dtype not in FLOATS:
        raise FormatError(f"a tensor of type {dtype}", where=f"{WHERE}: {key}", do=ANY_GRID)
    return dtype


def _packed_module(
    draft: Draft, writer: Writer, name: str, piece: Piece, weight: PackedWeight
) -> tuple[str, Iterable[bytes | memoryview]]:
    """The type and the bytes of a packed module outside of the experts."""
    wide = draft.loadable(name, weight)
    if piece.rows is not None:
        wide = wide.map(lambda part: part[piece.rows])
    return NEAREST[wide.bits, wide.zeros is None], [_blocks(draft, writer, name, wide, piece.name)]
