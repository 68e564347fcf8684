"""For transformers with compressed-tensors (pack-quantized): one symmetric width and group size for all experts.

transformers takes one scheme for all experts whatever config.json says of each, and ignores zero points: other mixes
would load without an error and compute something else, so they are refused. With options.widen all codes go into the
least common width. vLLM reads the format too, and takes a scheme a layer.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moeq.artifacts.targets import Target
from moeq.exporters.exporter import TRANSFORMERS, Exporter
from moeq.numerics.widths import FULL

if TYPE_CHECKING:
    from moeq.exporters.foreign import WriteOptions
    from moeq.exporters.packed_source import PackedSource
    from moeq.exporters.readers.compressed import CompressedTensors

VERSION = "0.20.0"


def write(source: PackedSource, directory: Path, options: WriteOptions) -> None:
    """Build the checkpoint; PlanError for what transformers would not load as it is meant."""
    from moeq.exporters.compressed_writer import write_compressed

    write_compressed(EXPORTER, source, directory, options)


def layout(declared: Mapping[str, Any]) -> CompressedTensors:
    """How the matrices lie."""
    from moeq.exporters.readers.compressed import CompressedTensors

    return CompressedTensors(declared)


EXPORTER = Exporter(
    name="compressed-tensors",
    label="compressed-tensors (pack-quantized)",
    help="one symmetric width for all experts, for transformers itself and vLLM",
    write=write,
    runtime=f"transformers with compressed-tensors {VERSION}",
    snippet="""from transformers import AutoModelForCausalLM  # pip install compressed-tensors
model = AutoModelForCausalLM.from_pretrained("THIS_DIRECTORY")""",
    targets=(
        Target(
            name="transformers",
            widths=(2, 3, 4, 5, 6, 7, 8),
            granularity="model",
            symmetric_only=True,
            reads="compressed-tensors without a peer's package: one scheme for all experts, zero points are ignored",
            proof=f"tests/exporters/test_peers.py, compressed-tensors {VERSION}",
        ),
        Target(
            name="vllm",
            widths=(2, 4, 8, FULL),
            granularity="layer",
            reads="the scheme of expert 0 is taken for its whole fused layer",
            multiple=32,
            proof="read in its source, not loaded",
        ),
    ),
    layout=layout,
    loaders=(TRANSFORMERS,),
    needs={"compressed_tensors": "pip install compressed-tensors"},
)
