import pytest
import torch

from moeq.quantizers.memory import DEFAULT_BYTES, GPU_SHARE, working_memory


def test_what_the_recipe_says_holds_anywhere() -> None:
    assert working_memory(5, "cpu") == working_memory(5, "cuda") == 5


def test_else_the_device_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1000, 4000))
    assert working_memory(None, "cuda:1") == GPU_SHARE * 1000
    assert working_memory(None) == DEFAULT_BYTES
