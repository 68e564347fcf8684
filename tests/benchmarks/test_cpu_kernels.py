"""What the CPU kernels' figures are shares of: a rate at which memory was read, every word of it."""

from __future__ import annotations

import cpu_kernels
import pytest


def test_the_bandwidth_is_that_of_reading_every_word(monkeypatch: pytest.MonkeyPatch) -> None:
    read = cpu_kernels.Bandwidth.of(8 * (cpu_kernels.PIECE + 5 * cpu_kernels.PAGE + 3))
    assert read() > 0
    monkeypatch.setattr(cpu_kernels, "together", lambda work, numbers: None)
    with pytest.raises(RuntimeError, match="0 of"):
        read()
