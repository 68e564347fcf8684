"""Experts whose precision follows the workload: budget and pools, versions that passes see, copies that fail."""

from __future__ import annotations

import copy
import itertools
import pickle
import random
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import numba
import pytest
import torch
from dynamic_made import CPU, IDS, LOW_BITS, Source, high_of, made, nothing_lost, settings
from family_models import build as tiny_model
from tiny_models import FULL

from moeq.errors import ModelError
from moeq.runtime.dynamic.copies import Switch
from moeq.runtime.dynamic.model import DynamicMoE
from moeq.runtime.dynamic.pools import HIGH, LOW, BlockPool, Budget, Pools
from moeq.runtime.experts_by_row import Dequantized, Rows, by_row
from moeq_kernels.cpu import nested_planes
from moeq_kernels.cpu.kernel import CpuKernel
from moeq_kernels.description import LayerOfExperts

# budget and pools


@pytest.mark.full
def test_a_million_blocks_taken_and_given_back() -> None:
    rng, pool, held = random.Random(0), BlockPool(64, 96, 40), []
    for _ in range(1_000_000):
        if held and (rng.random() < 0.5 or not pool.free):
            place = rng.randrange(len(held))
            held[place], held[-1] = held[-1], held[place]
            pool.give_back(held.pop())
        else:
            block = pool.take()
            assert block is not None
            held.append(block)
    assert len(set(held)) == len(held) == pool.count - pool.free
    assert all(block in pool.starts for block in held)
    for block in held:
        pool.give_back(block)
    assert pool.free == pool.count
    with pytest.raises(ValueError, match="not taken"):
        pool.give_back(64)


def test_an_empty_pool_says_so() -> None:
    pool = BlockPool(0, 10, 1)
    assert pool.take() == 0
    assert pool.take() is None


def test_a_budget_by_hand() -> None:
    """Two layers of 8 experts, 100 and 400 bytes, two in transit: 2*n*400 + 2*(8-n)*100 + 2*500 <= memory - other."""
    budget = Budget(
        low_bytes=100, high_bytes=400, layers=[8, 8], transient=2, memory_bytes=5500, other_bytes={"shared": 1000}
    )
    assert budget.least_bytes == 16 * 100 + 1000
    assert budget.places == (4500 - 2600) // 600 == 3
    assert budget.pool_bytes == (10 + 2) * 100 + (6 + 2) * 400 <= 4500
    pools = Pools(budget, 64)
    assert pools.held.nbytes == 64 + budget.pool_bytes
    every = [(version, block) for version in (LOW, HIGH) for block in pools.pools[version].starts]
    ends = sorted((block, block + pools.pools[version].size) for version, block in every)
    assert ends[0][0] == 64
    assert ends[-1][1] == pools.held.nbytes
    assert all(one[1] == following[0] for one, following in itertools.pairwise(ends))


def test_less_than_all_in_low_precision_is_refused_with_the_sum() -> None:
    budget = Budget(
        low_bytes=1 << 20, high_bytes=4 << 20, layers=[8], transient=1, memory_bytes=12 << 20,
        other_bytes={"all but the experts": 1 << 20},
    )  # fmt: skip
    with pytest.raises(ModelError) as caught:
        _ = budget.places
    text = str(caught.value)
    for part in ("all but the experts 1.00 MiB", "low precision 8.00 MiB", "5.00 MiB", "14.0 MiB", "12.0 MiB"):
        assert part in text


# what forward passes see


@pytest.mark.parametrize("family", ["mixtral", "dbrx", "llama4_text", "switch_transformers", "jetmoe", "gpt_oss"])
def test_every_kind_of_experts_runs(family: str) -> None:
    torch.manual_seed(0)
    model = tiny_model(family).eval()
    if model.config.is_encoder_decoder:
        ids: dict[str, Any] = {"input_ids": IDS, "decoder_input_ids": IDS}
    else:
        ids = {"input_ids": IDS}
    with torch.no_grad():
        wanted = model(**ids).logits
        source = Source(model)
        with DynamicMoE(model, source.layers, source, settings(high=16, low=4), policy="fixed") as dynamic:
            assert dynamic.places == min(layer.num_experts for layer in source.layers)
            found = dynamic(**ids).logits
    torch.testing.assert_close(found, wanted, rtol=2e-3, atol=2e-3)


