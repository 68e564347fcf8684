"""Models in object stores: small files are copied, weights stay there and are read by the ranges of their tensors."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import safe_open
from torch import Tensor

from moeq.artifacts.files import digest_of, make_directory
from moeq.artifacts.reading import TensorHeader
from moeq.artifacts.remote import RemoteFile, listed
from moeq.artifacts.tensor_files import torch_dtype
from moeq.errors import ModelError
from moeq_kernels import caches

SMALL_BYTES = 512 << 20  # the largest file that is copied
HEADERS_BYTES = 2 << 20  # of blocks that are kept where headers alone are read; a request asks for a sixteenth


def files_of(url: str, wanted: Any, folders: Iterable[str] = ("",)) -> dict[str, RemoteFile]:
    """The files right below an address, or in these folders there, whose names match `wanted`, by name; ModelError
    where there are none."""
    found = {file.name: file for file in listed(url.rstrip("/"), folders=folders) if wanted.fullmatch(file.name)}
    if not found:
        raise ModelError("no files of a model", where=url, do="give the folder that holds config.json")
    return found


def copied(url: str, files: Mapping[str, RemoteFile]) -> Path:
    """A folder of this machine with copies of small files, kept for the next time; ModelError for one too large."""
    stamp = digest_of([url, [[name, file.size, file.version] for name, file in sorted(files.items())]])
    folder = caches.folder() / "remote-models" / stamp[:32]
    if folder.is_dir() and all(file.version for file in files.values()):
        return folder
    make_directory(folder.parent)
    partial = Path(tempfile.mkdtemp(prefix=".", dir=folder.parent))
    try:
        for name, file in files.items():
            if file.size > SMALL_BYTES:
                what = f"{file.size} bytes, where at most {SMALL_BYTES} of a file beside the weights are read"
                raise ModelError(what, where=str(file), do="remove it, or give another folder")
            (partial / name).write_bytes(file.store.read(file, 0, file.size))
        shutil.rmtree(folder, ignore_errors=True)
        os.replace(partial, folder)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    return folder


def heads(url: str, names: Iterable[str]) -> dict[str, RemoteFile]:
    """Those of some files below an address that are there, to read their headers in this order: a little of each is
    fetched."""
    names = list(names)
    found = {file.name: file for file in listed(url, HEADERS_BYTES, folders_of(names))}
    there = {name: found[name] for name in names if name in found}
    if there:
        next(iter(there.values())).store.follow((file, 0, 1) for file in there.values())
    return there


def folders_of(names: Iterable[str]) -> list[str]:
    """The folders that files lie in, as `listed` takes them."""
    return sorted({name[: name.rfind("/") + 1] for name in names})


def as_path(file: RemoteFile) -> Path:
    """A remote file where a path is asked for that is only opened, and asked for its size and name."""
    return cast(Path, file)


def remote_of(header: TensorHeader) -> RemoteFile | None:
    """The remote file that a tensor lies in; None for one of this machine."""
    file: Any = header.file
    return file if isinstance(file, RemoteFile) else None


def prefetch(headers: Iterable[TensorHeader]) -> None:
    """Begin to fetch tensors that lie in remote files and will be read in this order."""
    there = [(file, header) for header in headers if (file := remote_of(header)) is not None]
    for store in dict.fromkeys(file.store for file, _ in there):
        store.follow((file, at.offset, at.offset + at.bytes) for file, at in there if file.store is store)


class RemoteTensor:
    """A tensor of a remote file that is read when it is indexed, as safetensors' own slices are; of rows, these."""

    def __init__(self, header: TensorHeader) -> None:
        self._header = header

    def get_shape(self) -> list[int]:
        return list(self._header.shape)

    def get_dtype(self) -> str:
        return self._header.dtype

    def __getitem__(self, index: Any) -> Tensor:
        header, file = self._header, remote_of(self._header)
        assert file is not None
        start, count, rows = header.offset, header.bytes, header.shape
        one = isinstance(index, slice) and index.step in (None, 1) and len(rows) > 0 and rows[0] > 0
        if one and index != slice(None):
            first, last, _ = index.indices(rows[0])
            size = header.bytes // rows[0]
            start, count, rows = start + first * size, max(0, last - first) * size, (max(0, last - first), *rows[1:])
            index = ...
        dtype = torch_dtype(header.dtype)
        if not count:
            return torch.empty(rows, dtype=dtype)[index]
        data = file.store.read(file, start, start + count)
        return torch.frombuffer(data, dtype=dtype).view(rows)[index]  # type: ignore[no-any-return]


def tensor_of(header: TensorHeader, key: str) -> Tensor:
    """A whole tensor of a safetensors file, here or in an object store."""
    if remote_of(header) is not None:
        return RemoteTensor(header)[...]
    with safe_open(header.file, "pt") as handle:
        return handle.get_tensor(key)  # type: ignore[no-any-return]
