"""Packed modules through kernels: every kind of experts, the bytes that are held, and what is stored, bit for bit."""

from __future__ import annotations

import copy
import gc
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from family_models import build, inputs
from packed_layers import matrix_of
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM

from moeq.errors import ModelError
from moeq.models.experts import ExpertLayer, find_expert_layers
from moeq.runtime.arranged import GRADIENTS, OFFLOADED, TRAINED, TRANSFORMED
from moeq.runtime.checkpoint import load_checkpoint
from moeq.runtime.packed_experts import PACKED, PackedExperts
from moeq.runtime.packed_modules import PackedEmbedding, PackedModule, TiedHead
from moeq_kernels import choice
from moeq_kernels.packed import PackedWeight
from moeq_kernels.reference import ReferenceLayer
from moeq_kernels.widths import Encoding

Exported = Callable[[str], Path]
GRID = Encoding(group_size=16, symmetric=False)
CPU = torch.device("cpu")
KINDS = {  # of experts, and whether the gate is one that a kernel computes by itself
    "mixtral": "silu", "gpt_oss": None, "aria_text": "silu", "nemotron_h": "relu2", "longcat_flash": "silu",
    "minimax_m3_vl_text": None, "llama4_text": "silu", "dbrx": "silu", "jetmoe": "silu",
    "switch_transformers": "relu", "muse_spark": "silu", "deepseek_v4": None, "zaya": "silu",
}  # fmt: skip
WIDTHS = (4, 2, 3, 16, 8, 1)


def filled(packed: PackedExperts, group_size: int = 16) -> PackedExperts:
    """Random codes, scales and zero points of a size at which nothing is lost or explodes."""
    seed = 0
    for _, _, linear in packed.linears():
        rows = next(iter(linear.buffers())).shape[0] if not linear.biased else linear.get_buffer("bias").shape[0]
        made = matrix_of(rows, linear.inputs, linear.bits, group_size, dtype=torch.float32, seed=(seed := seed + 1))
        parts = made.parts() if isinstance(made, PackedWeight) else {"dense": made / 8}
        for name, part in parts.items():
            linear.get_buffer(name).copy_(part / 4 if name == "scales" else part)
        if linear.biased:
            linear.get_buffer("bias").normal_(generator=torch.Generator().manual_seed(seed))
    return packed


def packed(model: Any, layer: ExpertLayer, policy: choice.Policy = "fixed") -> PackedExperts:
    """A layer's experts, every one in another width, ready to be called."""
    bits = [WIDTHS[expert % len(WIDTHS)] for expert in range(layer.num_experts)]
    original = model.get_submodule(layer.name)
    with choice.choosing(policy):
        made = PACKED[layer.kind.name](layer, bits, encoding=GRID, original=original, dtype=torch.float32)
    return filled(made).eval()


def filled_linear(policy: choice.Policy = "fixed") -> PackedModule:
    """One of 70 rows and 64 inputs, ready to be called."""
    with choice.choosing(policy):
        linear = PackedModule(nn.Linear(64, 70, bias=False), 3, GRID)
    weight = matrix_of(70, 64, 3, 16)
    assert isinstance(weight, PackedWeight)
    for name, part in weight.parts().items():
        linear.get_buffer(name).copy_(part)
    return linear.eval()


def stored(module: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in module.state_dict().items()}


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return list(one) == list(other) and all(
        tensor.dtype == other[name].dtype and torch.equal(tensor, other[name]) for name, tensor in one.items()
    )


def calls(family: str) -> tuple[Any, list[tuple[ExpertLayer, tuple[Any, ...]]]]:
    """A model and what each layer's experts are called with."""
    model, seen = build(family), dict[str, tuple[Any, ...]]()
    layers = find_expert_layers(model)
    for layer in layers:
        model.get_submodule(layer.name).register_forward_pre_hook(
            lambda _, arguments, at=layer.name: seen.setdefault(at, arguments) and None
        )
    with torch.no_grad():
        model(**inputs(family))
    return model, [(layer, seen[layer.name]) for layer in layers if layer.name in seen]