def test_it_is_not_saved_without_its_experts(tmp_path: Path) -> None:
    model = tiny_model("mixtral").eval()
    source = Source(model)
    with DynamicMoE(model, source.layers, source, settings(high=16, low=4), policy="fixed") as dynamic:
        before = dynamic(input_ids=IDS).logits
        for way in (partial(model.save_pretrained, tmp_path), model.state_dict):
            with pytest.raises(
                ModelError, match="does not hold their weights, and cannot be saved; take the checkpoint"
            ):
                way()
        for held, copied in itertools.product((dynamic, model, dynamic.modules[0]), (copy.deepcopy, pickle.dumps)):
            with pytest.raises(ModelError, match="cannot be copied or pickled; take the checkpoint"):
                copied(held)
        assert torch.equal(dynamic(input_ids=IDS).logits, before)
    assert not list(tmp_path.glob("*.safetensors"))


@pytest.mark.cases(1)
@pytest.mark.parametrize("width", [2, 4])
def test_all_high_or_all_low_is_the_static_model_exactly(width: int) -> None:
    torch.manual_seed(0)
    static = tiny_model("mixtral").eval()
    source = Source(static)
    keys = torch.full((1, len(source.layers), source.layers[0].num_experts), width)
    with torch.no_grad():
        with by_row(static, source.layers, Dequantized(source, static.dtype, CPU), lambda: Rows(keys=keys)):
            wanted = static(input_ids=IDS).logits
        memory = 1 << 30 if width == 4 else made()[0].budget.least_bytes
        dynamic, _ = made(memory_bytes=memory)
        assert high_of(dynamic) == [[width == 4] * len(row) for row in high_of(dynamic)]
        found = dynamic(input_ids=IDS).logits
    assert torch.equal(found, wanted)


def test_the_same_tokens_give_the_same_decisions_and_bits() -> None:
    results = []
    for _ in range(2):
        dynamic, _ = made()
        torch.manual_seed(1)
        logits = [dynamic(input_ids=torch.randint(0, 30, (1, 6))).logits for _ in range(40)]
        results.append((logits, high_of(dynamic), dynamic.summary()))
        nothing_lost(dynamic)
        dynamic.close()
    assert all(torch.equal(one, two) for one, two in zip(results[0][0], results[1][0], strict=True))
    assert results[0][1:] == results[1][1:]
    assert results[0][2]["promotions"] == results[0][2]["demotions"] > 0


def test_precision_follows_what_is_chosen() -> None:
    dynamic, _ = made(ema=0.5)
    for module in dynamic.modules:
        module.forward(torch.randn(4, module.layer.hidden_size), torch.tensor([[0, 1]] * 4), torch.full((4, 2), 0.5))
    for wanted in ([1, 2], [3, 0]):
        for _ in range(3 * dynamic.settings.period):
            for module in dynamic.modules:
                index, weights = torch.tensor([wanted] * 4), torch.full((4, 2), 0.5)
                module(torch.randn(4, module.layer.hidden_size), index, weights)
            dynamic._after_step()
        assert all(row[wanted[0]] and row[wanted[1]] for row in high_of(dynamic))
        assert all(sum(row) <= dynamic.places for row in high_of(dynamic))


