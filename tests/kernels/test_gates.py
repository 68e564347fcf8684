"""Gates that kernels do not compute themselves."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

from moeq_kernels.gates import clamped


def test_the_gate_of_gpt_oss() -> None:
    """Values [P, I] to both sides of the limit."""
    both = torch.linspace(-9, 9, 240).reshape(10, 24)
    own: Any = SimpleNamespace(limit=3.0, alpha=1.5)
    found = clamped(own.limit, own.alpha, 1.0, {"gate_proj": both[:, ::2], "up_proj": both[:, 1::2]})
    torch.testing.assert_close(found, GptOssExperts._apply_gate(own, both))
