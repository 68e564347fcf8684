"""The options of context-aware evaluation, and the decision that they make of a sequence's routing statistics."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field, model_validator

from moeq.errors import EvaluationError
from moeq.folders import as_word
from moeq.recipe import Rational
from moeq.recipe.earlier import CODE_BITS, EARLIER
from moeq.recipe.one_line import OneLine
from moeq_kernels.widths import FULL

if TYPE_CHECKING:
    import numpy as np

    from moeq.runtime.routing_counts import RoutingCounts

NOT_COUNTED = "last token not counted"  # in the names of rows


class ContextOptions(OneLine):
    """How a sequence's experts are placed and quantized after its prefill (paper 000, Algorithm 1).

    gpu_experts: K, experts a layer in full precision; code_bits: of the others, not needed where K is all of them;
    selector: False gives all of those the same width, the paper's ablation; loss_weighting: mass multiplies losses by
    the expert's share of the routing weight, none leaves them as printed; prefill: full precision, or the placed
    replicas of the run's assignment; first_token: whether the first new token comes out of the first decode step, whose
    input is the context's last token, or of the prefill; statistics: what routing decides, that of the whole context,
    as the paper says, or of all before its last token, which is then of the decoding alone.
    """

    option: ClassVar[str] = "--context-aware"
    example: ClassVar[str] = "write for example gpu_experts=2,code_bits=2.5"
    earlier: ClassVar[Mapping[str, str]] = {EARLIER: CODE_BITS}
    gpu_experts: int = Field(0, ge=0)
    code_bits: Rational | None = None
    alpha: float = Field(0.5, ge=0, le=1)
    selector: bool = True
    loss_weighting: Literal["mass", "none"] = "mass"
    prefill: Literal["full", "placed"] = "full"
    first_token: Literal["decode", "prefill"] = "decode"
    statistics: Literal["context", "before_last"] = "context"

    @model_validator(mode="after")
    def _check(self) -> ContextOptions:
        if self.code_bits is not None:
            average = Fraction(self.code_bits)
            if not 1 <= average <= 4:
                raise ValueError(f"code_bits must lie between 1 and 4, not {self.code_bits}")
            if not self.selector and average.denominator != 1:
                raise ValueError("selector off gives every expert the same width: code_bits must be 1, 2, 3 or 4")
        if self.statistics == "before_last" and self.first_token == "prefill":
            raise ValueError("first_token prefill has the context's last token in the prefill: leave statistics out")
        return self

    @property
    def label(self) -> str:
        """A short name: what differs from other options."""
        bits = "full" if self.code_bits is None else f"{float(Fraction(self.code_bits)):g} code bits"
        parts = [f"K={self.gpu_experts}", bits, *([] if self.selector else ["no selector"])]
        parts += [f"alpha={self.alpha:g}"] if self.alpha != 0.5 else []
        parts += ["placed prefill"] if self.prefill == "placed" else []
        parts += ["first token of prefill"] if self.first_token == "prefill" else []
        parts += ["unweighted"] if self.loss_weighting == "none" else []
        return " ".join([*parts, *([NOT_COUNTED] if self.statistics == "before_last" else [])])

    def needed_widths(self, experts: int) -> frozenset[int]:
        """The widths of replicas that a decision may name, of layers of so many experts."""
        full = {FULL} if self.gpu_experts or self.prefill == "full" or self.first_token == "prefill" else set()
        if self.gpu_experts >= experts:
            return frozenset({FULL})
        if self.selector:
            from moeq.assigners.prefix_split import WIDTHS  # not where options are only read

            return frozenset(full | set(WIDTHS))
        return frozenset(full | {int(Fraction(self.code_bits or 0))})


def of_result(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row of a result file as it would be written today.

    Tasks by context that were measured before `statistics` was an option left the last token out, unless it was part of
    the prefill: such a row's options and name say so. Perplexity of texts is the same with both.
    """
    of = row.get("of") or {}
    options = of.get("context_aware")
    if not options or "statistics" in options or options.get("first_token") == "prefill" or not row.get("lm_eval"):
        return dict(row)
    options = {**options, "statistics": "before_last"}
    return {**row, "name": f"{row['name']} {NOT_COUNTED}", "of": {**of, "context_aware": options}}


def check_replicas(
    options: ContextOptions, experts: int, there: frozenset[int], where: str, *, of_run: bool = False
) -> None:
    """EvaluationError when a budget is missing, or its replicas are, there: of a run, or of a checkpoint."""
    if options.gpu_experts > experts:
        raise EvaluationError(
            f"gpu_experts is {options.gpu_experts}, a layer has {experts} experts", where=where, do="lower gpu_experts"
        )
    if options.gpu_experts < experts and options.code_bits is None:
        raise EvaluationError(
            f"{experts - options.gpu_experts} experts a layer have no width", where=where, do="give code_bits"
        )
    missing = sorted(options.needed_widths(experts) - there)
    if missing:
        do = "give the run, or export it with quantize.replicas: all"
        if of_run:
            bits = ",".join(map(str, sorted({*there, *missing} - {FULL})))
            do = f"run `moeq run {as_word(where)} --set {as_word(f'losses.bits=[{bits}]')}`, which makes them"
        what = f"holds no replicas of every expert at {', '.join(map(str, missing))} bits, which {options.label} needs"
        raise EvaluationError(what, where=where, do=do)


def chooser(options: ContextOptions, losses: np.ndarray | None) -> Callable[[RoutingCounts], np.ndarray]:
    """The decision [L, E] of every sequence: widths, 16 on the GPU. losses: [L, E, 4] at 1 to 4 bits.

    Raises EvaluationError where losses are needed and None.
    """
    import numpy as np

    from moeq.assigners.online import decide
    from moeq.assigners.prefix_split import WIDTHS

    def choose(routing: RoutingCounts) -> np.ndarray:
        layers, experts = routing.counts.shape
        if options.gpu_experts == experts:
            return np.full((layers, experts), FULL)
        if options.selector and losses is None:
            raise EvaluationError("the selector needs losses", do="run `moeq losses`, or set selector=false")
        return decide(
            routing.counts,
            routing.scores,
            np.zeros((layers, experts, len(WIDTHS))) if losses is None else losses,
            options.code_bits or "0",
            gpu_experts=options.gpu_experts,
            alpha=options.alpha,
            weighted=options.loss_weighting == "mass",
            selector=options.selector,
        ).bits

    return choose
