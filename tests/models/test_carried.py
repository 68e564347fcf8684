"""Changes of single layers, carried along one run: each gives what a whole run with that change gives, to the bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from family_models import build, inputs

from moeq.models.carried import Carried, Lost
from moeq.models.experts import ExpertLayer, find_expert_layers, stacked_weights
from moeq.models.forward import forward
from moeq.models.streaming import blocks_of
from moeq.models.walk import Batch

CPU = torch.device("cpu")
CARRIED = ("qwen3_moe", "mixtral", "gpt_oss", "deepseek_v3", "glm4_moe", "jamba", "qwen3_next", "nemotron_h", "olmoe")


def batches_of(family: str, count: int = 2) -> list[Batch]:
    ids = [inputs(family, rows=2, length=8 + index)["input_ids"] for index in range(count)]
    return [Batch(input_ids=i, mask=torch.ones_like(i, dtype=torch.bool), sequences=torch.arange(2)) for i in ids]


def logits(model: Any, batch: Batch) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = forward(model, batch.input_ids).logits
        return found


def halved(model: Any, layer: ExpertLayer, factor: float) -> None:
    for stack in stacked_weights(model, layer, slice(None)).values():
        stack.data.mul_(factor)


def counted(block: Any, name: str, ran: list[str]) -> None:
    own = block.forward

    def forward(*arguments: Any, **named: Any) -> Any:
        ran.append(name)
        return own(*arguments, **named)

    block.forward = forward


def everything(run: Carried, layers: list[ExpertLayer]) -> None:
    for block in run.walk():
        for layer in layers:
            if layer.name.startswith(f"{block}."):
                run.begin(layer.index, block)


@pytest.mark.cases(6)
@pytest.mark.parametrize("family", CARRIED)
def test_a_carried_change_is_a_whole_run_with_it(family: str) -> None:
    model = build(family).eval().float()
    layers, batches = find_expert_layers(model), batches_of(family)
    plain = [logits(model, batch) for batch in batches]
    ran: list[str] = []
    for name in blocks_of(model):
        counted(model.get_submodule(name), name, ran)
    run = Carried(model, batches, CPU)
    for block in run.walk():
        for layer in layers:
            if layer.name.startswith(f"{block}."):
                halved(model, layer, 0.5)
                run.begin(layer.index, block)
                halved(model, layer, 2.0)
    blocks = len(set(ran))
    changed = sum(blocks - list(dict.fromkeys(ran)).index(one) for one in dict.fromkeys(ran) for layer in layers
                  if layer.name.startswith(f"{one}."))  # fmt: skip
    assert len(ran) == len(batches) * (blocks + changed)  # nothing before a change is computed again
    for index, batch in enumerate(batches):
        ran.clear()
        with run.ending(index):
            assert torch.equal(logits(model, batch), plain[index])
        for layer in layers:
            with run.ending(index, layer.index):
                found = logits(model, batch)
            assert not ran
            halved(model, layer, 0.5)
            wanted = logits(model, batch)
            halved(model, layer, 2.0)
            ran.clear()
            assert torch.equal(found, wanted)
            assert not torch.equal(found, plain[index])
        assert torch.equal(logits(model, batch), plain[index])  # the model is as it was


def test_what_is_no_layers_own_output_cannot_be_carried() -> None:
    """The decoder's first layer is not given what the encoder's last one gave."""
    model = build("switch_transformers").eval().float()
    layers = find_expert_layers(model)
    run = Carried(model, batches_of("switch_transformers"), CPU)
    with pytest.raises(Lost):
        everything(run, layers)
    assert all("forward" not in model.get_submodule(name).__dict__ for name in blocks_of(model))


def test_a_block_that_runs_twice_cannot_be_carried() -> None:
    model = build("mixtral").eval().float()
    once = model.model.forward

    def twice(**named: Any) -> Any:
        once(**named)
        return once(**named)

    model.model.forward = twice
    with pytest.raises(Lost):
        list(Carried(model, batches_of("mixtral"), CPU).walk())
