"""How many sequences go through a model at once."""

from __future__ import annotations

import os
from typing import Any, Literal

import torch

from moeq.models.forward import vocabulary

BatchSize = int | Literal["auto"]
MOST_ROWS = 64
SHARE = 0.2  # of free memory that logits may take
LOGIT_BYTES = 12  # float32 logits, their log-softmax, and what is between


def free_bytes(device: torch.device) -> int:
    """Memory that is free on a device now."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")


def rows_at_once(batch_size: BatchSize, model: Any, length: int) -> int:
    """The given number; `auto`: as many sequences of `length` tokens as have room for their logits, 1 to 64."""
    if batch_size != "auto":
        return batch_size
    room = SHARE * free_bytes(next(model.parameters()).device)
    return int(max(1, min(MOST_ROWS, room // (max(1, length) * vocabulary(model) * LOGIT_BYTES))))
