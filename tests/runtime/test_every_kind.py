"""Every family's experts, computed one by one from what moeq takes out of them, give what the family computes."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from family_models import FAMILIES, build, inputs, save

from moeq.errors import ModelError
from moeq.models import loading
from moeq.models.corpus import Sequences
from moeq.models.experts import find_expert_layers
from moeq.models.forward import forward
from moeq.models.kinds import KINDS
from moeq.models.source import open_source
from moeq.models.streaming import StreamedModel
from moeq.models.walk import walk
from moeq.runtime.packed_experts import FULL, PACKED
from moeq.stages.profile import count_routing
from moeq_kernels.widths import Encoding

REFUSED = {
    "doge": "rows of two embeddings",
    "nllb-moe": "only its experts 0 and 1",
    "diffusion_gemma": "share them",
    "ernie4_5_vl_moe": "share tensors on disk",
}


def packed(model: Any, layer: Any) -> Any:
    """The layer's experts as a packed module whose experts are all dense."""
    original = model.get_submodule(layer.name)
    experts = PACKED[layer.kind.name](
        layer,
        [FULL] * layer.num_experts,
        encoding=Encoding(group_size=16, symmetric=False),
        original=original,
        dtype=torch.float32,
    )
    weights, biases = (of(original, slice(None)) for of in (layer.kind.weights, layer.kind.biases))
    for expert in range(layer.num_experts):
        for projection in layer.projections:
            linear = experts.get_submodule(f"{expert}.{projection}")
            assert tuple(weights[projection][expert].shape) == layer.shape(projection) == tuple(linear.dense.shape)
            linear.dense.copy_(weights[projection][expert])
            if layer.biased:
                linear.bias.copy_(biases[projection][expert])
    return experts


@pytest.mark.cases(16)
@pytest.mark.parametrize("family", sorted(set(FAMILIES) - set(REFUSED)))
def test_packed_experts_compute_what_the_family_computes(family: str) -> None:
    model = build(family)
    layers = find_expert_layers(model)
    seen: dict[str, tuple[Any, Any]] = {}
    hooks = [
        model.get_submodule(layer.name).register_forward_hook(
            lambda _, arguments, output, at=layer.name: seen.update({at: (arguments, output)})
        )
        for layer in layers
    ]
    with torch.no_grad():
        model(**inputs(family))
        for hook in hooks:
            hook.remove()
        assert seen
        for layer in layers:
            if layer.name in seen:
                arguments, output = seen[layer.name]
                experts = packed(model, layer)
                found = experts(*arguments)
                scale = output.abs().max()
                assert scale > 0
                torch.testing.assert_close(found, output, rtol=1e-5, atol=2e-6 * float(scale))
                with torch.autocast("cpu", torch.bfloat16):
                    found = experts(*arguments)
                torch.testing.assert_close(found.to(output.dtype), output, rtol=0, atol=0.05 * float(scale))


@pytest.mark.cases(28)
@pytest.mark.parametrize("family", sorted(set(FAMILIES) - set(REFUSED)))
def test_weights_are_set_where_the_family_reads_them(family: str) -> None:
    model = build(family)
    layer = find_expert_layers(model)[-1]
    module = model.get_submodule(layer.name)
    before = {name: stack.clone() for name, stack in layer.kind.weights(module, slice(None)).items()}
    for projection, view in layer.kind.views(module, 3).items():
        with torch.no_grad():
            view.mul_(2)
        after = layer.kind.weights(module, slice(None))[projection]
        assert torch.equal(after[3], 2 * before[projection][3])
        before[projection][3] *= 2
        assert torch.equal(after, before[projection])


@pytest.mark.parametrize("family", sorted(REFUSED))
def test_refused_families_say_why(family: str) -> None:
    with pytest.raises(ModelError, match=REFUSED[family]):
        find_expert_layers(build(family))


def test_every_kind_has_a_packed_module() -> None:
    assert {kind.name for kind in KINDS} == set(PACKED)


def rows(family: str) -> Sequences:
    ids = inputs(family, rows=3, length=10)["input_ids"]
    mask = torch.arange(10) < torch.tensor([[10], [7], [4]])
    return Sequences(ids=ids.where(mask, torch.tensor(2)), mask=mask, domains=("x",) * 3)


KINDS_OF_EXPERTS = (
    "mixtral", "gpt_oss", "aria_text", "nemotron_h", "longcat_flash", "minimax_m3_vl_text", "llama4_text", "dbrx",
    "jetmoe", "switch_transformers", "muse_spark", "deepseek_v4", "zaya",
)  # fmt: skip


