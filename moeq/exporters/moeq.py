"""moeq: the native format, any mix of widths, which `import moeq` loads.

A run writes it (native_writer.py); of another tool's checkpoint it is made by native_conversion.py.
"""

from __future__ import annotations

from moeq.artifacts.targets import Target
from moeq.exporters.exporter import TRANSFORMERS, Exporter, Loader, later
from moeq_kernels.widths import DROPPED, WIDTHS

EXPORTER = Exporter(
    name="moeq",
    label="moeq",
    help="the native format: any mix of widths, placement, and every replica that was asked for",
    write=later("moeq.exporters.native_conversion:write"),
    runtime="transformers with `import moeq`",
    snippet="""import moeq  # registers the format with transformers
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained("THIS_DIRECTORY")""",
    targets=(
        Target(
            name="native",
            widths=(DROPPED, *WIDTHS),
            reads="the native format: any mix",
            short_groups=True,
            nested=True,
            codes=("grid", "trellis", "exl3", "nvfp4", "mxfp4", "iq"),
            proof="tests/runtime/test_every_kind.py",
        ),
    ),
    opened=later("moeq.exporters.native_reader:opened"),
    loaders=(Loader(name="native", packages={**TRANSFORMERS.packages, "moeq": "pip install moeq"}),),
)
