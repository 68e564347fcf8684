"""What tuning the scales of a quantized model came to: a part of quantizers.json."""

from __future__ import annotations

from moeq.artifacts.stage import Frozen


class Tuned(Frozen):
    """scales: how many were trained; steps: that were taken, and chosen: after how many the best was reached; 0 with
    is_better false: the start was kept.

    sequences, heldout: calibration sequences that were trained on, and those that decided; divergence: their mean KL
    from the original, {steps: nats a token}, of the start first, None where it is not finite; gain, least: by how much
    the best lies below the start, and the least that 95 % of such differences leave.
    """

    scales: int
    steps: int
    chosen: int
    is_better: bool
    sequences: int
    heldout: int
    divergence: dict[int, float | None]
    gain: float
    least: float

    def told(self) -> str:
        """In words."""
        scales = f"{self.scales:,} scales trained on the whole model's output"
        start = self.divergence[0]
        if start is None:
            return f"{scales}; kept as they were: the divergence of the start is not finite"
        best = start - self.gain
        on = f"on {self.heldout:,} held-out sequences"
        if not self.is_better:
            return f"{scales}; kept as they were: the best of {self.steps:,} steps was not better beyond chance {on}"
        share = f"{self.gain / start:.1%}"
        return f"{scales}, {self.chosen:,} steps; KL {on} {start:.4f} to {best:.4f} ({share} less)"