@pytest.mark.cases(5)
@pytest.mark.parametrize("family", KINDS)
def test_every_kind_goes_through_the_kernel(family: str) -> None:
    """What the reference computes, from the same bits, which are there again afterwards."""
    model, seen = calls(family)
    for layer, arguments in seen[:2]:
        mine, plain = packed(model, layer), packed(model, layer, "reference")
        assert mine.math.activation == KINDS[family]
        before = stored(mine)
        with torch.no_grad():
            found, wanted = mine(*arguments), plain(*arguments)
        assert (mine.reason, plain.reason, mine.refused) == (None, None, None)
        assert isinstance(plain.prepared, ReferenceLayer)
        assert not isinstance(mine.prepared, ReferenceLayer)
        assert not any(linear.arranged is None for _, _, linear in mine.linears())
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5 * float(wanted.detach().abs().max()))
        assert wanted.abs().max() > 0
        assert same(stored(mine), before)
        assert mine.prepared is None, "what is looked at is put back"


def test_identity_experts_hand_through() -> None:
    model, ((layer, (hidden, index, weights, *_)), *_) = calls("longcat_flash")
    assert bool((index >= layer.num_experts).any()), "no token has an identity expert"
    mine, plain = packed(model, layer), packed(model, layer).train()
    with torch.no_grad():
        found, wanted = mine(hidden, index, weights), plain(hidden, index, weights)
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
    assert (mine.reason, plain.reason) == (None, TRAINED)


@pytest.mark.parametrize("family", ["mixtral", "llama4_text", "gpt_oss", "muse_spark"])
def test_gradients_are_those_of_the_stored_weights(family: str) -> None:
    """Of inputs and routing weights; where what is between the matrices may be trained, no kernel is asked."""
    model, ((layer, arguments), *_) = calls(family)
    results = []
    for module in (packed(model, layer), packed(model, layer).train()):
        given = [one.detach().clone().requires_grad_(one.is_floating_point()) for one in arguments[:3]]
        output = module(*given)
        (output * torch.linspace(-1, 1, output.numel()).view_as(output)).sum().backward()
        results.append([output, *(one.grad for one in given if one.requires_grad)])
        reason = GRADIENTS if family in ("gpt_oss", "muse_spark") else None
        assert module.reason == (TRAINED if module.training else reason)
    for mine, wanted in zip(*results, strict=True):
        torch.testing.assert_close(mine, wanted, rtol=1e-4, atol=1e-5 * float(wanted.detach().abs().max()))


def test_gradients_of_gradients_are_those_of_the_stored_weights() -> None:
    """Beside a residual, without which what is lost of them would be an error."""
    model, ((layer, (hidden, index, weights, *_)), *_) = calls("mixtral")
    results = []
    for module in (packed(model, layer), packed(model, layer).train()):
        rows, shares = (one.detach().clone().requires_grad_() for one in (hidden, weights))
        output = (rows.square() + module(rows, index, shares)).square().sum()
        first = torch.autograd.grad(output, (rows, shares), create_graph=True)
        results.append([*first, *torch.autograd.grad(sum(one.square().sum() for one in first), (rows, shares))])
    for mine, wanted in zip(*results, strict=True):
        torch.testing.assert_close(mine, wanted, rtol=1e-3, atol=1e-4 * float(wanted.detach().abs().max()))


def test_what_no_kernel_computes_is_computed_as_it_is_stored() -> None:
    model, ((layer, (hidden, index, weights, *_)), *_) = calls("mixtral")
    experts = packed(model, layer)
    with torch.no_grad():
        wanted = experts(hidden, index, weights)
        doubles = experts(hidden.double(), index, weights.double())
    assert experts.reason == "its inputs are torch.float64"
    torch.testing.assert_close(doubles.float(), wanted, rtol=1e-4, atol=1e-4)
    experts.get_submodule("0").to("meta")
    experts.prepare()
    assert (experts.prepared, experts.refused) == (None, OFFLOADED)


@pytest.mark.parametrize("stored_way", [False, True])
def test_a_number_that_no_expert_has_adds_nothing(stored_way: bool) -> None:
    """Below 0 as well as above the last one, whether a kernel computes or not."""
    model, ((layer, (hidden, index, weights, *_)), *_) = calls("mixtral")
    experts = packed(model, layer).train(stored_way)
    left = torch.rand(index.shape, generator=torch.Generator().manual_seed(0)) < 0.5
    with torch.no_grad():
        wanted = experts(hidden, index, weights.masked_fill(left, 0))
        for none in (-1, layer.num_experts):
            found = experts(hidden, index.masked_fill(left, none), weights)
            torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5 * float(wanted.abs().max()))
    assert experts.reason == (TRAINED if stored_way else None)


