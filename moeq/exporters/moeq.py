"""moeq: the native format, any mix of widths, which a run writes (native_writer.py) and `import moeq` loads."""

from __future__ import annotations

from moeq.artifacts.targets import Target
from moeq.exporters.exporter import TRANSFORMERS, Exporter, Loader, later
from moeq_kernels.widths import FULL

EXPORTER = Exporter(
    name="moeq",
    label="moeq",
    help="the native format: any mix of widths, placement, and every replica that was asked for",
    write=None,
    runtime="transformers with `import moeq`",
    targets=(
        Target(
            name="native",
            widths=(1, 2, 3, 4, 8, FULL),
            reads="the native format: any mix",
            short_groups=True,
            nested=True,
            proof="tests/runtime/test_every_kind.py",
        ),
    ),
    opened=later("moeq.exporters.native_reader:opened"),
    loaders=(Loader(name="native", packages={**TRANSFORMERS.packages, "moeq": "pip install moeq"}),),
)
