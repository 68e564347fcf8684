"""A model that begins at a later decoder layer: the same output, fewer layers, nothing left behind."""

from __future__ import annotations

import pytest
import torch
from family_models import build, inputs

from moeq.models.experts import find_expert_layers
from moeq.models.partial import beginning_at, recording
from moeq.models.streaming import blocks_of

FAMILIES = ("qwen3_moe", "mixtral", "gpt_oss", "jamba", "qwen3_next", "gemma4", "longcat_flash", "nemotron_h")


def logits(model: torch.nn.Module, family: str) -> torch.Tensor:
    with torch.no_grad():
        return model(**inputs(family), use_cache=False).logits


@pytest.mark.parametrize("family", FAMILIES)
def test_from_any_layer_on_the_output_is_the_same_to_the_bit(family: str) -> None:
    model = build(family).eval().float()
    names = blocks_of(model)
    holding = [next(n for n in names if layer.name.startswith(f"{n}.")) for layer in find_expert_layers(model)]
    with recording(model, names, holding) as outputs:
        wanted = logits(model, family)
    order = list(outputs.given)
    ran: list[str] = []
    for name in names:
        model.get_submodule(name).register_forward_hook(lambda *_, at=name: ran.append(at))
    for block in holding:
        ran.clear()
        with beginning_at(model, outputs, block):
            assert torch.equal(logits(model, family), wanted)
        assert ran == order[order.index(block) :]
        ran.clear()
        assert torch.equal(logits(model, family), wanted)
        assert len(ran) == len(order)


def test_what_goes_in_is_what_the_layer_before_gave() -> None:
    """A change in the last layer that is begun at reaches the output; one in a layer that is left out does not."""
    model = build("mixtral").eval().float()
    names = blocks_of(model)
    with recording(model, names, [names[2]]) as outputs:
        wanted = logits(model, "mixtral")
    for at, same in ((1, True), (2, False)):
        weight = model.get_submodule(f"{names[at]}.mlp.experts").down_proj
        kept = weight.data.clone()
        weight.data.mul_(0.5)
        with beginning_at(model, outputs, names[2]):
            assert torch.equal(logits(model, "mixtral"), wanted) == same
        weight.data.copy_(kept)


def test_a_layer_that_was_not_wanted_runs_whole() -> None:
    model = build("mixtral").eval().float()
    names = blocks_of(model)
    with recording(model, names, [names[2]]) as outputs:
        logits(model, "mixtral")
    assert list(outputs.before(names[2])) == names[:2]
    assert outputs.before(names[1]) == {}


def test_a_layer_that_runs_twice_is_never_begun_at() -> None:
    model = build("mixtral").eval().float()
    names = blocks_of(model)
    with recording(model, names, names) as outputs:
        logits(model, "mixtral")
        logits(model, "mixtral")
    assert outputs.before(names[2]) == {}


def test_layers_that_read_more_than_their_input_differ() -> None:
    """The decoder of an encoder-decoder has a bias of its first layer in all others: what effects look for."""
    model = build("switch_transformers").eval().float()
    names = blocks_of(model)
    with recording(model, names, [names[-1]]) as outputs:
        wanted = logits(model, "switch_transformers")
    with beginning_at(model, outputs, names[-1]):
        assert not torch.equal(logits(model, "switch_transformers"), wanted)
