"""Packed checkpoints, whoever wrote them: `open_packed` tells the format from config.json and the headers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from moeq.errors import ArtifactError
from moeq.exporters.readers.compressed import CompressedTensors
from moeq.exporters.readers.foreign import Foreign, open_foreign
from moeq.exporters.readers.gptq import AutoRound, Gptq
from moeq.exporters.readers.layout import Layout
from moeq.models.source import ModelSource, open_source
from moeq.models.weights import DEQUANTIZED, quantization_of

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
    return str((quantization_of(source.config) or {}).get("quant_method", PLAIN))


def open_foreign_checkpoint(
    path: Path, *, trust_remote_code: bool = False, as_values: bool = False, source: ModelSource | None = None
) -> Foreign:
    """Open a checkpoint of another tool, or a plain one, as a PackedSource.

    as_values: see `Foreign`. Raises ArtifactError saying what was found where moeq cannot read it, ModelError for a
    directory that is damaged or of an unknown family.
    """
    if path.is_file():
        raise ArtifactError(f"a file ({path.suffix or 'no suffix'})", where=str(path), do=WORKS)
    source = source or open_source(str(path))
    declared = quantization_of(source.config)
    if declared is None:
        return open_foreign(source, None, trust_remote_code, as_values)
    method = format_of(source)
    where = str(path / "config.json")
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
