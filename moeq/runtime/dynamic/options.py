"""How precision follows the workload, as it is written on a command line: `memory=24GiB,high=4,low=2,period=128`."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from moeq.errors import ModelError
from moeq.recipe import DynamicSection
from moeq.recipe.one_line import OneLine
from moeq.tables import human_bytes
from moeq_kernels.widths import FULL

AUTO = "auto"  # written where nothing is to be said
USUAL = ((4, 2), (FULL, 4), (8, 4))  # high and low bits where none are named: paper 001's pairs, then what is near
REMEDY = "export with quantize.replicas: all"


class DynamicOptions(OneLine, DynamicSection):
    """`DynamicSection` in one line. tokens: none: as many as the command runs; copies: none: as the command has it."""

    option: ClassVar[str] = "--dynamic"
    example: ClassVar[str] = "write for example memory=24GiB,high=4,low=2, or auto"

    @classmethod
    def of_recipe(cls, section: DynamicSection) -> DynamicOptions:
        """What an entry of `eval.dynamic` says."""
        return cls.model_validate(section.model_dump())

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
        for name in ("period", "ema", "threshold", "certainty", "transient", "busy", "prefetch"):
            value = getattr(self, name)
            if value != type(self).model_fields[name].default:
                parts.append(f"{name}={value:g}")
        parts += [] if self.planes else ["planes=false"]
        parts += [] if self.host == type(self).model_fields["host"].default else [f"host {human_bytes(self.host)}"]
        parts += [] if self.tokens is None else [f"tokens {self.tokens}"]
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
