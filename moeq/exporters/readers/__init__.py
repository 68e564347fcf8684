"""Packed checkpoints, whoever wrote them: `open_packed` tells the format from config.json and the headers."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from moeq.errors import ArtifactError
from moeq.exporters.exporter import Exporter
from moeq.exporters.readers.blamed import BlamedLayout
from moeq.models.declared import DEQUANTIZED, is_dequantized, is_native, quantization_of
from moeq.models.source import INDEX, SINGLE, ModelSource, open_source
from moeq.registry import EXPORTERS
from moeq.runtimes import of_method

if TYPE_CHECKING:  # torch is imported where something is opened, not where its format is told
    from moeq.exporters.packed_source import PackedSource
    from moeq.exporters.readers.foreign import Foreign
    from moeq.exporters.readers.layout import Layout

PLAIN = "dequantized"


def works() -> str:
    """What can be read, for a message."""
    labels = ", ".join(exporter.label for exporter in EXPORTERS if exporter.layout is not None)
    return f"moeq reads its own checkpoints, {labels} and plain ones"


def format_of(source: ModelSource) -> str:
    """The format of a checkpoint as its configuration names it: `moeq`, `dequantized`, or that of another tool."""
    return str(quantization_of(source.config).get("quant_method", PLAIN))


def file_format(path: Path) -> Exporter | None:
    """The format of a directory whose weights are in a file of its own, not in safetensors."""
    if (path / SINGLE).is_file() or (path / INDEX).is_file():
        return None
    return next((each for each in EXPORTERS if each.file is not None and (path / each.file).is_file()), None)


def open_packed(path: Path, *, trust_remote_code: bool = False, as_values: bool = False) -> PackedSource:
    """Open a packed checkpoint of moeq or of another tool, or a plain one, to be read expert by expert.

    as_values: see `Foreign`. Raises ArtifactError saying what was found where moeq cannot read it, ModelError for a
    directory that is damaged or of an unknown family.
    """
    if path.is_file():
        raise ArtifactError(f"a file ({path.suffix or 'no suffix'})", where=str(path), do=works())
    exporter = file_format(path)
    if exporter is None:
        source = open_source(str(path))
        exporter = of_method(format_of(source))
        if exporter is None or exporter.opened is None:
            return open_other(source, trust_remote_code=trust_remote_code, as_values=as_values)
    assert exporter.opened is not None
    return exporter.opened(path, trust_remote_code, as_values)


def open_other(source: ModelSource, *, trust_remote_code: bool = False, as_values: bool = False) -> Foreign:
    """As `open_packed`, for a checkpoint that is not in moeq's own format."""
    from moeq.exporters.readers.foreign import open_foreign

    return open_foreign(source, layout_of(source), trust_remote_code, as_values)


def layout_of(source: ModelSource) -> Layout | None:
    """How the packed matrices of a checkpoint of another tool lie, as config.json declares it; None where it declares
    none.

    Raises ArtifactError for what moeq does not read.
    """
    declared = quantization_of(source.config)
    if not declared:
        return None
    if is_native(source.config):
        what = "packed by moeq, and without placement.json, as save_pretrained of a loaded checkpoint leaves it"
        raise ArtifactError(what, where=str(source.path), do="give the checkpoint that moeq wrote; this one only loads")
    method = format_of(source)
    where = str(source.path / "config.json")
    if method in DEQUANTIZED:
        raise ArtifactError(f"{method} weights, no integer codes", where=where, do="give it to moeq as a model instead")
    exporter = of_method(method)
    if exporter is None or exporter.layout is None:
        raise ArtifactError(f"quant_method {method} is not supported", where=where, do=works())
    with EXPORTERS.blaming(exporter.name, lambda: f"layout() of {where}"):
        try:
            layout: Layout = exporter.layout(declared)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ArtifactError(f"{method} with {_text(error)} is not supported", where=where, do=works()) from None
    return layout if EXPORTERS.origin(exporter.name) is None else BlamedLayout(exporter, layout)


def check_read(source: ModelSource) -> None:
    """ArtifactError for a checkpoint that another tool quantized, in a format of which moeq reads nothing, and for one
    of moeq's that was saved again, without what says where experts lie."""
    if is_native(source.config) or (not is_dequantized(source) and of_method(format_of(source)) is None):
        layout_of(source)


def _text(error: Exception) -> str:
    return str(error) if isinstance(error, ValueError) else f"a configuration that it cannot read ({error!r})"
