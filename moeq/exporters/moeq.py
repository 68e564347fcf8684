"""moeq: the native format, any mix of widths, which a run writes (native_writer.py) and `import moeq` loads."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from moeq.artifacts.targets import Target
from moeq.exporters.exporter import TRANSFORMERS, Exporter, Loader
from moeq.numerics.widths import FULL

if TYPE_CHECKING:
    from moeq.exporters.native_reader import NativeReader


def opened(path: Path, trust_remote_code: bool, as_values: bool) -> NativeReader:
    """The experts as placement.json has them."""
    from moeq.exporters.native_reader import NativeReader

    return NativeReader(path, trust_remote_code)


EXPORTER = Exporter(
    name="moeq",
    label="moeq",
    help="the native format: any mix of widths, placement, and every replica that was asked for",
    write=None,
    runtime="transformers with `import moeq`",
    targets=(
        Target(
            name="moeq",
            widths=(1, 2, 3, 4, 8, FULL),
            reads="the native format: any mix",
            short_groups=True,
            nested=True,
            proof="tests/runtime/test_every_kind.py",
        ),
    ),
    opened=opened,
    loaders=(Loader(name="moeq", packages={**TRANSFORMERS.packages, "moeq": "pip install moeq"}),),
)
