"""How far two checkpoints are from each other, file by file: keys of JSON, tensors, codes and their values."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moeq.artifacts.digests import digests_of_files
from moeq.artifacts.reading import read_json_file
from moeq.artifacts.tensor_files import stored_chunks, torch_dtype
from moeq.errors import ArtifactError, MoeqError
from moeq.exporters.packed_source import PackedSource
from moeq.exporters.readers import open_packed
from moeq.exporters.readers.foreign import packed_others
from moeq.models.source import ModelSource, TensorHeader, read_header
from moeq.progress import Reporter
from moeq.reproduction.result import FileDifference, MatrixDifference
from moeq.verification.reference import relative, values
from moeq_kernels.freed import return_memory
from moeq_kernels.packed import PackedWeight
from moeq_kernels.packing import unpack

TENSORS = ".safetensors"
ABSENT = object()


def file_differences(here: Path, again: Path, stated: Mapping[str, str], made: Iterable[str]) -> list[FileDifference]:
    """Files that are not the same in two checkpoints; stated: {file of the first: SHA-256}, made: files of the other.

    Digests of the second are taken of its bytes.
    """
    there = {name: again / name for name in made}
    digests = digests_of_files(there.values())
    found = []
    for name in sorted({*stated, *there}):
        if name not in there:
            found.append(FileDifference(file=name, what=("was not made again",)))
        elif name not in stated:
            found.append(FileDifference(file=name, what=("is there only when made again",)))
        elif digests[there[name]] != stated[name]:
            found.append(FileDifference(file=name, what=tuple(_within(here / name, again / name))))
    return found


def _within(here: Path, again: Path) -> list[str]:
    """What is different in a file."""
    sizes = here.stat().st_size, again.stat().st_size
    try:
        if here.suffix == TENSORS:
            return list(_tensors(read_header(here), read_header(again))) or ["headers differ"]
        if here.suffix == ".json":
            return list(_keys(read_json_file(here), read_json_file(again))) or ["other bytes of the same JSON"]
    except (MoeqError, ValueError):
        pass  # what cannot be read has bytes only
    return ["other bytes" if sizes[0] == sizes[1] else f"{sizes[0]} bytes, {sizes[1]} when made again"]


def _tensors(here: Mapping[str, TensorHeader], again: Mapping[str, TensorHeader]) -> Iterator[str]:
    """Tensors of a file that differ."""
    for name in sorted({*here, *again}):
        if name not in again or name not in here:
            yield f"{name} {'is not in the other' if name in here else 'is new'}"
        elif (here[name].dtype, here[name].shape) != (again[name].dtype, again[name].shape):
            yield f"{name} {_kind(here[name])}, {_kind(again[name])} when made again"
        elif any(one != two for one, two in zip_longest(stored_chunks(here[name]), stored_chunks(again[name]))):
            yield name


def _kind(header: TensorHeader) -> str:
    return f"{header.dtype} {list(header.shape)}"


def _keys(here: Any, again: Any) -> Iterator[str]:
    """Dotted keys at which two values of JSON differ, with both where they are short."""
    pairs = [("", here, again)]
    while pairs:
        key, one, two = pairs.pop()
        if isinstance(one, dict) and isinstance(two, dict):
            names = sorted({*one, *two}, reverse=True)
            pairs += [
                (f"{key}.{name}" if key else name, one.get(name, ABSENT), two.get(name, ABSENT)) for name in names
            ]
        elif isinstance(one, list) and isinstance(two, list) and len(one) == len(two):
            pairs += [(f"{key}[{at}]", *both) for at, both in reversed(list(enumerate(zip(one, two, strict=True))))]
        elif one is not two and (type(one) is not type(two) or one != two):
            yield f"{key} {_short(one)} -> {_short(two)}"


def _short(value: Any) -> str:
    text = "absent" if value is ABSENT else repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def matrix_differences(here: Path, again: Path, reporter: Reporter, trust: bool) -> list[MatrixDifference]:
    """Matrices and other tensors whose stored parts differ, those that are farthest first.

    Read expert by expert, never a layer at once. Raises MoeqError where one of the two cannot be read.
    """
    first, second = (open_packed(path, trust_remote_code=trust) for path in (here, again))
    if _sizes(first) != _sizes(second):
        raise ArtifactError("other layers or experts than in what was made again", where=str(here))
    found = [*_experts(first, second, reporter), *_others(first, second), *_plain(first, second)]
    return sorted(found, key=lambda one: -1.0 if one.relative is None else -one.relative)


def _sizes(packed: PackedSource) -> list[tuple[Any, ...]]:
    return [
        (layer.name, layer.num_experts, layer.hidden_size, layer.intermediate_size, layer.projections, layer.biased)
        for layer in packed.layers
    ]


def _experts(here: PackedSource, again: PackedSource, reporter: Reporter) -> Iterator[MatrixDifference]:
    with reporter.bar("comparing experts", len(here.layers)) as advance:
        for layer, its in zip(here.layers, again.layers, strict=True):
            for expert in range(layer.num_experts):
                one, two = here.expert(layer, expert), again.expert(its, expert)
                for kind, mine, other in (("", one[0], two[0]), (" bias", one[1], two[1])):
                    for projection, matrix in mine.items():
                        difference = _difference(
                            f"{layer.name}, expert {expert}, {projection}{kind}",
                            matrix,
                            other[projection],
                            layer=layer.name,
                            expert=expert,
                            projection=projection,
                        )
                        yield from difference
            return_memory()
            advance()


def _others(here: PackedSource, again: PackedSource) -> Iterator[MatrixDifference]:
    """Packed modules outside of the experts."""
    theirs = packed_others(again)
    for name, read in packed_others(here).items():
        if name in theirs:
            yield from _difference(name, read(), theirs[name]())


def _plain(here: PackedSource, again: PackedSource) -> Iterator[MatrixDifference]:
    """Tensors that are not packed; those that only one has are named with their file."""
    for key in here.rest():
        if key in again.source.tensors:
            yield from _difference(key, _tensor(here.source, key), _tensor(again.source, key))


def _tensor(source: ModelSource, key: str) -> Tensor:
    if source.read is not None:
        return source.read(key)
    header = source.tensors[key]
    try:
        dtype = torch_dtype(header.dtype)
    except StopIteration:
        raise ArtifactError(f"{key} is of type {header.dtype}, which is not compared", where=str(header.file)) from None
    data = bytearray(b"".join(stored_chunks(header)))
    flat = torch.frombuffer(data, dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
    return flat.view(dtype).reshape(header.shape)


def _difference(
    name: str, here: PackedWeight | Tensor, again: PackedWeight | Tensor, **place: Any
) -> Iterator[MatrixDifference]:
    """The difference of two matrices, where there is one."""
    if _same(here, again):
        return
    one, two = values(here), values(again)
    if one.shape != two.shape:
        yield MatrixDifference(name=name, what=f"{list(one.shape)}, {list(two.shape)} when made again", **place)
        return
    grids = _grid(here), _grid(again)
    what = None if grids[0] == grids[1] else f"{grids[0]}, {grids[1]} when made again"
    codes = None
    by_input = isinstance(here, PackedWeight) and (here.encoding.codes == "grid" or here.encoding.floats)
    if what is None and by_input and isinstance(here, PackedWeight) and isinstance(again, PackedWeight):
        differ = _codes(here) != _codes(again)
        codes = (int(differ.sum()), differ.numel())
    most = float((two.double() - one.double()).abs().max()) if one.numel() else 0.0
    yield MatrixDifference(name=name, what=what, codes=codes, max_abs=most, relative=relative(two, one), **place)


def _same(here: PackedWeight | Tensor, again: PackedWeight | Tensor) -> bool:
    """Whether two matrices are stored alike, bit by bit."""
    if isinstance(here, Tensor) or isinstance(again, Tensor):
        tensors = isinstance(here, Tensor) and isinstance(again, Tensor)
        return tensors and here.dtype == again.dtype and _bits(here, again)  # type: ignore[union-attr,arg-type]
    mine, theirs = here.parts(), again.parts()
    return (
        _grid(here) == _grid(again)
        and set(mine) == set(theirs)
        and all(_bits(mine[part], theirs[part]) for part in mine)
    )


def _bits(here: Tensor, again: Tensor) -> bool:
    flat = (part.contiguous().reshape(-1).view(torch.uint8) for part in (here, again))
    return here.shape == again.shape and torch.equal(*flat)


def _grid(matrix: PackedWeight | Tensor) -> str:
    """How a matrix is stored, in words."""
    if isinstance(matrix, Tensor):
        return str(matrix.dtype).removeprefix("torch.")
    count = "1 bit" if matrix.bits == 1 else f"{matrix.bits} bits"
    kinds = [name for name in ("symmetric", "nested") if getattr(matrix, name)]
    kinds += [f"{2**matrix.state_bits} states"] if matrix.state_bits else []
    return ", ".join([f"{count} in groups of {matrix.group_size}", *kinds, *filter(None, [matrix.codebook])])


def _codes(matrix: PackedWeight) -> Tensor:
    return unpack(matrix.codes, matrix.bits, matrix.inputs)
