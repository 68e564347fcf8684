"""An integer forward as files, and back: manifest.json, weights.safetensors, vectors.safetensors."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moeq.artifacts.digests import digest_of_file
from moeq.artifacts.files import building
from moeq.artifacts.reading import TensorHeader, inside, safetensors_header
from moeq.artifacts.stage import FileStamp, ModelStamp
from moeq.artifacts.tensor_files import dtype_name, tensor_bytes, torch_dtype, write_tensors
from moeq.errors import ArtifactError, InternalError
from moeq.integers.artifacts.integer import (
    KINDS,
    REMEDY,
    VECTORS,
    WEIGHTS,
    IntegerManifest,
    StoredTensor,
    StoredValue,
    Value,
    read_manifest,
    write_manifest,
)
from moeq.integers.forward.program import Program
from moeq_kernels.widths import MAX_SHIFT

ROLE_TYPES = {"weight": "I8", "table": "I8", "shift": "U8"}  # of constants; others are I32, wider ones I64


def write(
    folder: Path, program: Program, values: dict[str, Tensor], settings: dict[str, Any], model: ModelStamp | None
) -> None:
    """Write a program and the values of a run of it, whole or not at all.

    Raises InternalError for a value that does not fit into the register that the program states.
    """
    with building(folder) as partial:
        constants = {name: _narrow(tensor, name, _type_of(name, tensor)) for name, tensor in program.constants.items()}
        for name, tensor in values.items():
            _check_width(name, tensor, program.values[name])
        vectors = {name: _narrow(tensor, name, program.values[name].dtype) for name, tensor in values.items()}
        write_tensors(partial / WEIGHTS, constants)
        write_tensors(partial / VECTORS, vectors)
        files = {
            name: FileStamp(bytes=(partial / name).stat().st_size, sha256=digest_of_file(partial / name, cached=True))
            for name in (WEIGHTS, VECTORS)
        }
        manifest = IntegerManifest(
            model=model,
            settings=settings,
            image_shape=program.image_shape,
            vectors=len(values["pixels"]),
            operations=program.operations,
            tensors=_stored_tensors(program, constants),
            values=_stored_values(program, vectors),
            files=files,
        )
        write_manifest(partial, manifest)


def _type_of(name: str, tensor: Tensor) -> str:
    role = name.rsplit(".", 1)[-1].removeprefix("up_").removeprefix("down_")
    narrow = ROLE_TYPES.get(role, "I32")
    return narrow if int(tensor.abs().max()) < 2**31 else "I64"


def _narrow(tensor: Tensor, name: str, dtype: str) -> Tensor:
    made = tensor.to(torch_dtype(dtype)).contiguous()
    if not torch.equal(made.to(torch.int64), tensor):
        raise InternalError(f"{name} does not fit into {dtype}")
    return made


def _check_width(name: str, tensor: Tensor, held: Value) -> None:
    low, high = held.ends
    if int(tensor.min()) < low or int(tensor.max()) > high:
        raise InternalError(f"{name} leaves its {held.bits} bits: {int(tensor.min())} to {int(tensor.max())}")


def _entry(file: str, name: str, tensor: Tensor, layout: str, front: int = 0) -> dict[str, Any]:
    """What the manifest says of a tensor; front: axes that its shape leaves out."""
    sha256 = hashlib.sha256(tensor_bytes(tensor)).hexdigest()
    shape, dtype = tuple(tensor.shape[front:]), dtype_name(tensor.dtype)
    return {"name": name, "file": file, "key": name, "dtype": dtype, "shape": shape, "layout": layout, "sha256": sha256}


def _stored_tensors(program: Program, constants: dict[str, Tensor]) -> tuple[StoredTensor, ...]:
    layouts = {
        name: KINDS[operation.kind].tensors[role]
        for operation in program.operations
        for role, name in operation.tensors.items()
    }
    return tuple(StoredTensor(**_entry(WEIGHTS, name, constants[name], layout)) for name, layout in layouts.items())


def _stored_values(program: Program, vectors: dict[str, Tensor]) -> tuple[StoredValue, ...]:
    layouts = {"pixels": KINDS[program.operations[0].kind].inputs["x"]} | {
        name: KINDS[operation.kind].outputs[role]
        for operation in program.operations
        for role, name in operation.outputs.items()
    }
    return tuple(
        StoredValue(**_entry(VECTORS, name, vectors[name], layout, 1), **program.values[name].model_dump())
        for name, layout in layouts.items()
    )


def read(folder: Path) -> tuple[IntegerManifest, Program, dict[str, Tensor]]:
    """The manifest, the program and the vectors of a folder, int64.

    Everything is checked against the manifest: ArtifactError at the first file or tensor that is missing, of another
    shape or type, or changed by a byte.
    """
    manifest = read_manifest(folder)
    headers: dict[str, dict[str, TensorHeader]] = {}
    for name in sorted({stored.file for stored in (*manifest.tensors, *manifest.values)}):
        try:
            headers[name] = safetensors_header(inside(folder, name))[0]
        except FileNotFoundError:
            raise ArtifactError(f"file {name} is missing", where=str(folder), do=REMEDY) from None
        except (OSError, ValueError) as error:
            raise ArtifactError(f"not a safetensors file ({error})", where=str(folder / name), do=REMEDY) from None
    constants = {stored.name: _read(folder, stored, headers, ()) for stored in manifest.tensors}
    values = {stored.name: _read(folder, stored, headers, (manifest.vectors,)) for stored in manifest.values}
    unstamped = next((name for name in headers if name not in manifest.files), None)
    if unstamped is not None:
        raise ArtifactError(f"{unstamped} has no SHA-256 in the manifest", where=str(folder), do=REMEDY)
    for name, stamp in manifest.files.items():
        if not (folder / name).is_file() or digest_of_file(folder / name) != stamp.sha256:
            raise ArtifactError("its SHA-256 differs from the manifest", where=str(folder / name), do=REMEDY)
    for name, tensor in constants.items():
        if name.endswith("shift") and not bool(((tensor >= 0) & (tensor <= MAX_SHIFT)).all()):
            raise ArtifactError(f"{name} holds a shift that cannot be", where=str(folder), do=REMEDY)
    program = Program(
        operations=manifest.operations,
        constants=constants,
        values={value.name: Value(**value.model_dump(include=set(Value.model_fields))) for value in manifest.values},
        reals={},
        image_shape=manifest.image_shape,
    )
    return manifest, program, values


def _read(
    folder: Path, stored: StoredTensor, headers: dict[str, dict[str, TensorHeader]], front: tuple[int, ...]
) -> Tensor:
    where = f"{folder / stored.file}: {stored.key}"
    header = headers[stored.file].get(stored.key)
    if header is None:
        raise ArtifactError("tensor is missing", where=where, do=REMEDY)
    shape = front + stored.shape
    if (header.dtype, header.shape) != (stored.dtype, shape):
        what = f"tensor is {header.dtype} {list(header.shape)}, the manifest states {stored.dtype} {list(shape)}"
        raise ArtifactError(what, where=where, do=REMEDY)
    with header.file.open("rb") as stream:
        stream.seek(header.offset)
        data = bytearray(stream.read(header.bytes))
    if hashlib.sha256(data).hexdigest() != stored.sha256:
        raise ArtifactError("its SHA-256 differs from the manifest", where=where, do=REMEDY)
    if not data:
        return torch.empty(header.shape, dtype=torch.int64)
    return torch.frombuffer(data, dtype=torch_dtype(stored.dtype)).reshape(header.shape).to(torch.int64)
