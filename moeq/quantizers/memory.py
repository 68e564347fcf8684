"""How much memory one batch of experts may take."""

from __future__ import annotations

import torch

DEFAULT_BYTES = 2 * 2**30
GPU_SHARE = 0.4  # of what is free: many experts at once, since a step of the column loop costs the same for few


def working_memory(asked: int | None, device: torch.device | str = "cpu") -> int:
    """Bytes for the tensors of one batch of experts: as the recipe says, else by the device."""
    device = torch.device(device)
    if asked is not None:
        return asked
    if device.type == "cuda":
        return int(GPU_SHARE * torch.cuda.mem_get_info(device)[0])
    return DEFAULT_BYTES