@pytest.mark.cases(3)
@pytest.mark.parametrize("family", KINDS)
def test_a_graph_holds_calls_of_packed_modules(family: str) -> None:
    """One graph, also where their first call is within, of the tensors that there are then."""
    model, ((layer, arguments), *_) = calls(family)

    def made() -> nn.ModuleList:
        with choice.choosing("fixed"):
            embeddings, linear = (
                PackedEmbedding(nn.Embedding(70, 64), 4, GRID),
                PackedModule(nn.Linear(64, 70, bias=False), 3, GRID),
            )
        for module in (embeddings, linear):
            weight = matrix_of(70, 64, module.bits, 16)
            assert isinstance(weight, PackedWeight)
            for name, part in weight.parts().items():
                module.get_buffer(name).copy_(part)
        tied = TiedHead(nn.Linear(64, 70, bias=False), embeddings)
        return nn.ModuleList([packed(model, layer), embeddings, linear, tied]).eval()

    def computed(modules: nn.ModuleList) -> Tensor:
        rows = modules[1](torch.tensor([[3, 69, 0], [2, 2, 16]])) * 2
        return modules[0](*arguments).sum() + modules[2](rows).sin().sum() + modules[3](rows).cos().sum()

    mine, plain = made(), made()
    torch.compiler.reset()
    compiled = torch.compile(computed, backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        wanted = computed(plain)
        assert torch.equal(compiled(mine), wanted)
        assert torch.equal(compiled(mine), wanted)
        assert [module.reason for module in mine[:3]] == [plain[0].reason, None, None]
        mine.train()  # computed with as it is stored
        torch.testing.assert_close(compiled(mine), wanted, rtol=1e-4, atol=1e-4)
        assert mine[2].reason == TRAINED


def test_modules_of_one_shape_share_a_graph_and_a_copy_is_another_module() -> None:
    """As where the layers of a model are compiled one by one: the graph has no module's name or number in it."""
    rows, graphs = torch.randn(3, 64), []

    def counted(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph

    one, other = filled_linear(), filled_linear()
    other.get_buffer("scales").mul_(2)
    copied = copy.deepcopy(other)
    copied.get_buffer("scales").mul_(2)
    torch.compiler.reset()
    with torch.no_grad():
        for linear in (one, other, copied):
            linear.compile(backend=counted, fullgraph=True)
            assert torch.equal(linear(rows), linear.product(rows))
        torch.testing.assert_close(copied(rows), 4 * one(rows))
    assert len(graphs) == 1


def test_gradients_pass_where_a_model_is_compiled() -> None:
    """A graph ends where a packed module is called and gradients may be asked for."""
    model, ((layer, arguments), *_) = calls("mixtral")
    experts, linear = packed(model, layer), filled_linear()

    def computed(hidden: Tensor) -> Tensor:
        return linear(torch.nn.functional.pad(experts(hidden, *arguments[1:]).sin(), (0, 24))).cos().sum()

    found = []
    torch.compiler.reset()
    for function in (computed, torch.compile(computed, backend="aot_eager")):
        hidden = arguments[0].detach().clone().requires_grad_()
        function(hidden).backward()
        found.append(hidden.grad)
    torch.testing.assert_close(found[1], found[0])


@pytest.mark.parametrize("policy", ["fixed", "reference"])
def test_what_a_trace_follows_is_refused(policy: choice.Policy) -> None:
    """A graph would hold whatever lay in memory, or the experts of its example only."""
    model, ((layer, arguments), *_) = calls("mixtral")
    experts, linear = packed(model, layer, policy), filled_linear(policy)
    with choice.choosing(policy):
        embeddings = PackedEmbedding(nn.Embedding(70, 64), 3, GRID).eval()
    embeddings.load_state_dict(linear.state_dict())
    rows, ids = torch.randn(3, 64), torch.tensor([[2, 69]])
    with torch.no_grad():
        for module, given in ((experts, arguments), (linear, (rows,)), (embeddings, (ids,))):
            module(*given)  # a kernel has its tensors by now
            with pytest.raises(ModelError, match="cannot be traced or exported"):
                torch.jit.trace(module, given)
            with pytest.raises(ModelError, match="cannot be traced or exported"):
                torch.export.export(module, given, strict=False)
            with FakeTensorMode(allow_non_fake_inputs=True) as fake, pytest.raises(ModelError, match="dequantized"):
                module(*map(fake.from_tensor, given))


@pytest.mark.parametrize("policy", ["fixed", "reference"])
def test_inputs_that_are_no_floating_point_numbers_are_refused(policy: choice.Policy) -> None:
    """As torch's products refuse them: weights in their type would be rounded to whole numbers."""
    model, ((layer, (hidden, *routing)), *_) = calls("mixtral")
    experts, linear = packed(model, layer, policy), filled_linear(policy)
    with torch.no_grad():
        for dtype in (torch.int64, torch.int8, torch.bool, torch.complex64):
            for module, given in ((experts, (hidden.to(dtype), *routing)), (linear, (torch.ones(3, 64, dtype=dtype),))):
                for trained in (False, True):
                    with pytest.raises(RuntimeError, match=f"floating-point numbers, these inputs are {dtype}"):
                        module.train(trained)(*given)


def test_inputs_on_another_device_are_no_bytes_of_a_kernel() -> None:
    linear = filled_linear("fixed")
    with torch.no_grad():
        linear(torch.randn(3, 64))
        assert linear(torch.empty(3, 64, device="meta")).is_meta
    assert linear.reason == "its weights lie on cpu, its inputs on meta"


@pytest.mark.parametrize("family", ["mixtral", "llama4_text", "gpt_oss"])
def test_transforms_and_forward_mode_see_the_stored_weights(family: str) -> None:
    """Of torch.func, also where a kernel has the tensors by then and has them again after."""
    model, ((layer, (hidden, *others)), *_) = calls(family)
    experts, linear = packed(model, layer), filled_linear()
    toward = torch.randn(hidden.shape, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        before = experts(hidden, *others)
        plain = PackedModule.values(linear, torch.float32)
        linear(torch.randn(3, 64))
    plain_layer = packed(model, layer).train()

    def derived(module: nn.Module) -> list[Tensor]:
        _, forward = torch.func.jvp(lambda rows: module(rows, *others), (hidden,), (toward,))
        with forward_ad.dual_level():
            dual = forward_ad.unpack_dual(module(forward_ad.make_dual(hidden, toward), *others)).tangent
        gradient = torch.func.grad(lambda rows: module(rows, *others).square().sum())(hidden)
        assert isinstance(dual, Tensor)
        return [forward, dual, gradient]

    for mine, wanted in zip(derived(experts), derived(plain_layer), strict=True):
        torch.testing.assert_close(mine, wanted, rtol=1e-4, atol=1e-4 * float(wanted.abs().max()))
    assert experts.reason == TRANSFORMED
    assert torch.equal(experts(hidden, *others), before)
    assert experts.reason is None
    rows = torch.randn(2, 3, 64)
    torch.testing.assert_close(torch.func.vmap(linear)(rows), rows @ plain.T, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(torch.func.jacrev(linear)(rows[0, 0][None])[0, :, 0], plain, rtol=1e-4, atol=1e-4)


def test_what_inference_mode_puts_back_is_trained_with_and_written_over() -> None:
    model, ((layer, arguments), *_) = calls("gpt_oss")
    experts = packed(model, layer)
    with torch.inference_mode():
        experts(*arguments)
        before = {name: tensor.clone() for name, tensor in experts.state_dict().items()}
    assert not any(tensor.is_inference() for tensor in experts.state_dict().values())
    rows = arguments[0].detach().clone().requires_grad_()
    experts.train()(rows, *arguments[1:]).sum().backward()
    assert rows.grad is not None
    assert rows.grad.abs().sum() > 0
    experts.load_state_dict(before)
    assert same(stored(experts), before)


def test_training_puts_back_and_evaluating_prepares_again() -> None:
    model, ((layer, arguments), *_) = calls("mixtral")
    experts = packed(model, layer)
    before = stored(experts)
    with torch.no_grad():
        experts(*arguments)
        assert experts.prepared is not None
        experts.train()
        assert experts.prepared is None
        assert same(before, {name: buffer.clone() for name, buffer in experts.named_buffers()})
        experts.eval()(*arguments)
    assert experts.prepared is not None


def test_a_copy_has_its_own_bits() -> None:
    model, ((layer, arguments), *_) = calls("gpt_oss")
    experts = packed(model, layer)
    with torch.no_grad():
        wanted = experts(*arguments)
        other = copy.deepcopy(experts)
        for buffer in other.buffers():
            buffer.zero_()
        assert torch.equal(experts(*arguments), wanted)
        other.load_state_dict(experts.state_dict())
        assert torch.equal(other(*arguments), wanted)


def test_moves_that_change_nothing_leave_the_kernel_what_it_has() -> None:
    model, ((layer, arguments), *_) = calls("mixtral")
    experts = packed(model, layer)
    with torch.no_grad():
        experts(*arguments)
        before = experts.prepared
        assert experts.to(CPU).to(torch.float32).prepared is before
        assert experts.to(torch.bfloat16).prepared is None, "it has dense matrices"
        experts(*(one.bfloat16() if one.is_floating_point() else one for one in arguments))
    assert experts.reason is None


@pytest.mark.full
@pytest.mark.parametrize("family", ["mixtral", "deepseek_v3", "gpt_oss", "cohere2_moe", "llama4_text", "dbrx",
                                    "jetmoe", "switch_transformers"])  # fmt: skip
def test_a_loaded_model_gives_the_same_tokens(
    family: str, exported: Exported, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Through kernels and the reference, in float32; and writes again what it was loaded from."""
    auto = AutoModelForSeq2SeqLM if family == "switch_transformers" else AutoModelForCausalLM
    ids, found = inputs(family)["input_ids"], []
    for kernel in ("", "reference"):
        monkeypatch.setenv("MOEQ_KERNEL", kernel)
        model = auto.from_pretrained(exported(family), dtype=torch.float32)
        modules = [one for one in model.modules() if isinstance(one, (PackedExperts, PackedModule))]
        assert all(one.prepared is not None for one in modules if not isinstance(one, PackedEmbedding))
        found.append(model.generate(ids, max_new_tokens=8, do_sample=False))
        assert {one.reason for one in modules} == {None}
        before = stored(model)
        model.save_pretrained(tmp_path / f"again{kernel}")
        assert same(before, stored(auto.from_pretrained(tmp_path / f"again{kernel}", dtype=torch.float32)))
    assert torch.equal(*found)


@pytest.mark.parametrize("biased", [False, True])
def test_linears_and_tied_heads_go_through_the_kernel(biased: bool) -> None:
    table, head = nn.Embedding(70, 64), nn.Linear(64, 70, bias=biased)
    with choice.choosing("fixed"):
        embeddings = PackedEmbedding(table, 4, GRID)
        linear = PackedModule(nn.Linear(64, 70, bias=biased), 3, GRID)
    tied = TiedHead(head, embeddings)
    modules = nn.ModuleList([embeddings, linear, tied])
    for module in (embeddings, linear):
        made = matrix_of(70, 64, module.bits, 16)
        assert isinstance(made, PackedWeight)
        for name, part in made.parts().items():
            module.get_buffer(name).copy_(part)
    if biased:
        linear.get_buffer("bias").copy_(head.bias.detach())
        tied.get_buffer("bias").copy_(head.bias.detach())
    rows, ids = torch.randn(2, 3, 64), torch.tensor([[3, 69, 0], [2, 2, 16]])
    with torch.no_grad():
        wanted = linear(rows), tied(rows), embeddings(ids)
        modules.eval()
        before = stored(modules)
        assert linear.prepared is embeddings.prepared is None
        found = linear(rows), tied(rows), embeddings(ids)
    assert linear.prepared is not None
    assert embeddings.prepared is not None, "a head and its embeddings are held once"
    assert (linear.reason, embeddings.reason) == (None, None)
    for mine, one in zip(found[:2], wanted[:2], strict=True):
        torch.testing.assert_close(mine, one, rtol=1e-5, atol=1e-5)
    assert torch.equal(found[2], wanted[2])
    given = rows.clone().requires_grad_()
    linear(given).sum().backward()
    torch.testing.assert_close(given.grad, linear.values(torch.float32).sum(0).expand_as(rows), rtol=1e-4, atol=1e-4)
    assert same(stored(modules), before)


def test_a_wrong_kernel_is_told_before_anything_is_read(exported: Exported, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOEQ_KERNEL", "fastest")
    with pytest.raises(ModelError, match="MOEQ_KERNEL: no kernel is called 'fastest'; take one of reference, cpu"):
        load_checkpoint(exported("mixtral"), torch.float32, CPU)


def test_what_moeq_refuses_while_transformers_loads_is_said_alone(
    exported: Exported, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not as if the checkpoint were at fault."""

    def refused(*_: Any) -> Any:
        raise ModelError("numba is told to compile nothing", where="NUMBA_DISABLE_JIT", do="leave it out")

    monkeypatch.setattr(choice, "prepared_layer", refused)
    with pytest.raises(ModelError) as told:
        load_checkpoint(exported("mixtral"), torch.float32, CPU)
    assert str(told.value) == "NUMBA_DISABLE_JIT: numba is told to compile nothing; leave it out"


@pytest.mark.cases(1)
@pytest.mark.parametrize("family", ["gpt_oss", "cohere2_moe"])
def test_no_file_of_packed_weights_stays_in_memory(family: str, exported: Exported, tmp_path: Path) -> None:
    """What is left of what was read, guards and biases, would keep all of its file mapped."""
    folder = shutil.copytree(exported(family), tmp_path / "copy")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    gc.collect()
    mapped = Path("/proc/self/maps").read_text("utf-8")
    assert f"{folder}/experts-layer-" not in mapped
    assert f"{folder}/others-" not in mapped
    del model


@pytest.mark.cases(1)
@pytest.mark.parametrize("family", ["mixtral", "gpt_oss"])
def test_the_footprint_of_a_model_counts_what_kernels_hold(family: str, exported: Exported) -> None:
    model: Any = AutoModelForCausalLM.from_pretrained(exported(family), dtype=torch.float32)
    prepared, beside = model.get_memory_footprint(), model.get_memory_footprint(return_buffers=False)
    assert beside == sum(one.nbytes for one in model.parameters())
    held = sum(one.prepared.nbytes for one in model.modules() if getattr(one, "prepared", None) is not None)
    assert prepared == held + sum(one.nbytes for one in (*model.parameters(), *model.buffers()))
    copied = copy.deepcopy(model)
    model.train()
    stored = model.get_memory_footprint()
    assert stored == sum(one.nbytes for one in (*model.parameters(), *model.buffers()))
    assert beside < stored <= prepared
    assert copied.get_memory_footprint.model is copied
    assert copied.get_memory_footprint() == stored  # copied as it is stored


def large(experts: int, hidden: int, intermediate: int, bits: list[Any]) -> PackedExperts:
    layer = ExpertLayer(
        index=0, name="experts", num_experts=experts, hidden_size=hidden, intermediate_size=intermediate
    )
    original = nn.Module()
    original.act_fn = nn.SiLU()
    with choice.choosing("fixed"):
        return PACKED["stacked"](
            layer, bits, encoding=Encoding(group_size=128, symmetric=False), original=original, dtype=torch.bfloat16
        ).eval()


def test_a_layer_holds_what_is_stored_and_little_more() -> None:
    """Of usual sizes; no copy of it in another form."""
    experts = large(6, 512, 256, [2, 3, 4, 8, 16, {"gate_proj": 2, "up_proj": 4, "down_proj": 3}])
    held = sum(buffer.nbytes for buffer in experts.buffers())
    experts.prepare()
    assert experts.prepared is not None
    left = sum(buffer.nbytes for buffer in experts.buffers())
    assert left < 100, "only guards"
    assert experts.prepared.nbytes <= 1.1 * held


def resident() -> int:
    """Bytes of this process in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.full
def test_memory_grows_by_what_is_stored() -> None:
    """Eight layers, prepared one after the other as after loading: what was there before is given back."""
    large(16, 1024, 512, [2, 3, 4, 4] * 4).prepare()  # compiled code, and what compiles it
    made = [large(16, 1024, 512, [2, 3, 4, 4] * 4) for _ in range(8)]
    for experts in made:
        for buffer in experts.buffers():
            buffer.fill_(1)
    held = sum(buffer.nbytes for experts in made for buffer in experts.buffers())
    one, before = held // len(made), resident()
    most = before
    for experts in made:
        experts.prepare()
        gc.collect()
        most = max(most, resident())
    assert all(experts.prepared is not None for experts in made)
    assert resident() - before <= 0.1 * held
    assert most - before <= 0.1 * held + 1.5 * one
