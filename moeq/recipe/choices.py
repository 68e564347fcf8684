"""What a recipe chooses among by name: quantizers and runtimes, as the registries have them."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BeforeValidator

from moeq.errors import RecipeError
from moeq.registry import QUANTIZERS
from moeq.runtimes import NATIVE, named, runtimes, written

BEST = "best"  # quantizer: the method with the lowest loss


def _named(known: Collection[str]) -> Callable[[Any], Any]:
    """What reads the name of a runtime, or of a format as earlier recipes have it."""

    def read(word: Any) -> Any:
        try:
            return named(word, known) if isinstance(word, str) else word
        except RecipeError as error:
            raise ValueError(str(error)) from None

    return read


if TYPE_CHECKING:  # mypy takes no Literal of a table
    Format = str
    Native = str
    Quantizer = str
    QuantizerOrBest = str
    Target = str
else:
    Format = Annotated[Literal[written()], BeforeValidator(_named(written()))]
    Native = Annotated[Literal[NATIVE], BeforeValidator(_named((NATIVE,)))]
    Quantizer = Literal[QUANTIZERS.names()]
    QuantizerOrBest = Literal[*QUANTIZERS.names(), BEST]
    Target = Annotated[Literal[tuple(runtimes())], BeforeValidator(_named(tuple(runtimes())))]

OtherBits = Literal[2, 3, 4, 8]  # of what is not a routed expert
Bits = Literal[1, OtherBits]
BitsOrFull = Literal[Bits, 16]
Ends = Literal["minmax", "percentile"]  # of a range of activations
Softmax = Literal["log-sqrt2", "log2", "uniform"]
Denominator = Literal["quantized", "exact"]
Dropping = Literal["calibrated", "printed"]  # which codes of a log softmax count as 0
