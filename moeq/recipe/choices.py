"""What a recipe chooses among: names of quantizers, formats and targets stand here; Literals are made of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from moeq.registry import QUANTIZERS

BEST = "best"  # quantizer: the method with the lowest loss
FORMATS = ("auto-round", "gptq", "compressed-tensors", "gguf", "dequantized")  # written beside the native one
TARGETS = ("moeq", "transformers", "vllm", "gptqmodel", "auto-round", "llama.cpp")

if TYPE_CHECKING:  # mypy takes no Literal of a table
    Format = str
    Quantizer = str
    QuantizerOrBest = str
    Target = str
else:
    Format = Literal[FORMATS]
    Quantizer = Literal[QUANTIZERS.names()]
    QuantizerOrBest = Literal[*QUANTIZERS.names(), BEST]
    Target = Literal[TARGETS]

OtherBits = Literal[2, 3, 4, 8]  # of what is not a routed expert
Bits = Literal[1, OtherBits]
BitsOrFull = Literal[Bits, 16]
Ends = Literal["minmax", "percentile"]  # of a range of activations
Softmax = Literal["log-sqrt2", "log2", "uniform"]
Denominator = Literal["quantized", "exact"]