@pytest.mark.parametrize("family", KINDS_OF_EXPERTS)
def test_the_walk_sees_what_the_experts_are_given(family: str) -> None:
    """The experts' weighted sum over what the walk yields is the output of the family's own module, pads left out."""
    model, of = build(family), rows(family)
    layers = find_expert_layers(model)
    outputs: dict[str, torch.Tensor] = {}
    hooks = [
        model.get_submodule(layer.name).register_forward_hook(
            lambda _, __, output, at=layer.name: outputs.update({at: output})
        )
        for layer in layers
    ]
    (batch,) = of.batches(3)
    with torch.no_grad():
        forward(model, batch.input_ids, batch.mask.long())
        for hook in hooks:
            hook.remove()
        keep = of.mask.reshape(-1)
        walked = list(walk(model, layers, of.batches(3), torch.device("cpu")))
        assert len(walked) == len(layers)
        for seen in walked:
            experts = packed(model, seen.layer)
            wanted = outputs[seen.layer.name]
            if seen.layer.kind.scales_inputs:
                wanted = wanted.view(seen.layer.num_experts, len(keep), -1).sum(0)
                scaled = torch.zeros_like(seen.hidden)
                for token, (chosen, weights) in enumerate(zip(seen.experts, seen.weights, strict=True)):
                    for expert, weight in zip(chosen.tolist(), weights, strict=True):
                        scaled[token] += experts.expert(expert, weight * seen.hidden[token])
                found = scaled
            else:
                found = experts.weighted_sum(seen.hidden, seen.experts, seen.weights)
            if family == "jetmoe":
                found = found + experts.bias
            wanted = wanted.reshape(len(keep), -1)[keep]
            torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5 * float(wanted.abs().max()))


@pytest.mark.cases(12)
@pytest.mark.parametrize("family", KINDS_OF_EXPERTS)
def test_pads_change_no_count(family: str) -> None:
    model, of = build(family), rows(family)
    layers = find_expert_layers(model)
    device, prefill = torch.device("cpu"), torch.tensor([5, 4, 2])
    together = [count_routing(seen, 3, prefill)[0] for seen in walk(model, layers, of.batches(3), device)]
    for row, length in enumerate(of.mask.sum(1).tolist()):
        alone = Sequences(ids=of.ids[row : row + 1, :length], mask=of.mask[row : row + 1, :length], domains=("x",))
        for counts, seen in zip(together, walk(model, layers, alone.batches(1), device), strict=True):
            assert (counts[row] == count_routing(seen, 1, prefill[row : row + 1])[0][0]).all()


@pytest.mark.cases(3)
@pytest.mark.parametrize("family", KINDS_OF_EXPERTS)
def test_routing_of_a_streamed_model_is_that_of_hooks_on_an_ordinary_forward(family: str, tmp_path: Path) -> None:
    """Counts and weight sums of the streamed walk, all batches in lockstep, against plain hooks batch by batch."""
    of = rows(family)
    source = open_source(str(save(family, tmp_path / "model", with_tokenizer=False)))
    whole = loading.load_model(source, torch.float32, torch.device("cpu"))
    layers = find_expert_layers(whole)
    totals = {layer.name: torch.zeros(2, layer.num_experts, dtype=torch.float64) for layer in layers}
    keep = torch.ones(0)

    def count(layer: Any, tap: Any, module: Any, arguments: Any, output: Any = None) -> None:
        _, experts, weights = tap.read(module, arguments, output)
        for chosen, weight in zip(experts[keep].reshape(-1).tolist(), weights[keep].reshape(-1).tolist(), strict=True):
            if chosen < layer.num_experts:
                totals[layer.name] += torch.tensor([[1.0], [weight]]) * torch.eye(layer.num_experts)[chosen]

    for layer in layers:
        tap = layer.kind.tap(layer.name)
        module = whole.get_submodule(tap.path)
        hook = module.register_forward_hook if tap.after else module.register_forward_pre_hook
        hook(partial(count, layer, tap))
    for batch in of.batches(1):
        keep = batch.mask.reshape(-1)
        with torch.no_grad():
            forward(whole, batch.input_ids, None if bool(batch.mask.all()) else batch.mask.long())
    streamed = StreamedModel(source, torch.float32, torch.device("cpu"))
    walked = list(walk(streamed.model, streamed.layers, of.batches(1), torch.device("cpu"), streamed=streamed))
    for seen in walked:
        counts, scores = (array.sum((0, 1)) for array in count_routing(seen, 3, torch.tensor([5, 4, 2])))
        assert counts.tolist() == totals[seen.layer.name][0].tolist()
        assert scores == pytest.approx(totals[seen.layer.name][1].numpy(), rel=1e-6)
