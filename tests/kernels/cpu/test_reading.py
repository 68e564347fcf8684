"""The loop that reading is held against."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from moeq_kernels.cpu.reading import PAGE, PIECE, total


@pytest.mark.parametrize("threads", [1, 3])
def test_every_word_is_read_once(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    for count in (0, 1, PAGE + 3, PIECE, 4 * PIECE + 5):
        assert total(np.arange(count, dtype=np.int64) * 3 - 7) == 3 * count * (count - 1) // 2 - 7 * count
