"""How precision follows the workload, as it is written on a command line: `memory=24GiB,high=4,low=2,period=128`."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from moeq.errors import ModelError
from moeq.recipe import Bytes
from moeq.recipe.one_line import OneLine
from moeq.tables import human_bytes
from moeq_kernels.widths import FULL, WIDTHS

AUTO = "auto"  # written where nothing is to be said
USUAL = ((4, 2), (FULL, 4), (8, 4))  # high and low bits where none are named: paper 001's pairs, then what is near
REMEDY = "export with quantize.replicas: all"

Count = Annotated[int, Field(le=2**31 - 1)]
Bits = Annotated[int, Field(ge=min(WIDTHS), le=max(WIDTHS))]


class DynamicOptions(OneLine):
    """Paper 001 (DynaExq): a budget, two widths, and how often and how surely experts change between them.

    memory: bytes of the device, all that the model needs of it (none: what the checkpoint's own assignment takes for
    its experts, and what else is needed); high, low: code bits of both versions, 16 for full precision (none: 4 and 2,
    16 and 4 or 8 and 4, the first of which the checkpoint has); host: bytes of copies that are kept beside the device;
    period: T, forward passes between decisions; ema: a, what a pass leaves of an expert's hotness; threshold: tau, as a
    share of the hotness of the last expert in high precision when it began; certainty: standard deviations by which an
    expert must be hotter than the one whose place it takes; transient: experts that may be in transit at once; tokens:
    whose keys and values the budget has room for, of all sequences together (none: as many as the command runs);
    copies: made beside forward passes, in a thread, or between them, so that the same tokens give the same decisions
    (none: as the command has it); busy: the share of a processor's time that copies beside may take; planes: where low
    precision is the leading bits of high precision, only the others are brought.
    """

    option: ClassVar[str] = "--dynamic"
    example: ClassVar[str] = "write for example memory=24GiB,high=4,low=2, or auto"
    memory: Bytes | None = None
    high: Bits | None = None
    low: Bits | None = None
    host: Bytes = 1 << 30
    period: Count = Field(128, ge=1)
    ema: float = Field(0.99, ge=0, lt=1)
    threshold: float = Field(0.5, ge=0, allow_inf_nan=False)
    certainty: float = Field(4.0, ge=0, allow_inf_nan=False)
    transient: Count = Field(4, ge=1)
    tokens: Count | None = Field(None, ge=0)
    copies: Literal["beside", "between"] | None = None
    busy: float = Field(0.25, gt=0, le=1)
    planes: bool = True

    @model_validator(mode="after")
    def _check(self) -> DynamicOptions:
        for name, bits in (("high", self.high), ("low", self.low)):
            if bits is not None and bits not in WIDTHS:
                raise ValueError(f"{name} must be one of {', '.join(map(str, WIDTHS))}, not {bits}")
        if self.high is not None and self.low is not None and self.low >= self.high:
            raise ValueError(f"low must be below high: low is {self.low}, high {self.high}")
        return self

    @classmethod
    def parse(cls, text: str) -> DynamicOptions:
        """As `OneLine.parse`; auto: nothing is said."""
        return cls() if text.strip() == AUTO else super().parse(text)

    def pair(self, there: Collection[int], where: str) -> tuple[int, int]:
        """High and low bits, of widths that every expert has a replica of; ModelError where there is no such pair."""
        every = [(high, low) for high in sorted(there) for low in sorted(there, reverse=True) if low < high]
        usual = [pair for pair in USUAL if pair in every]
        for high, low in (*usual, *every):
            if self.high in (None, high) and self.low in (None, low):
                return high, low
        has = f"has replicas of every expert at {_listed(there)} bits" if there else "has no width of every expert"
        if len(there) < 2:
            raise ModelError(f"{has}, and two widths are needed", where=where, do=REMEDY)
        if self.high is not None and self.low is not None:
            wanted = f"{self.high} and {self.low} bits are asked for"
        elif self.high is not None:
            wanted = f"{self.high} bits and fewer are asked for"
        else:
            wanted = f"{self.low} bits and more are asked for"
        raise ModelError(f"{has}; {wanted}", where=where, do=f"name two of them, or {REMEDY}")

    def label(self, pair: tuple[int, int]) -> str:
        """A short name: widths, budget, and what differs from other options."""
        budget = "its own bytes" if self.memory is None else human_bytes(self.memory)
        parts = [f"dynamic {pair[0]}/{pair[1]} bits in {budget}"]
        for name in ("period", "ema", "threshold", "certainty", "transient"):
            value = getattr(self, name)
            if value != type(self).model_fields[name].default:
                parts.append(f"{name}={value:g}")
        return " ".join([*parts, *([f"copies {self.copies}"] if self.copies else [])])


@dataclass(frozen=True, kw_only=True)
class Following:
    """What a command is asked for: options; log: a file for decisions; watch: a live table on standard error."""

    options: DynamicOptions
    log: Path | None = None
    watch: bool = False


def in_words(summary: Mapping[str, Any]) -> str:
    """What `DynamicMoE.summary` says, in a line."""
    failed = f", {summary['failures']} copies failed" if summary["failures"] else ""
    return (
        f"dynamic: {summary['high_experts_a_layer']} experts of every layer at {summary['high_bits']} bits, the others "
        f"at {summary['low_bits']}, in {human_bytes(summary['pool_bytes'])}; {summary['promotions']} promotions, "
        f"{summary['demotions']} demotions in {summary['steps']} steps, {human_bytes(summary['copied_bytes'])} moved"
        f"{failed}"
    )


def _listed(widths: Collection[int]) -> str:
    return ", ".join(map(str, sorted(widths)))
