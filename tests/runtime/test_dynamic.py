"""Experts whose precision follows the workload: budget and pools, versions that passes see, copies that fail."""

from __future__ import annotations

import itertools
import json
import random
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from family_models import build as tiny_model
from replicas_made import Made
from tiny_models import FULL

from moeq.errors import ModelError
from moeq.models.experts import ExpertLayer
from moeq.quantizers.layer import made_on_demand
from moeq.recipe import LossesSection
from moeq.runtime.dynamic.copies import Switch
from moeq.runtime.dynamic.model import DynamicMoE, DynamicSettings
from moeq.runtime.dynamic.pools import HIGH, LOW, BlockPool, Budget, Pools
from moeq.runtime.experts_by_row import Dequantized, Rows, by_row
from moeq_kernels.cpu.kernel import CpuKernel
from moeq_kernels.description import LayerOfExperts

CPU = torch.device("cpu")
UNITS = {"hidden_size": 64, "intermediate_size": 96}  # whole units of 32 inputs
NESTED_GRID = LossesSection(group_size=32, bits=[2, 3, 4], methods=["rtn"], nested=True)
LOW_BITS = 2
IDS = torch.tensor([[3, 7, 1, 4, 9, 2, 8, 5]])


class Source(Made):
    """Replicas that can fail, wait, or be counted."""

    def __init__(self, model: Any, bits: tuple[int, ...] = (2, 4)) -> None:
        super().__init__(model, bits)
        self.before: Callable[[ExpertLayer, int, int], None] = lambda *_: None
        self.asked = 0

    def expert(self, layer: ExpertLayer, expert: int, key: int) -> Any:
        self.asked += 1
        self.before(layer, expert, key)
        return super().expert(layer, expert, key)


class Nested(Source):
    """Replicas of 2 bits that are the leading bits of those of 4; every test has the same."""

    wide: ClassVar[dict[tuple[int, int], Any]] = {}

    def expert(self, layer: ExpertLayer, expert: int, key: int) -> Any:
        self.asked += 1
        self.before(layer, expert, key)
        if (layer.index, expert) not in self.wide:
            floats = {name: stack[expert].float() for name, stack in self.original[layer.index].items()}
            made = made_on_demand("rtn", floats, NESTED_GRID, 4, layer=layer, expert=expert)
            self.wide[layer.index, expert] = made
        wide = self.wide[layer.index, expert]
        return {name: weight.leading(key) for name, weight in wide.items()}, {}


def settings(**given: Any) -> DynamicSettings:
    usual = {"high": 4, "low": 2, "memory_bytes": 1 << 30, "background": False, "period": 4, "certainty": 0.0}
    return DynamicSettings(**{**usual, "threshold": 0.0, **given})


def made(family: str = "mixtral", **given: Any) -> tuple[DynamicMoE, Source]:
    """A tiny model, half of whose experts are in high precision unless memory is given."""
    torch.manual_seed(0)
    nested: bool = given.pop("nested", False)
    sizes = UNITS if nested else {}
    model = tiny_model(family, **sizes).eval()
    source = Nested(model) if nested else Source(model)
    said: list[str] = given.pop("said", [])
    probe = DynamicMoE(tiny_model(family, **sizes).eval(), source.layers, source, settings(), policy="fixed")
    probe.close()
    budget = probe.budget
    half = min(budget.layers) // 2
    wanted = budget.least_bytes + half * len(budget.layers) * (budget.high_bytes - budget.low_bytes)
    follows = given.pop("follows", None)
    options = {"memory_bytes": wanted} | given
    dynamic = DynamicMoE(
        model, source.layers, source, settings(**options), follows=follows, policy="fixed", say=said.append
    )
    assert dynamic.places == half or "memory_bytes" in given
    return dynamic, source


def high_of(dynamic: DynamicMoE) -> list[list[bool]]:
    return [dynamic.high(layer).tolist() for layer in range(len(dynamic.layers))]


