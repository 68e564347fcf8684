"""Two runs side by side: what is seen equals runs of their own, loaded and streamed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from moeq.errors import ModelError
from moeq.models import beside as beside_module
from moeq.models import loading
from moeq.models.beside import _behind, walk_beside
from moeq.models.experts import ExpertLayer, find_expert_layers, set_expert_weights, stacked_weights
from moeq.models.source import open_source
from moeq.models.streaming import StreamedModel
from moeq.models.walk import Batch, LayerInputs, walk

CPU = torch.device("cpu")
IDS = torch.arange(60).reshape(3, 20) * 7 % 50 + 3


def batches(padded: bool) -> list[Batch]:
    mask = torch.ones(3, 20, dtype=torch.bool)
    if padded:
        mask[0, 15:] = mask[2, 9:] = False
    parts = [slice(0, 2), slice(2, 3)]
    return [Batch(input_ids=IDS[p], mask=mask[p], sequences=torch.arange(3)[p]) for p in parts]


def load(path: Path) -> nn.Module:
    return loading.load_model(open_source(str(path)), torch.float32, CPU)


def spoil(model: nn.Module, layer: ExpertLayer) -> None:
    """Experts that are visibly others."""
    for expert, scale in ((0, 0.5), (1, 1.3)):
        own = {
            name: stack[0] * scale for name, stack in stacked_weights(model, layer, slice(expert, expert + 1)).items()
        }
        set_expert_weights(model, layer, expert, own)


def block_outputs(model: nn.Module, layer: ExpertLayer, given: list[Batch]) -> Tensor:
    """What the decoder layer of some experts gives, pads taken out."""
    block = model.get_submodule(layer.name.rpartition(".mlp")[0])
    found: list[Tensor] = []
    handle = block.register_forward_hook(
        lambda _, __, output: found.append(output if isinstance(output, Tensor) else output[0])
    )
    for batch in given:
        model(input_ids=batch.input_ids, attention_mask=batch.mask.long())
    handle.remove()
    return torch.cat([output[batch.mask] for output, batch in zip(found, given, strict=True)])


@pytest.mark.cases(3)
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("family", ["tiny_mixtral", "tiny_qwen"])
@torch.no_grad()
def test_both_runs_are_what_they_would_be_alone(family: str, padded: bool, request: pytest.FixtureRequest) -> None:
    path, given = request.getfixturevalue(family), batches(padded)
    exact, changing = load(path), load(path)
    layers = find_expert_layers(exact)
    model = load(path)
    moved = torch.empty(0)
    for index, seen in enumerate(walk_beside(model, layers, given, CPU)):
        layer = layers[index]
        alone = next(found for found in walk(changing, layers, given, CPU) if found.layer == layer)
        torch.testing.assert_close(seen.inputs.hidden, alone.hidden, rtol=1e-4, atol=1e-5)
        assert torch.equal(seen.inputs.experts, alone.experts)
        assert torch.equal(seen.inputs.sequence, alone.sequence)
        before = block_outputs(changing, layer, given)
        wanted = block_outputs(exact, layer, given) - before
        assert seen.behind is not None
        torch.testing.assert_close(seen.behind, wanted, rtol=1e-3, atol=1e-5)
        assert bool(seen.behind.any()) == (index > 0)
        if index > 0:
            assert seen.moved is not None
            torch.testing.assert_close(seen.moved, moved, rtol=1e-3, atol=1e-5)
        spoil(model, layer)
        spoil(changing, layer)
        rows = int(given[0].mask.sum())
        moved = (block_outputs(changing, layer, given) - before)[:rows]
        assert bool(moved.any())
    assert index == len(layers) - 1


def test_what_is_behind_belongs_to_the_tokens_that_are_there() -> None:
    """Tokens that a walk leaves out have no row."""
    given = batches(True)
    outputs = [torch.randn(*batch.mask.shape, 4) for batch in (*given, *given)]
    position = [batch.mask.long().cumsum(1) - 1 for batch in given]
    sequence = [batch.sequences.unsqueeze(1).expand_as(batch.mask) for batch in given]
    rows = [torch.cat([one[b.mask] for one, b in zip(of, given, strict=True)]) for of in (sequence, position)]
    wanted = torch.cat([(a - b)[c.mask] for a, b, c in zip(outputs[:2], outputs[2:], given, strict=True)])
    some = torch.arange(len(wanted)) % 7 != 3
    layer = ExpertLayer(index=0, name="x", num_experts=2, hidden_size=4, intermediate_size=2)
    inputs = LayerInputs(
        layer=layer, hidden=torch.zeros(int(some.sum()), 4), experts=torch.empty(0), weights=torch.empty(0),
        sequence=rows[0][some], position=rows[1][some],
    )  # fmt: skip
    found = _behind(outputs, given, inputs)
    assert found is not None
    torch.testing.assert_close(found, wanted[some])
    assert _behind(outputs, given, replace(inputs, hidden=torch.zeros(3, 5))) is None


@torch.no_grad()
def test_a_streamed_model_sees_the_same_and_reads_every_layer_once(tiny_qwen: Path) -> None:
    source, given = open_source(str(tiny_qwen)), batches(True)
    streamed = StreamedModel(source, torch.float32, CPU)
    model = load(tiny_qwen)
    layers = find_expert_layers(model)
    resident = streamed.bytes_read
    pairs = zip(
        walk_beside(model, layers, given, CPU),
        walk_beside(streamed.model, layers, given, CPU, streamed=streamed),
        strict=True,
    )
    for one, other in pairs:
        assert torch.equal(one.inputs.hidden, other.inputs.hidden)
        assert one.behind is not None
        assert other.behind is not None
        assert torch.equal(one.behind, other.behind)
        spoil(model, one.inputs.layer)
        spoil(streamed.model, one.inputs.layer)
    inside = sum(header.bytes for name, header in source.tensors.items() if ".layers." in name)
    assert streamed.bytes_read - resident == inside
    assert not streamed.loaded


def test_experts_without_a_decoder_layer_of_their_own_are_refused(
    tiny_mixtral: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load(tiny_mixtral)
    monkeypatch.setattr(beside_module, "blocks_of", lambda _: ["model"])
    with pytest.raises(ModelError, match="not in a decoder layer of their own"):
        next(walk_beside(model, find_expert_layers(model), batches(False), CPU))
