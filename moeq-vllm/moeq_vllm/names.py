"""What the tensors of a native checkpoint are called in vLLM, where those of experts go past its models."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor
from vllm.model_executor.models.utils import WeightsMapper

from moeq_kernels.parts import ALL_PARTS

Take = Callable[[str, Tensor], bool]
WEIGHT = ".weight"  # by which a model's own mapping knows a table


class Names(WeightsMapper):  # type: ignore[misc]
    """A mapping of names before which `take` is offered every tensor; a union with another one stays so."""

    def __init__(self, take: Take, **renames: Any) -> None:
        super().__init__(**renames)
        self.take = take

    def __or__(self, other: WeightsMapper) -> Names:
        return Names(self.take, **vars(WeightsMapper(**_renames(self)) | other))

    def __ror__(self, other: WeightsMapper) -> Names:
        return Names(self.take, **vars(other | WeightsMapper(**_renames(self))))

    def apply(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Tensors that were not taken, by the names of vLLM's model."""
        yield from super().apply((name, tensor) for name, tensor in weights if not self.take(name, tensor))


def _renames(names: Names) -> dict[str, Any]:
    return {key: value for key, value in vars(names).items() if key != "take"}


def in_vllm(mapper: WeightsMapper, bits: Mapping[str, int]) -> tuple[dict[str, int], dict[re.Pattern[str], str | None]]:
    """{module as vLLM calls it: width} of packed ones, and what renames tensors beside the mapper.

    A table may have another name only where its weight is meant (`.embed_tokens.weight` in gpt-oss).
    """
    known, renamed = {}, dict[re.Pattern[str], str | None]()
    for name, width in bits.items():
        module, weight = mapper.map_name(name), mapper.map_name(name + WEIGHT)
        if module is not None:
            last, called = module.rpartition(".")[2], (weight or "").removesuffix(WEIGHT).rpartition(".")[2]
            if (weight or "").endswith(WEIGHT) and called != last:
                renamed[re.compile(rf"(^|\.){re.escape(last)}\.({'|'.join(ALL_PARTS)})$")] = rf"\1{called}.\2"
                module = module.removesuffix(last) + called
            known[module] = width
    return known, renamed