def nothing_lost(dynamic: DynamicMoE) -> None:
    """Every expert has one block, no block is shared, and all others are free."""
    places = [place for layer in dynamic.copies.layers for place in layer.places()]
    assert len({block for _, block in places}) == len(places)
    for version, pool in enumerate(dynamic.pools.pools):
        used = [block for of, block in places if of == version]
        assert set(used) <= set(pool.starts)
        assert pool.free == pool.count - len(used)


# budget and pools


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


# what goes wrong


@pytest.mark.parametrize("error", [OSError("disk read error"), ValueError("SHA-256 differs"), RuntimeError("gone")])
@pytest.mark.parametrize("background", [False, True])
def test_copies_that_fail_leave_the_old_versions(error: Exception, background: bool) -> None:
    said: list[str] = []
    dynamic, source = made(said=said, background=background, ema=0.5)
    before = high_of(dynamic)

    def fail(*_: Any) -> None:
        raise error

    source.before = fail
    wanted = dynamic(input_ids=IDS).logits
    for seed in range(30):
        torch.manual_seed(seed)
        dynamic(input_ids=torch.randint(0, 30, (2, 6)))
    assert dynamic.copies.settle()
    assert dynamic.copies.counts.failures > 1
    assert high_of(dynamic) == before
    assert len(said) == 1
    assert str(error) in said[0]
    assert torch.equal(dynamic(input_ids=IDS).logits, wanted)
    nothing_lost(dynamic)
    source.before = lambda *_: None  # the disk is back
    for seed in range(30):
        torch.manual_seed(seed)
        dynamic(input_ids=torch.randint(0, 30, (2, 6)))
        if background:
            dynamic.copies.settle()
    assert dynamic.copies.counts.promotions > 0
    nothing_lost(dynamic)
    dynamic.close()


def test_a_thread_that_ends_is_followed_by_another() -> None:
    said: list[str] = []
    dynamic, source = made(said=said, background=True, ema=0.5)

    def end(*_: Any) -> None:
        source.before = lambda *_: None
        raise SystemExit

    source.before = end
    for seed in range(60):
        torch.manual_seed(seed)
        dynamic(input_ids=torch.randint(0, 30, (2, 6)))
        time.sleep(0.002)
    assert dynamic.copies.settle()
    assert dynamic.copies.counts.restarts == 1
    assert dynamic.copies.counts.promotions > 0
    assert said == ["the thread that copies experts has ended, another one goes on"]
    nothing_lost(dynamic)
    dynamic.close()


def test_a_slow_disk_stalls_nothing() -> None:
    dynamic, source = made(background=True, ema=0.5, period=2)
    began, go = threading.Event(), threading.Event()

    def wait(*_: Any) -> None:
        began.set()
        assert go.wait(60)

    source.before = wait
    for seed in range(20):  # all of them while one copy waits
        torch.manual_seed(seed)
        dynamic(input_ids=torch.randint(0, 30, (2, 6)))
    assert began.wait(20)
    assert dynamic.copies.counts.promotions + dynamic.copies.counts.demotions == 0
    assert dynamic.copies.in_flight == 1
    go.set()
    assert dynamic.copies.settle()
    nothing_lost(dynamic)
    dynamic.close()


def test_a_full_host_cache_reads_again_and_keeps_its_bound() -> None:
    counts = []
    for host_bytes in (1, 1 << 30):
        dynamic, source = made(host_bytes=host_bytes)
        loaded, host, copies = source.asked, dynamic.copies.host, dynamic.copies
        wanted = dynamic(input_ids=IDS).logits
        for turn in range(6):
            for number in range(len(dynamic.layers)):
                ups, downs = ((3, 4, 5), (0, 1, 2))[:: -1 if turn % 2 else 1]
                pairs = zip(ups, downs, strict=True)
                copies.request([s for up, down in pairs for s in (Switch(number, up, HIGH), Switch(number, down, LOW))])
                assert host.kept_bytes <= host.nbytes <= max(host_bytes, sum(host.sizes))
        assert torch.equal(dynamic(input_ids=IDS).logits, wanted)
        assert source.asked - loaded == copies.counts.host_misses
        assert copies.counts.failures == copies.counts.without_room == 0
        counts.append((copies.counts.host_misses, copies.counts.host_hits))
        nothing_lost(dynamic)
        dynamic.close()
        assert host.kept_bytes == 0
    assert counts == [(108, 0), (36, 72)]


