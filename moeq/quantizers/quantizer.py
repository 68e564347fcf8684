"""What a quantizer is: a file that declares `QUANTIZER = Quantizer(...)` and makes codes, nothing else.

quantizers/layer.py feeds, measures, packs and stores; recipe, plan and reports take from the declaration what they need
of it, without torch: it is imported inside of the functions. Other packages name theirs in the entry points of
`moeq.quantizers`.

Letters: E experts of a batch, B bit widths, N output rows, K inputs.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel

from moeq.registry import QUANTIZERS

if TYPE_CHECKING:
    from moeq.models.experts import ExpertLayer
    from moeq.numerics.gptq import Quantized
    from moeq.recipe import LossesSection
    from moeq_kernels.widths import Encoding

Grid = Literal["asymmetric", "even", "narrow", "full"]
GRIDS: tuple[Grid, ...] = ("asymmetric", "even", "narrow", "full")  # zero points, or losses.symmetric_range
WEIGHT_OPERATIONS = 500  # what rounding, packing and decoding one weight at one width takes, as operations


class NoSettings(BaseModel):
    """Of a quantizer without keys of its own."""


@dataclass(frozen=True, kw_only=True)
class BatchSizes:
    """What a batch's memory and an expert's time hang on.

    settings: the recipe's section; experts: of the batch; tokens: an expert's own calibration tokens (for memory those
    of the busiest one); lent: rows of the layer beside them; gpu: whether there is one.
    """

    layer: ExpertLayer
    settings: LossesSection
    experts: int
    tokens: float
    lent: int
    gpu: bool = False

    @property
    def hessian_bytes(self) -> int:
        """Of the batch's Hessians, float32."""
        return 4 * self.experts * (self.layer.hidden_size**2 + self.layer.intermediate_size**2)

    @property
    def summing_bytes(self) -> int:
        """Of Hessians while they are summed up."""
        from moeq.quantizers.layer_data import row_bytes

        return self.hessian_bytes + row_bytes(self.layer, int(self.tokens) + self.lent)

    @property
    def factor_operations(self) -> float:
        """Of an expert's Hessians and intermediate states, and of two Cholesky factors."""
        hidden, inner, first = self.layer.hidden_size, self.layer.intermediate_size, len(self.layer.projections) - 1
        summed = 2 * self.tokens * hidden**2 + 2 * (self.tokens + self.lent) * (inner**2 + first * hidden * inner)
        return summed + (hidden**3 + inner**3) / 3

    @property
    def feedback_operations(self) -> int:
        """Of the feedback of every width."""
        hidden, inner, first = self.layer.hidden_size, self.layer.intermediate_size, len(self.layer.projections) - 1
        return len(self.settings.bits) * (first * inner * hidden**2 + hidden * inner**2)


@dataclass(frozen=True, kw_only=True, eq=False)
class Quantizer:
    """A way to choose the codes and grids of experts.

    quantize(weights, statistics, settings) gives {projection: `numerics.gptq.Quantized`}, codes [E, B, N, K] at the
    widths settings.bits. weights: {projection: [E, N, K] float32}, left as they are; statistics:
    `quantizers.statistics.Statistics`, None where replicas are made on demand; settings: the recipe's section `losses`.
    What packed weights would not stand for exactly is refused with the name of layer and expert.

    label: as reports call it; help: a line; settings: keys of `losses` that it alone reads, each called NAME_...; what
    it can do: widths, grids, nested codes; sides: of what rows and inputs must be multiples; whether
    losses.act_order and losses.clip change its codes; trained: whether quantize.refine and tune train its scales.
    needs: which statistics it asks for; starts_from: the quantizer whose codes it begins with (statistics.start);
    draws: whether statistics.seed decides something of its codes. stored: its replicas are kept; those of others are
    made again, expert by expert, whenever they are needed. linear(weight, factor, grid): `Quantized` of some rows [N,
    K] float32 of a module that is no expert, codes [1, 1, N, K], at one width; grid: `quantizers.non_experts.Grid`;
    factor: `numerics.factor.Factor` of what the module is given, for who needs Hessians; None: experts alone.
    encoding(settings): of codes that are no grid's: such a quantizer gives {projection: {bits: a stack of
    PackedWeight}} and goes alone; None: the section's grid. packages: {one that it imports: how to install it}, without
    which a run is refused before it begins.
    memory(sizes): bytes at its fullest moments beside the batch's float32 weights, those of its start apart;
    operations(sizes): floating-point operations of one expert, beside WEIGHT_OPERATIONS a weight.
    """

    name: str
    label: str
    help: str
    quantize: Callable[..., Any]
    memory: Callable[[BatchSizes], list[int]]
    operations: Callable[[BatchSizes], float] = lambda sizes: 0.0
    settings: type[BaseModel] = NoSettings
    widths: tuple[int, ...] = (1, 2, 3, 4, 8)
    grids: tuple[Grid, ...] = GRIDS
    nested: bool = True
    sides: int = 1
    act_order: bool = False
    clip: bool = False
    trained: bool = True
    needs: Literal["nothing", "tokens", "hessians"] = "nothing"
    starts_from: str | None = None
    draws: bool = False
    linear: Callable[..., Quantized] | None = None
    encoding: Callable[[LossesSection], Encoding] | None = None
    stored: bool = True
    packages: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not re.fullmatch("[a-z][a-z0-9_-]{0,39}", self.name) or self.name in ("best", self.starts_from):
            raise ValueError(f"{self.name!r} cannot be a quantizer's name")
        prefix = self.name.replace("-", "_") + "_"
        foreign = [key for key in self.settings.model_fields if not key.startswith(prefix)]
        if foreign:
            raise ValueError(f"settings of {self.name} are called {prefix}..., not {', '.join(foreign)}")
        if not self.stored and (self.needs != "nothing" or self.starts_from is not None):
            raise ValueError(f"{self.name} needs what is not there when replicas are made on demand")

    def chain(self) -> tuple[Quantizer, ...]:
        """What runs for it, in this order: what it starts from, and itself."""
        before = () if self.starts_from is None else QUANTIZERS.get(self.starts_from).chain()
        return (*before, self)

    @property
    def origins(self) -> list[str]:
        """The packages, with their versions, that bring it and what it starts from; none of moeq's own."""
        return [package for part in self.chain() if (package := QUANTIZERS.origin(part.name)) is not None]

    @property
    def knows_hessians(self) -> bool:
        """Whether the traces of Hessians stand in its rows of the loss table."""
        return any(part.needs == "hessians" for part in self.chain())

    @property
    def hangs_on_seed(self) -> bool:
        """Whether its codes are others with another seed."""
        return any(part.draws for part in self.chain())

    def refusal(self, settings: LossesSection) -> str | None:
        """What of a section it cannot do, a message that begins with the key."""
        foreign = [str(bits) for bits in settings.bits if bits not in self.widths]
        if foreign:
            return f"bits: {self.name} makes no codes of {', '.join(foreign)} bits"
        grid = settings.symmetric_range if settings.symmetric else "asymmetric"
        if grid not in self.grids:
            key = "symmetric_range" if settings.symmetric else "symmetric"
            return f"{key}: {grid} cannot go with {self.name}, which makes {', '.join(self.grids)} grids"
        return None


def on_demand(names: Iterable[str]) -> bool:
    """Whether a quantizer is among them whose replicas are made when they are needed."""
    return not all(QUANTIZERS.get(name).stored for name in names)


def label(name: str) -> str:
    """What reports call a quantizer; its name where the package that brought it is gone."""
    return next((quantizer.label for quantizer in QUANTIZERS if quantizer.name == name), name)
