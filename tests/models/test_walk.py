"""The walk sees what the routers chose, pads are never counted, and lockstep equals one batch at a time."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from looped_models import looped
from tiny_models import save_tiny

from moeq.errors import ModelError, QuantizationError
from moeq.models import loading
from moeq.models.beside import walk_beside
from moeq.models.corpus import Sequences
from moeq.models.experts import find_expert_layers
from moeq.models.source import open_source
from moeq.models.streaming import StreamedModel
from moeq.models.walk import walk
from moeq.stages.profile import count_routing

CPU = torch.device("cpu")


def sequences(lengths: list[int], width: int) -> Sequences:
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(3, 2048, (len(lengths), width), generator=generator)
    mask = torch.arange(width) < torch.tensor(lengths)[:, None]
    return Sequences(ids=ids.where(mask, torch.tensor(2)), mask=mask, domains=("x",) * len(lengths))


@pytest.mark.parametrize("family", ["tiny_mixtral", "tiny_qwen"])
def test_counts_are_the_routers_own(family: str, request: pytest.FixtureRequest) -> None:
    source = open_source(str(request.getfixturevalue(family)))
    model = loading.load_model(source, torch.float32, CPU)
    _, layers = loading.describe(source)
    rows = sequences([24] * 6, 24)
    with torch.no_grad():
        logits = model(input_ids=rows.ids, output_router_logits=True).router_logits
    top_k = model.config.num_experts_per_tok
    prefill = torch.full((6,), 10)
    for layer, mine in zip(layers, logits, strict=True):
        inputs = next(found for found in walk(model, layers, rows.batches(4), CPU) if found.layer is layer)
        counts, scores = count_routing(inputs, 6, prefill)
        chosen = mine.view(6, 24, -1).topk(top_k, -1).indices
        wanted = torch.nn.functional.one_hot(chosen, layer.num_experts).sum(2)
        assert torch.equal(torch.from_numpy(counts[:, 0]), wanted[:, :10].sum(1))
        assert torch.equal(torch.from_numpy(counts[:, 1]), wanted[:, 10:].sum(1))
        probabilities = mine.float().softmax(-1).view(6, 24, -1).gather(-1, chosen)
        weights = probabilities / probabilities.sum(-1, keepdim=True)
        total = torch.zeros(6, layer.num_experts).double()
        total.scatter_add_(1, chosen.flatten(1), weights.double().flatten(1))
        torch.testing.assert_close(torch.from_numpy(scores.sum(1)), total, rtol=1e-4, atol=1e-4)


def test_pads_are_never_counted(tiny_mixtral: Path) -> None:
    source = open_source(str(tiny_mixtral))
    model = loading.load_model(source, torch.float32, CPU)
    _, layers = loading.describe(source)
    lengths = [5, 17, 11]
    padded = sequences(lengths, 20)
    together = [count_routing(i, 3, torch.tensor([3, 9, 6])) for i in walk(model, layers, padded.batches(3), CPU)]
    for row, length in enumerate(lengths):
        alone = Sequences(
            ids=padded.ids[row : row + 1, :length], mask=padded.mask[row : row + 1, :length], domains=("x",)
        )
        prefill = torch.tensor([[3, 9, 6][row]])
        for layer, inputs in enumerate(walk(model, layers, alone.batches(1), CPU)):
            counts, scores = count_routing(inputs, 1, prefill)
            assert (together[layer][0][row] == counts[0]).all()
            assert together[layer][1][row] == pytest.approx(scores[0], abs=1e-4)
            assert counts.sum() == 2 * length


def test_lockstep_equals_batch_by_batch_and_leaves_no_hooks(tiny_qwen: Path) -> None:
    source = open_source(str(tiny_qwen))
    model = loading.load_model(source, torch.float32, CPU)
    _, layers = loading.describe(source)
    assert [layer.num_experts for layer in layers] == [7, 7]
    rows = sequences([16] * 5, 16)
    lockstep = [inputs.hidden for inputs in walk(model, layers, rows.batches(2), CPU)]
    for number, batch in enumerate(rows.batches(2)):
        for layer, inputs in enumerate(walk(model, layers, [batch], CPU)):
            start = number * 32
            assert torch.equal(inputs.hidden, lockstep[layer][start : start + len(inputs.hidden)])
    stopped = walk(model, layers, rows.batches(2), CPU)
    next(stopped)
    stopped.close()
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_weights_that_are_not_finite_name_layer_expert_and_matrix(tiny_mixtral: Path) -> None:
    source = open_source(str(tiny_mixtral))
    model = loading.load_model(source, torch.float32, CPU)
    _, layers = loading.describe(source)
    with torch.no_grad():
        model.get_submodule(layers[1].name).down_proj[3, 0, 0] = torch.inf
    found = walk(model, layers, sequences([8], 8).batches(1), CPU)
    assert next(found).layer is layers[0]
    with pytest.raises(
        QuantizationError, match=r"layers\.1\.mlp\.experts, expert 3, down_proj: weights are not finite"
    ):
        next(found)


def test_a_looped_layer_comes_out_once_with_all_that_it_was_given(tmp_path: Path) -> None:
    """Against plain hooks on the experts, loaded and streamed; other layers' inputs and the end of a layer as ever."""
    source = open_source(str(save_tiny(tmp_path / "model", "mixtral", num_hidden_layers=4)))
    model, streamed = loading.load_model(source, torch.float32, CPU), StreamedModel(source, torch.float32, CPU)
    for one in (model, streamed.model):
        looped(one, 2, 1, 3)
    layers, rows = find_expert_layers(model), sequences([9, 16, 12], 16)
    assert [layer.visits for layer in layers] == [1, 2, 2, 1]
    given: dict[str, list[tuple[torch.Tensor, ...]]] = {layer.name: [] for layer in layers}
    hooks = [
        model.get_submodule(name).register_forward_pre_hook(lambda _, call, seen=seen: seen.append(call[:3]))
        for name, seen in given.items()
    ]
    with torch.no_grad():
        for batch in rows.batches(2):
            model(input_ids=batch.input_ids, attention_mask=batch.mask.long(), use_cache=False)
    for hook in hooks:
        hook.remove()
    for one, kept in ((model, None), (streamed.model, streamed)):
        left: list[str] = []
        walked = walk(
            one, layers, rows.batches(2), CPU, streamed=kept, finish=lambda *_: None,
            blocks=[f"model.layers.{index}" for index in range(4)], left=left.append,
        )  # fmt: skip
        for layer, inputs in zip(layers, walked, strict=True):
            assert inputs.layer == layer
            assert kept is None or kept.loaded == {f"model.layers.{layer.index}"}
            assert left == [f"model.layers.{index}" for index in range(layer.index)]
            masks = [batch.mask.flatten() for batch in rows.batches(2)] * layer.visits
            calls = [call for visit in range(layer.visits) for call in given[layer.name][visit :: layer.visits]]
            for index, part in enumerate((inputs.hidden, inputs.experts, inputs.weights)):
                own = [call[index][mask] for call, mask in zip(calls, masks, strict=True)]
                assert torch.equal(part, torch.cat(own))
            counts, _ = count_routing(inputs, 3, torch.tensor([4, 4, 4]))
            assert counts.sum(2).tolist() == [[8 * layer.visits, 2 * layer.visits * (n - 4)] for n in (9, 16, 12)]
        assert left == [f"model.layers.{index}" for index in range(4)]
    whole, routing = (list(walk(model, layers, rows.batches(2), CPU, hidden=hidden)) for hidden in (True, False))
    for inputs, alone in zip(whole, routing, strict=True):
        assert torch.equal(inputs.experts, alone.experts)
        assert torch.equal(inputs.weights, alone.weights)
        assert alone.hidden.shape == (len(inputs.hidden), 0)
        assert alone.hidden.untyped_storage().nbytes() == 0
    inside = ("model.layers.1.", "model.layers.2.")  # what is read a second time
    read = [header.bytes * (1 + key.startswith(inside)) for key, header in source.tensors.items()]
    assert streamed.bytes_read == sum(read)
    with pytest.raises(ModelError, match="did not run in its turn"):
        list(walk_beside(model, layers, rows.batches(2), CPU))
    with pytest.raises(ModelError, match=r"layers\.3\.mlp\.experts: this MoE layer did not run in its turn"):
        list(walk(model, [replace(layer, visits=1) for layer in layers], rows.batches(2), CPU))
