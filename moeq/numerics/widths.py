"""The widths of packed codes and the names of their layout: what readers of manifests know without any tensor."""

from __future__ import annotations

SUPPORTED_BITS = (1, 2, 3, 4, 5, 6, 7, 8)
NESTED_BITS = (2, 3, 4)  # widths whose codes can be one code's leading bits, the widest last
LAYOUT = "moeq-bitstream"
LAYOUT_VERSION = 1
NESTED_VERSION = 2  # where weights are nested
