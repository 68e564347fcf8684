"""What a recipe chooses among by name: quantizers, formats and targets, as the registries have them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from moeq.registry import EXPORTERS, NATIVE, QUANTIZERS, converted

BEST = "best"  # quantizer: the method with the lowest loss

if TYPE_CHECKING:  # mypy takes no Literal of a table
    Format = str
    Native = str
    Quantizer = str
    QuantizerOrBest = str
    Target = str
else:
    Format = Literal[converted()]
    Native = Literal[NATIVE]
    Quantizer = Literal[QUANTIZERS.names()]
    QuantizerOrBest = Literal[*QUANTIZERS.names(), BEST]
    Target = Literal[tuple(target.name for exporter in EXPORTERS for target in exporter.targets)]

OtherBits = Literal[2, 3, 4, 8]  # of what is not a routed expert
Bits = Literal[1, OtherBits]
BitsOrFull = Literal[Bits, 16]
Ends = Literal["minmax", "percentile"]  # of a range of activations
Softmax = Literal["log-sqrt2", "log2", "uniform"]
Denominator = Literal["quantized", "exact"]
