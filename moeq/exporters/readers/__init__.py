"""Packed checkpoints, whoever wrote them: `open_packed` tells the format from config.json and the headers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from moeq.errors import ArtifactError
from moeq.exporters.gguf_families import FILE as GGUF_FILE
from moeq.exporters.native_reader import NativeReader
from moeq.exporters.packed_source import PackedSource
from moeq.exporters.readers.compressed import CompressedTensors
from moeq.exporters.readers.foreign import Foreign, open_foreign
from moeq.exporters.readers.gguf import open_gguf
from moeq.exporters.readers.gptq import AutoRound, Gptq
from moeq.exporters.readers.layout import Layout
from moeq.models.source import INDEX, SINGLE, ModelSource, open_source
from moeq.models.weights import DEQUANTIZED, quantization_of
from moeq.numerics.widths import METHOD

PLAIN = "dequantized"
LAYOUTS: dict[str, Callable[[Mapping[str, Any]], Layout]] = {
    "gptq": Gptq,
    "auto-round": AutoRound,
    "intel/auto-round": AutoRound,
    "compressed-tensors": CompressedTensors,
}
WORKS = "moeq reads its own checkpoints, gptq, auto-round, compressed-tensors (pack-quantized) and plain ones"


def format_of(source: ModelSource) -> str:
    """The format of a checkpoint as its configuration names it: `moeq`, `dequantized`, or that of another tool."""
    return str(quantization_of(source.config).get("quant_method", PLAIN))


def open_packed(path: Path, *, trust_remote_code: bool = False, as_values: bool = False) -> PackedSource:
    """Open a packed checkpoint of moeq or of another tool, or a plain one, to be read expert by expert.

    as_values: see `Foreign`. Raises ArtifactError saying what was found where moeq cannot read it, ModelError for a
    directory that is damaged or of an unknown family.
    """
    if path.is_file():
        raise ArtifactError(f"a file ({path.suffix or 'no suffix'})", where=str(path), do=WORKS)
    if holds_gguf(path):
        if not as_values:
            do = "convert the checkpoint that it was made of"
            raise ArtifactError("GGUF is read by `moeq verify` only", where=str(path / GGUF_FILE), do=do)
        return open_gguf(path, trust_remote_code)
    source = open_source(str(path))
    if format_of(source) == METHOD:
        return NativeReader(path, trust_remote_code)
    return open_other(source, trust_remote_code=trust_remote_code, as_values=as_values)


def holds_gguf(path: Path) -> bool:
    """Whether a directory's weights are in model.gguf."""
    return (path / GGUF_FILE).is_file() and not (path / SINGLE).is_file() and not (path / INDEX).is_file()


def open_other(source: ModelSource, *, trust_remote_code: bool = False, as_values: bool = False) -> Foreign:
    """As `open_packed`, for a checkpoint that is not in moeq's own format."""
    declared = quantization_of(source.config)
    if not declared:
        return open_foreign(source, None, trust_remote_code, as_values)
    method = format_of(source)
    where = str(source.path / "config.json")
    if method in DEQUANTIZED:
        raise ArtifactError(f"{method} weights, no integer codes", where=where, do="give it to moeq as a model instead")
    if method not in LAYOUTS:
        raise ArtifactError(f"quant_method {method} is not supported", where=where, do=WORKS)
    try:
        layout = LAYOUTS[method](declared)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ArtifactError(f"{method} with {_text(error)} is not supported", where=where, do=WORKS) from None
    return open_foreign(source, layout, trust_remote_code, as_values)


def _text(error: Exception) -> str:
    return str(error) if isinstance(error, ValueError) else f"a configuration that it cannot read ({error!r})"
