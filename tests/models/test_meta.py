"""The structure of a large model is made without memory for its weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from family_models import FAMILIES, configuration, of_name, save
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import DeepseekV3Config

from moeq.models import loading
from moeq.models.messages import quiet_transformers
from moeq.models.meta import LARGE, without_weights
from moeq.models.source import open_config


class Allocated(TorchDispatchMode):
    """The most bytes of one tensor that was made in memory."""

    most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if isinstance(made, torch.Tensor) and made.device.type == "cpu":
            self.most = max(self.most, made.numel() * made.element_size())
        return made


def test_experts_of_deepseek_v3_are_never_in_memory(tmp_path: Path) -> None:
    """Four of its layers: one matrix of all experts of a layer has 30 GB in float32."""
    DeepseekV3Config(num_hidden_layers=4, architectures=["DeepseekV3ForCausalLM"]).save_pretrained(tmp_path)
    with Allocated() as allocated:
        model = loading.skeleton(open_config(str(tmp_path / "config.json")))
    experts = model.get_submodule("model.layers.3.mlp.experts")
    assert tuple(experts.gate_up_proj.shape) == (256, 4096, 7168)
    assert all(weight.device.type == "meta" for weight in model.parameters())
    assert allocated.most < LARGE


def test_buffers_are_real(tmp_path: Path) -> None:
    model = loading.skeleton(open_config(str(save("deepseek_v3", tmp_path))))
    computed = {name: buffer.device.type for name, buffer in model.named_buffers()}
    assert computed["model.rotary_emb.inv_freq"] == "cpu"


@pytest.mark.cases(16)
@pytest.mark.parametrize("family", FAMILIES)
def test_buffers_are_those_of_the_model_though_no_weight_is_drawn(family: str) -> None:
    with quiet_transformers(), without_weights():
        bare = of_name(FAMILIES[family].model)._from_config(configuration(family))
    torch.manual_seed(0)
    with quiet_transformers():
        model = of_name(FAMILIES[family].model)._from_config(configuration(family))
    whole, made = (dict(one.named_buffers(remove_duplicate=False)) for one in (model, bare))
    assert whole.keys() == made.keys()
    assert not [name for name, buffer in whole.items() if not torch.equal(buffer, made[name])]
    trained = [
        {name: one.requires_grad for name, one in each.named_parameters(remove_duplicate=False)}
        for each in (bare, model)
    ]
    assert trained[0] == trained[1]


def test_code_of_others_draws_its_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[str] = []
    kind = of_name(FAMILIES["mixtral"].model)
    monkeypatch.setattr(kind, "_init_weights", lambda self, module: drawn.append(type(module).__name__))
    for custom in (False, True):
        monkeypatch.setattr(kind, "is_custom_code", lambda self, custom=custom: custom)
        with without_weights():
            kind._from_config(configuration("mixtral"))
        assert bool(drawn) == custom


def test_what_is_asked_for_elsewhere_stays_there() -> None:
    many = LARGE // 4
    calls: list[Callable[[], torch.Tensor]] = [
        lambda: torch.empty(many), lambda: torch.empty((2, many // 2)), lambda: torch.empty(size=(many,)),
        lambda: torch.empty(many * 2, dtype=torch.bfloat16),
    ]  # fmt: skip
    with without_weights():
        assert [call().device.type for call in calls] == ["meta"] * 4
        assert torch.empty(many - 1).device.type == "cpu"
        assert torch.zeros(many).device.type == torch.ones(many).device.type == "meta"
        assert torch.zeros(4 * many, dtype=torch.bool).device.type == "cpu"
        assert torch.empty(many, device="cpu").device.type == "cpu"
    assert torch.empty(many).device.type == "cpu"
