"""Safetensors files: copied without being loaded, byte for byte what writing them would give."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import pytest
import torch
from cases import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from moeq.artifacts.files import CHUNK_BYTES
from moeq.artifacts.tensor_files import TensorFile, stored_chunks, write_in_chunks, write_tensors
from moeq.errors import ArtifactError
from moeq.models.source import TensorHeader, read_header

METADATA = {"format": "pt"}


def copy_tensors(path: Path, tensors: dict[str, TensorHeader], metadata: dict[str, str] | None = None) -> None:
    header = {name: (tensor.dtype, tensor.shape, tensor.bytes) for name, tensor in tensors.items()}
    write_in_chunks(path, header, lambda name: stored_chunks(tensors[name]), metadata)


def some_tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    types = (torch.float64, torch.bfloat16, torch.float32, torch.int64, torch.bool, torch.float8_e4m3fn, torch.uint8)
    made = {
        f"{index}.{dtype}": torch.randint(0, 2, (3 + index, 5), generator=generator).to(dtype)
        for index, dtype in enumerate(types)
    }
    return made | {"empty": torch.zeros(0, 4), "scalar": torch.tensor(2.5), "a": torch.randn(7, generator=generator)}


def test_copies_are_the_files_that_writing_gives(tmp_path: Path) -> None:
    tensors = some_tensors()
    write_tensors(tmp_path / "wanted", tensors, METADATA)
    names = sorted(tensors)
    write_tensors(tmp_path / "one", {name: tensors[name] for name in names[::2]})
    write_tensors(tmp_path / "two", {name: tensors[name] for name in names[1::2]}, {"other": "metadata"})
    copy_tensors(tmp_path / "found", read_header(tmp_path / "one") | read_header(tmp_path / "two"), METADATA)
    assert (tmp_path / "found").read_bytes() == (tmp_path / "wanted").read_bytes()


def test_a_copy_takes_less_memory_than_a_tensor(tmp_path: Path) -> None:
    big = torch.arange(8 * CHUNK_BYTES, dtype=torch.int32)
    write_tensors(tmp_path / "source", {"big": big})
    tracemalloc.start()
    try:
        copy_tensors(tmp_path / "found", read_header(tmp_path / "source"))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 4 * CHUNK_BYTES
    assert (tmp_path / "found").read_bytes() == (tmp_path / "source").read_bytes()


def test_a_source_that_was_cut_off_is_named_and_nothing_is_left(tmp_path: Path) -> None:
    write_tensors(tmp_path / "source", {"a": torch.arange(100)})
    headers = read_header(tmp_path / "source")
    (tmp_path / "source").write_bytes((tmp_path / "source").read_bytes()[:-8])
    with pytest.raises(ArtifactError, match="source: cut off"):
        copy_tensors(tmp_path / "found", headers)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


TYPES = (torch.int64, torch.int32, torch.float16, torch.bfloat16, torch.uint8)
SHAPES = st.lists(st.integers(0, 5), max_size=3).map(tuple)


@settings(max_examples=examples(100), deadline=None)
@given(st.lists(st.tuples(st.sampled_from(TYPES), SHAPES), max_size=12))
def test_tensors_of_any_size_are_written_as_they_come_and_lie_aligned(
    tmp_path_factory: pytest.TempPathFactory, kinds: list[tuple[torch.dtype, tuple[int, ...]]]
) -> None:
    path = tmp_path_factory.mktemp("stream") / "model.safetensors"
    tensors = {f"layer.{place}.α": torch.randint(0, 100, shape).to(kind) for place, (kind, shape) in enumerate(kinds)}
    file = TensorFile(path, [*tensors, "one.that.did.not.come"], {"format": "pt"})
    for name, tensor in tensors.items():
        file.add(name, tensor)
        tensor_was = tensor.clone()
        tensor.zero_()
        tensors[name] = tensor_was
    file.finish()
    found = load_file(path)
    assert found.keys() == tensors.keys()
    assert all(
        torch.equal(found[name], tensor) and found[name].dtype == tensor.dtype for name, tensor in tensors.items()
    )
    headers = read_header(path)
    assert all(headers[name].offset % tensor.element_size() == 0 for name, tensor in tensors.items())


def test_a_header_that_outgrows_its_room_is_an_error(tmp_path: Path) -> None:
    file = TensorFile(tmp_path / "model.safetensors", ["a"], {})
    for place in range(10):
        file.add(f"a longer name than was given {place}", torch.zeros(4))
    with pytest.raises(ValueError, match="header of"):
        file.finish()
    file.close()