@pytest.mark.full
def test_layers_are_of_one_set_of_versions_while_another_thread_changes_them() -> None:
    dynamic, _ = made(period=1 << 30, background=True)
    kernel, stop, checked = CpuKernel(), threading.Event(), []

    def checking(module: Any) -> None:
        versions = module.versions

        def call(hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
            with versions.reading() as view:
                result = view(hidden, index, weights)
                names = [*view.projections, "down_proj"]
                matrices = [{name: view.matrix(e, name) for name in names} for e in range(module.num_experts)]
            gate, biases = module.math.gate, [{}] * len(matrices)
            fixed = LayerOfExperts(matrices=matrices, biases=biases, gate=gate, activation=module.math.activation)
            bits = tuple(one["down_proj"].bits for one in matrices)
            checked.append((bits, torch.equal(kernel.layer(fixed)(hidden, index, weights), result)))
            return result

        module.versions = call

    def flip() -> None:
        rng = random.Random(0)
        while not stop.is_set():
            there = high_of(dynamic)
            switches = []
            for number, row in enumerate(there):
                up, down = ([e for e, high in enumerate(row) if high == wanted] for wanted in (False, True))
                switches += [Switch(number, rng.choice(down), LOW)] if down else []
                switches += [Switch(number, rng.choice(up), HIGH)] if up else []
            dynamic.copies.request(switches)
            time.sleep(0.0005)
            dynamic.copies.register()

    for module in dynamic.modules:
        checking(module)
    thread = threading.Thread(target=flip)
    thread.start()
    try:
        for seed in range(6):
            torch.manual_seed(seed)
            dynamic.generate(torch.randint(0, 30, (1, 4)), max_new_tokens=5, do_sample=False)
    finally:
        stop.set()
        thread.join()
    assert all(equal for _, equal in checked)
    assert len({bits for bits, _ in checked}) > 3
    assert dynamic.copies.settle()
    nothing_lost(dynamic)
    dynamic.close()


@pytest.mark.cases(1)
@pytest.mark.parametrize("nested", [False, True])
def test_promotions_and_demotions_lose_no_block(nested: bool) -> None:
    """A million of them with MOEQ_FULL=1."""
    dynamic, _ = made(nested=nested)
    rng, wanted = random.Random(0), 1_000_000 if FULL else 600
    while dynamic.copies.counts.promotions + dynamic.copies.counts.demotions < wanted:
        switches = []
        for number, row in enumerate(high_of(dynamic)):
            ups, downs = ([e for e, high in enumerate(row) if high == wanted] for wanted in (False, True))
            switches += [Switch(number, rng.choice(downs), LOW)] if downs else []
            switches += [Switch(number, rng.choice(ups), HIGH)] if ups else []
        rng.shuffle(switches)
        dynamic.copies.request(switches)
        dynamic.copies.register()
        assert dynamic.copies.in_flight <= dynamic.settings.transient
    assert dynamic.copies.settle()
    nothing_lost(dynamic)


@pytest.mark.full
def test_nested_promotions_bring_the_missing_bits_only() -> None:
    """The same decisions and bits as whole copies, with less than half the bytes, and nothing read for a demotion."""
    results = []
    for planes in (True, False):
        dynamic, source = made(nested=True, planes=planes, ema=0.5)
        assert dynamic.summary()["planes"] is planes
        loaded, demoted = source.asked, []
        source.before = lambda layer, expert, key: demoted.append(key)  # noqa: B023
        torch.manual_seed(1)
        logits = [dynamic(input_ids=torch.randint(0, 30, (1, 2))).logits for _ in range(40)]
        counts = dynamic.copies.counts
        results.append((logits, high_of(dynamic), counts.copied_bytes / counts.promotions))
        assert counts.promotions > 3
        assert counts.failures == 0
        assert source.asked - loaded == counts.host_misses == len(demoted)
        assert (LOW_BITS in demoted) is not planes
        nothing_lost(dynamic)
        for number, layer in enumerate(dynamic.copies.layers):
            for expert, (version, _) in enumerate(layer.places()):
                wanted, _ = source.expert(dynamic.layers[number], expert, 4 if version == HIGH else 2)
                for name, matrix in wanted.items():
                    found = layer.matrix(expert, name)
                    for part, tensor in matrix.parts().items():
                        assert torch.equal(found.parts()[part], tensor)
        dynamic.close()
    assert all(torch.equal(one, two) for one, two in zip(results[0][0], results[1][0], strict=True))
    assert results[0][1] == results[1][1]
    assert results[0][2] < results[1][2] / 2


def test_nothing_is_left_to_compile_for_a_first_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread that copies would compile for seconds, and then rest thrice as long."""
    asked: set[tuple[Any, ...]] = set()
    for name in ("_join", "_part", "_copy_grid"):
        monkeypatch.setattr(nested_planes, name, noted(name, getattr(nested_planes, name), asked))
    dynamic, _ = made(nested=True)
    compiled = set(asked)
    assert compiled
    asked.clear()
    for row in (high_of(dynamic), [[not high for high in row] for row in high_of(dynamic)]):
        dynamic.copies.request([Switch(0, expert, LOW if high else HIGH) for expert, high in enumerate(row[0])])
    counts = dynamic.summary()
    assert counts["promotions"]
    assert counts["demotions"]
    assert asked
    assert asked <= compiled
    dynamic.close()


def noted(name: str, function: Any, asked: set[tuple[Any, ...]]) -> Any:
    """The function, the types of whose arguments are kept."""

    def call(*arguments: Any) -> Any:
        asked.add((name, *map(numba.typeof, arguments)))
        return function(*arguments)

    return call
