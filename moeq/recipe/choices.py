"""What a recipe chooses among: names of methods, formats and targets stand here alone; Literals are made of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from moeq.registry import QUANTIZERS

BEST = "best"  # quantizer: the method with the lowest loss
FORMATS = ("auto-round", "gptq", "compressed-tensors", "gguf", "dequantized")  # written beside the native one
TARGETS = ("moeq", "transformers", "vllm", "gptqmodel", "auto-round", "llama.cpp")


@dataclass(frozen=True, kw_only=True)
class Allocator:
    """budgets: the keys of assign that say how much a method may spend; keys: what else not every method reads."""

    budgets: tuple[str, ...] = ()
    keys: tuple[str, ...] = ()


ALLOCATORS = {
    "uniform": Allocator(budgets=("bits", "expert_bytes", "size")),
    "frequency": Allocator(budgets=("average_bits", "expert_bytes", "size"), keys=("widths", "scope")),
    "prefix-split": Allocator(budgets=("average_bits", "expert_bytes", "size")),
    "mopeq": Allocator(keys=("widths", "scope", "metric", "trace", "trace_samples")),
    "optimal": Allocator(
        budgets=("average_bits", "expert_bytes", "size"), keys=("widths", "scope", "granularity", "ndp_latency_ms")
    ),
    "budget": Allocator(
        budgets=("expert_bytes", "size"),
        keys=("hot_bits", "cold_bits", "transient_bytes", "ema", "warmup_sequences"),
    ),
}
BUDGETS = {name: method.budgets for name, method in ALLOCATORS.items()}

if TYPE_CHECKING:  # mypy takes no Literal of a table
    AllocatorName = str
    Format = str
    Quantizer = str
    QuantizerOrBest = str
    Target = str
else:
    AllocatorName = Literal[tuple(ALLOCATORS)]
    Format = Literal[FORMATS]
    Quantizer = Literal[QUANTIZERS.names()]
    QuantizerOrBest = Literal[*QUANTIZERS.names(), BEST]
    Target = Literal[TARGETS]

OtherBits = Literal[2, 3, 4, 8]  # of what is not a routed expert
Bits = Literal[1, OtherBits]
BitsOrFull = Literal[Bits, 16]
Metric = Literal["frequency", "hessian", "hybrid"]
Ends = Literal["minmax", "percentile"]  # of a range of activations
Softmax = Literal["log-sqrt2", "log2", "uniform"]
Denominator = Literal["quantized", "exact"]
