"""llama.cpp's importance matrix: what its own quantizer weighs errors by, the mean square of every input of a matrix.

A GGUF file of float32 tensors without an architecture: of every matrix NAME the sums of squares `NAME.in_sum2` [E, K]
over the tokens that it was given, and their numbers `NAME.counts` [E, 1], E being 1 outside of the stacks of experts.
The quantizer divides the two, and takes ones for an expert without a token. Source: tools/imatrix/imatrix.cpp and
common/imatrix-loader.cpp of llama.cpp.

Letters: E experts, K inputs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moeq.artifacts.files import read_back, write_atomically
from moeq.artifacts.tensor_files import tensor_bytes
from moeq.exporters.gguf_families import HEAD as FILE_HEAD
from moeq.exporters.gguf_families import family_of, pieces
from moeq.exporters.gguf_parameters import Value
from moeq.exporters.gguf_writer import Entry, Writer, package
from moeq.models.non_experts import EMBEDDINGS, HEAD, OtherModule

SUMS, COUNTS = "in_sum2", "counts"


@dataclass(frozen=True, kw_only=True)
class Squares:
    """Sums of squares [E, K] over the rows that a matrix was given, and their numbers [E]."""

    sums: Tensor
    counts: Tensor


def check(config: Any) -> None:
    """RecipeError without the gguf package, FormatError for a family whose names in GGUF are not known."""
    package()
    family_of(config)


def matrix_of(config: Any, module: OtherModule) -> str | None:
    """What GGUF calls the matrix of a linear outside of the experts.

    None for one that is no matrix of the file, or one with other inputs: a head that is the embeddings', embeddings,
    deepseek's kv_b_proj, which llama.cpp splits and multiplies by something else.
    """
    family = family_of(config)
    if module.kind == EMBEDDINGS:
        return None
    if module.kind == HEAD and module.tied is not None:
        return FILE_HEAD if family.own_head else None
    found = pieces(config, family, module.weight, (module.rows, module.inputs), tied=False)
    return found[0].name if len(found) == 1 else None


def write(
    path: Path, matrices: Mapping[str, Squares], *, datasets: Iterable[str], chunks: int, chunk_size: int
) -> None:
    """Write the file; matrices: by their names in GGUF; chunks: texts that were read, of so many tokens at most.

    Raises StorageError where it cannot be written.
    """
    tensors: dict[str, Tensor] = {}
    for name in sorted(matrices):
        tensors[f"{name}.{SUMS}"] = matrices[name].sums.float().cpu()
        tensors[f"{name}.{COUNTS}"] = matrices[name].counts.float().cpu().unsqueeze(1)
    fields: dict[str, Value] = {
        "general.type": "imatrix",
        "imatrix.datasets": list(datasets),
        "imatrix.chunk_count": chunks,
        "imatrix.chunk_size": chunk_size,
    }
    write_atomically(path, lambda partial: _write(partial, fields, tensors))


def _write(path: Path, fields: dict[str, Value], tensors: Mapping[str, Tensor]) -> None:
    with path.open("wb") as stream:
        writer = Writer(
            gguf=package(),
            arch=None,
            stream=stream,
            fields=fields,
            entries={name: Entry(shape=tuple(tensor.shape)) for name, tensor in tensors.items()},
            scratch=path.with_name(f"{path.name}.header"),
        )
        writer.begin()
        for name, tensor in tensors.items():
            assert tensor.dtype == torch.float32
            writer.add(name, "F32", [tensor_bytes(tensor)])
        writer.finish()
    read_back(path, writer.start, writer.crc)
