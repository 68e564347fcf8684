"""What is asked of a MoE layer whose widths are checked against a runtime."""

from __future__ import annotations

from typing import Protocol


class Sized(Protocol):
    """A MoE layer: its name, the matrices of one expert, and their rows and inputs."""

    @property
    def name(self) -> str: ...
    @property
    def projections(self) -> tuple[str, ...]: ...
    def shape(self, projection: str) -> tuple[int, int]: ...
