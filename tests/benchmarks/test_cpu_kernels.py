"""What the CPU kernels' figures are shares of: a rate at which memory was read, every word of it."""

from __future__ import annotations

import cpu_kernels
import pytest

from moeq_kernels.cpu import reading


def test_the_bandwidth_is_that_of_reading_every_word(monkeypatch: pytest.MonkeyPatch) -> None:
    bandwidth = cpu_kernels.Bandwidth.of(8 * (reading.PIECE + 5 * reading.PAGE + 3))
    assert bandwidth() > 0
    monkeypatch.setattr(reading, "together", lambda work, numbers: None)
    with pytest.raises(RuntimeError, match="0 of"):
        bandwidth()
