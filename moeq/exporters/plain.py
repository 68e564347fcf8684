"""What every checkpoint directory holds beside its packed tensors: plain tensors in shards, and an index."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path

from moeq.artifacts.files import write_json
from moeq.artifacts.tensor_files import write_in_chunks
from moeq.models.source import INDEX, ModelSource, read_header
from moeq.models.weights import plain_chunks, plain_header

METADATA = {"format": "pt"}  # transformers refuses safetensors without it


def write_plain(
    source: ModelSource,
    keys: Iterable[str],
    directory: Path,
    max_shard_bytes: int,
    names: Mapping[str, str] | None = None,
) -> dict[str, str]:
    """Copy tensors into shards, a few megabytes at a time, in the order of their keys; returns {name: file}.

    Those of a checkpoint that is dequantized while loading are written dequantized. names: what a key is called in the
    copy, where it is called otherwise.
    """
    where: dict[str, str] = {}
    new = names or {}
    for name, stored in shards(source, keys, max_shard_bytes).items():
        old = {new.get(key, key): key for key in stored}
        headers = {called: plain_header(source, key) for called, key in old.items()}
        write_in_chunks(directory / name, headers, partial(_chunks_of, source, old), METADATA)
        where |= dict.fromkeys(old, name)
    return where


def shards(source: ModelSource, keys: Iterable[str], max_shard_bytes: int) -> dict[str, list[str]]:
    """{file: keys} as `write_plain` fills them; one file of no tensors where there are none."""
    files: list[list[str]] = [[]]
    size = 0
    for key in sorted(keys):
        tensor_bytes = plain_header(source, key)[2]
        if files[-1] and size + tensor_bytes > max_shard_bytes:
            files.append([])
            size = 0
        files[-1].append(key)
        size += tensor_bytes
    return {f"model-{number:05d}-of-{len(files):05d}.safetensors": file for number, file in enumerate(files, 1)}


def _chunks_of(source: ModelSource, old: Mapping[str, str], name: str) -> Iterable[bytes]:
    return plain_chunks(source, old[name])


def write_index(directory: Path, where: Mapping[str, str]) -> None:
    """The index of a checkpoint whose tensors {key: file} lie in `directory`."""
    headers = {name: read_header(directory / name) for name in set(where.values())}
    total = sum(headers[name][key].bytes for key, name in where.items())
    write_json(directory / INDEX, {"metadata": {"total_size": total}, "weight_map": dict(sorted(where.items()))})
