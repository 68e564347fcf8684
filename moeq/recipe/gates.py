"""The section `gates`: what a finished run must keep to, or its command fails."""

from __future__ import annotations

from pydantic import Field, model_validator

from moeq.recipe.choices import Target
from moeq.recipe.types import Bytes, Section, repeats

OF_TEXT = ("kl", "perplexity_increase", "equal_top1")  # which are measured where eval.perplexity is


class GatesSection(Section):
    """Bounds on what was exported, checked when a run, or its report, is finished: one that fails ends the command with
    exit code 14, after everything is written. They change nothing that a run makes.

    A bound itself is still kept; what is no number is not. kl and equal_top1 are judged by their means over all tokens
    that were scored, and shown with intervals of 95 % (1.96 standard errors). tokens_per_second is that of the recipe's
    own row of the estimate: decode of the placement (policy context_aware) at the first batch, input and output of
    estimate.grid.
    """

    kl: float | None = Field(None, gt=0, description="KL to the original in nats a token, at most")
    perplexity_increase: float | None = Field(None, description="perplexity above the original's in percent, at most")
    equal_top1: float | None = Field(None, gt=0, le=1, description="share of tokens with the same likeliest, at least")
    bytes: Bytes | None = Field(None, description="every file of the checkpoint together, at most")
    bits_per_weight: float | None = Field(
        None, gt=0, description="stored for a weight of the experts, scales and zero points counted, at most"
    )
    tokens_per_second: float | None = Field(None, gt=0, description="estimated, in decode, at least")
    formats: list[Target] = Field([], description="runtimes that must load what was assigned, by what is known of them")

    @model_validator(mode="after")
    def _check(self) -> GatesSection:
        if repeats(self.formats):
            raise ValueError("formats must name none twice")
        return self

    def of_text(self) -> list[str]:
        """The gates on what only text tells."""
        return [name for name in OF_TEXT if getattr(self, name) is not None]

    def any(self) -> bool:
        """Whether there is a gate at all."""
        return any(value not in (None, []) for value in self.model_dump().values())