def test_versions_are_read_ahead_of_decisions() -> None:
    """What follows hot experts lies in the cache when it is asked for, and what is copied stays there meanwhile."""
    experts = 6
    follows = [np.roll(np.eye(experts), 3, axis=1)] * 2  # expert e is followed by e + 3
    dynamic, source = made(follows=follows, prefetch=2, ema=0.5)
    asked: list[tuple[int, int, int]] = []
    source.before = lambda layer, expert, key: asked.append((layer.index, expert, key))
    weights = torch.full((4, 2), 0.5)
    for chosen in ((0, 1), (4, 5)):  # the first layer's, then what follows them in the next two
        for _ in range(2 * dynamic.settings.period):
            for number, module in enumerate(dynamic.modules):
                index = torch.tensor([(0, 1) if number == 0 else chosen] * 4)
                module(torch.randn(4, module.layer.hidden_size), index, weights)
            dynamic._after_step()
    counts = dynamic.copies.counts
    assert counts.prefetched >= counts.prefetch_hits > 0
    assert len(asked) == len(set(asked))  # nothing is read twice
    assert dynamic.copies.host.kept_bytes <= dynamic.copies.host.nbytes
    nothing_lost(dynamic)


def test_what_follows_in_another_model_is_refused() -> None:
    with pytest.raises(ModelError, match="experts follow each other"):
        made(follows=[np.eye(3)])


def test_a_log_that_cannot_be_written_ends_nothing() -> None:
    said: list[str] = []
    dynamic, _ = made(said=said)
    dynamic._log = open("/dev/full", "w", encoding="utf-8")  # noqa: SIM115  which closes it
    for _ in range(9):
        dynamic(input_ids=IDS)
    assert len(said) == 1
    assert "no longer logged" in said[0]
    assert dynamic.decisions == 2
    dynamic.close()


def test_decisions_are_written_as_lines(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = tiny_model("mixtral").eval()
    source = Source(model)
    with DynamicMoE(model, source.layers, source, settings(), policy="fixed", log=tmp_path / "log.jsonl") as dynamic:
        for _ in range(9):
            dynamic(input_ids=IDS)
    lines = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text("utf-8").splitlines()]
    assert [line.get("step") for line in lines] == [None, 4, 8, 9]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"low": 4, "high": 2}, "low precision has 4 bits"),
        ({"high": 8}, "no"),
        ({"memory_bytes": 1000}, "all experts in low precision"),
        ({"period": 0}, "period is 0"),
        ({"transient": 0}, "transient is 0"),
        ({"ema": 1.0}, "ema is 1"),
        ({"busy": 0.0}, "busy is 0"),
    ],
)
def test_what_cannot_be_is_refused(given: dict[str, int], said: str) -> None:
    model = tiny_model("mixtral").eval()
    source = Source(model)
    with pytest.raises(ModelError, match=said):
        DynamicMoE(model, source.layers, source, settings(**given))


def test_it_begins_with_the_most_important() -> None:
    model = tiny_model("mixtral").eval()
    source = Source(model)
    experts = source.layers[0].num_experts
    importance = np.array([np.roll(np.arange(experts), number) for number in range(len(source.layers))], dtype=float)
    budget = DynamicMoE(tiny_model("mixtral").eval(), source.layers, source, settings(), policy="fixed").budget
    memory = budget.least_bytes + len(budget.layers) * (budget.high_bytes - budget.low_bytes)
    given = settings(memory_bytes=memory)
    dynamic = DynamicMoE(model, source.layers, source, given, importance=importance, policy="fixed")
    assert [row.index(True) for row in high_of(dynamic)] == importance.argmax(axis=1).tolist()
    assert all(sum(row) == 1 for row in high_of(dynamic))
