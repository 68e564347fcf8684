"""The GPU's form of experts whose precision follows the workload, in Triton's interpreter or on a GPU.

A device that does nothing before it is let (`late_streams`) stands for one that is behind: what is published, counted
and written again must wait for it, and nothing else may.
"""

from __future__ import annotations

import gc
import random
import threading
import time
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from dynamic_made import IDS, Source, as_published, drawn, high_of, made, nothing_lost, settings
from family_models import build as tiny_model
from late_streams import LateStreams
from triton_here import triton_here

from moeq.errors import ModelError
from moeq.runtime.dynamic import forms
from moeq.runtime.dynamic.copies import Switch
from moeq.runtime.dynamic.fixed import fix
from moeq.runtime.dynamic.forms import BESIDE, CpuForm, GpuForm, form_of
from moeq.runtime.dynamic.model import DynamicMoE
from moeq.runtime.dynamic.on_gpu import SeenThere
from moeq.runtime.dynamic.pools import HIGH, LOW
from moeq.runtime.dynamic.seen import Seen
from moeq_kernels.description import LayerOfExperts
from moeq_kernels.gpu.kernel import TritonLayer
from moeq_kernels.names import TRITON, VARIABLE
from moeq_kernels.streams import HostStreams

pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning")
CHOSEN = torch.tensor([[0, 1]])


@pytest.fixture(scope="module")
def triton() -> Iterator[str]:
    with triton_here() as device:
        yield device


@pytest.fixture
def place(triton: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """The device, with the form of a GPU."""
    if triton == "cpu":
        monkeypatch.setenv(VARIABLE, TRITON)
    return triton


@pytest.fixture
def late(place: str, monkeypatch: pytest.MonkeyPatch) -> LateStreams:
    """The streams of what is made next; on the CPU in any case."""
    monkeypatch.setenv(VARIABLE, TRITON)
    streams = LateStreams()
    monkeypatch.setattr(forms, "streams_of", lambda _device: streams)
    if place == "cuda":
        pytest.skip("a late device is one of Triton's interpreter")
    return streams


def equal(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    """Bit for bit; on a GPU, where two compilations of a product may contract it in two ways, but for its last bits."""
    return torch.allclose(found, wanted, 1e-5, 1e-5) if found.is_cuda else torch.equal(found, wanted)


def tell(dynamic: DynamicMoE, chosen: list[int], steps: int) -> None:
    """So many steps of which routers give those experts alone, without the model's own."""
    device = dynamic.pools.held.device
    index, weights = torch.tensor([chosen] * 2, device=device), torch.full((2, len(chosen)), 0.5, device=device)
    for _ in range(steps):
        for module in dynamic.modules:
            assert module.seen is not None
            module.seen.add(index, weights)
        dynamic.step()


@pytest.mark.cases(1)
@pytest.mark.parametrize("width", [2, 4])
def test_all_high_or_all_low_is_the_static_model_exactly(place: str, width: int) -> None:
    """Of high precision the whole model, of low precision a layer, since the interpreter takes its time."""
    torch.manual_seed(0)
    static = tiny_model("mixtral").eval()
    source, ids = Source(static), IDS[:, :1].to(place)
    static.to(place)
    form, example = form_of(torch.device(place)), [[source.expert(one, 0, 2)[0]] * 2 for one in source.layers]
    size, experts = form.block(example[0][0]).nbytes, [layer.num_experts for layer in source.layers]
    large = form.block(source.expert(source.layers[0], 0, 4)[0]).nbytes
    beside = form.beside(example, [{}] * len(experts), experts)
    least = beside + sum(experts) * size + settings().transient * (size + large)
    dynamic, _ = made(device=place, memory_bytes=1 << 30 if width == 4 else least)
    assert high_of(dynamic) == [[width == 4] * len(row) for row in high_of(dynamic)]
    fix(static, source.layers, source, [[width] * count for count in experts], "fixed")
    with torch.no_grad():
        if width == 4:
            assert equal(dynamic(input_ids=ids).logits, static(input_ids=ids).logits)
        hidden = torch.randn(1, source.layers[0].hidden_size, device=place)
        given = hidden, CHOSEN.to(place), torch.full((1, 2), 0.5, device=place)
        wanted = static.get_submodule(source.layers[0].name)(*given)
        assert equal(dynamic.modules[0](*given), wanted)
    dynamic.close()


def test_biases_and_gates_of_a_family_are_its_own(place: str) -> None:
    """High precision being the model's own, a family with biases and a gate that no kernel knows gives what it gave."""
    model = tiny_model("gpt_oss").eval()
    source, ids = Source(model), IDS[:, :1]
    with torch.no_grad():
        wanted = model(input_ids=ids).logits
        model.to(place)
        with DynamicMoE(model, source.layers, source, settings(high=16, low=4), policy="fixed") as dynamic:
            found = dynamic(input_ids=ids.to(place)).logits
    torch.testing.assert_close(found.cpu(), wanted, rtol=2e-3, atol=2e-3)


@pytest.mark.cases(1)
@pytest.mark.parametrize("nested", [False, True])
def test_a_device_that_is_behind_gets_no_block_twice(late: LateStreams, nested: bool) -> None:
    """Copies asked for from a thread, the device let on at random: at every moment what calls would read are whole
    versions, copies in flight keep to the buffer, and blocks that old calls read are left alone."""
    dynamic, source = made(nested=nested, background=True, busy=1.0, period=1 << 30)
    assert dynamic.summary()["planes"] is nested
    rng, deadline = random.Random(0), time.monotonic() + 30
    counts = dynamic.copies.counts
    while counts.promotions + counts.demotions < 40:
        assert time.monotonic() < deadline
        for act in rng.sample((late.copy, late.step, dynamic.copies.register), 2):
            act()
        if rng.random() < 0.3:
            dynamic.copies.request(drawn(dynamic, rng))
        held = {block for pool in dynamic.pools.pools for block in pool.starts} & {
            block for layer in dynamic.copies.layers for _, block in layer.places()
        }
        assert len(held) == sum(dynamic.budget.layers), "no block is of two experts"
        assert dynamic.copies.in_flight <= dynamic.settings.transient
        assert late.most <= dynamic.settings.transient
        assert as_published(dynamic, source, rng.randrange(3), rng.randrange(6))
    assert counts.failures == 0
    while not dynamic.copies.settle(0.01):
        late.copy()
        late.step()
    nothing_lost(dynamic)
    assert all(as_published(dynamic, source, number, expert) for number in range(3) for expert in range(6))
    dynamic.close()


def test_nothing_is_published_before_it_is_there(late: LateStreams) -> None:
    dynamic, source = made(background=True, busy=1.0, period=1 << 30)
    before = high_of(dynamic)
    dynamic.copies.request([Switch(0, 3, HIGH)])
    while not late.copies:
        time.sleep(0.001)
    assert dynamic.copies.register() == []
    assert high_of(dynamic) == before
    free = [pool.free for pool in dynamic.pools.pools]
    late.copy()
    while not (done := dynamic.copies.register()):
        time.sleep(0.001)
    assert done == [Switch(0, 3, HIGH)]
    assert as_published(dynamic, source, 0, 3)
    assert [pool.free for pool in dynamic.pools.pools] == free, "the device may still read the old block"
    late.step()
    dynamic.copies.register()
    assert dynamic.pools.pools[LOW].free == free[LOW] + 1
    dynamic.close()


def test_a_slot_is_not_written_while_a_copy_reads_it(late: LateStreams) -> None:
    """One slot for each version: the second copy waits for the first one's, in the thread of the copies."""
    dynamic, source = made(background=False, period=1 << 30, host_bytes=1)
    assert dynamic.copies.host.slots == 1
    dynamic.copies.request([Switch(0, 3, HIGH), Switch(1, 4, HIGH), Switch(2, 5, HIGH)])
    assert all(as_published(dynamic, source, number, 3 + number) for number in range(3))
    assert late.most == 1, "one slot, one copy on its way"
    nothing_lost(dynamic)
    dynamic.close()


def test_decisions_wait_for_their_counts_and_passes_do_not(late: LateStreams) -> None:
    dynamic, _ = made(background=True, busy=1.0, ema=0.5)
    tell(dynamic, [4, 5], 7)
    assert dynamic.decisions == 0, "the device has not answered"
    event = late.steps[-1]
    late.step()
    tell(dynamic, [4, 5], 1)
    assert dynamic.decisions == 1
    assert not event.waited  # type: ignore[attr-defined]
    deadline = time.monotonic() + 30
    while not all(row[4] and row[5] for row in high_of(dynamic)):
        assert time.monotonic() < deadline
        time.sleep(0.01)  # the interpreter of a pass gives way to the thread that copies every 5 ms only
        late.copy()
        late.step()
        tell(dynamic, [4, 5], 1)
    assert all(sum(row) <= dynamic.places + dynamic.settings.transient for row in high_of(dynamic))
    dynamic.close()


@pytest.mark.cases(1)
@pytest.mark.parametrize("device_is_late", [False, True])
def test_between_passes_the_same_choices_give_the_same_decisions(
    request: pytest.FixtureRequest, place: str, device_is_late: bool
) -> None:
    """However far the device is behind; and those of the CPU's form."""
    if device_is_late:
        request.getfixturevalue("late")
    results = []
    for patched in (False, True):
        with pytest.MonkeyPatch.context() as patch:
            if patched and place == "cpu":
                patch.delenv(VARIABLE)
            dynamic, _ = made(device="cpu" if patched or device_is_late else place, ema=0.5, period=2)
            assert isinstance(dynamic._form, CpuForm if patched else GpuForm)
            for chosen in ([4, 5], [3, 0]):
                tell(dynamic, chosen, 2 * dynamic.settings.period)
                assert all(row[chosen[0]] and row[chosen[1]] for row in high_of(dynamic))
                results.append((high_of(dynamic), dynamic.copies.counts.promotions, dynamic.decisions))
            nothing_lost(dynamic)
            dynamic.close()
    assert results[:2] == results[2:]


def test_what_was_seen_is_that_of_the_cpu(place: str) -> None:
    streams = form_of(torch.device(place)).streams
    there, here = SeenThere([5, 3], 0.9, streams), [Seen(5, 0.9), Seen(3, 0.9)]
    generator = torch.Generator().manual_seed(0)
    assert there.answered(wait=True) is None, "nothing was asked for"
    for round_ in range(2):
        for tokens in (1, 40, 3)[: 3 - round_]:
            for number, seen in enumerate(here):
                index = torch.randint(-1, seen.experts + 1, (tokens, 2), generator=generator)
                weights = torch.rand(tokens, 2, generator=generator)
                weights[1:3, 0] = torch.tensor([torch.nan, torch.inf])[: max(0, tokens - 1)]
                seen.add(index, weights)
                there.of(number).add(index.to(place), weights.to(place))
        there.ask()
        answered = there.answered(wait=True)
        assert answered is not None
        for found, seen in zip(answered, here, strict=True):
            wanted = seen.drained()
            assert found[1] == wanted[1] == 3 - round_
            np.testing.assert_allclose(found[0], wanted[0], rtol=1e-5, atol=1e-9)
            np.testing.assert_allclose(found[2], wanted[2], rtol=1e-5, atol=1e-9)


@pytest.mark.cases(1)
@pytest.mark.parametrize("nested", [False, True])
def test_what_lies_on_the_device_is_what_the_budget_says(place: str, nested: bool) -> None:
    dynamic, _ = made(device=place, nested=nested)
    there = [dynamic.pools.held, dynamic._statistics.held]  # type: ignore[attr-defined]
    there += [dynamic.copies.transfer._arriving] if nested else []  # type: ignore[attr-defined]
    tables = sum(layer.beside_bytes for layer in dynamic.copies.layers)  # type: ignore[attr-defined]
    assert dynamic.budget.pool_bytes == dynamic.pools.held.nbytes
    assert tables + sum(one.nbytes for one in there) == dynamic.budget.pool_bytes + dynamic.budget.other_bytes[BESIDE]
    assert dynamic.budget.pool_bytes + dynamic.budget.other_bytes[BESIDE] <= dynamic.budget.memory_bytes
    assert dynamic.copies.host.nbytes == dynamic.copies.host._held.nbytes <= dynamic.settings.host_bytes
    dynamic.close()


@pytest.mark.cases(1)
@pytest.mark.parametrize("background", [False, True])
def test_copies_that_fail_leave_the_old_versions(place: str, background: bool) -> None:
    said: list[str] = []
    dynamic, source = made(device=place, said=said, background=background, ema=0.5)
    before = high_of(dynamic)

    def fail(*_: Any) -> None:
        raise OSError("disk read error")

    source.before = fail
    for _ in range(2):
        tell(dynamic, [4, 5], dynamic.settings.period)
        assert dynamic.copies.settle()
    assert dynamic.copies.counts.failures > 1
    assert high_of(dynamic) == before
    assert len(said) == 1
    assert "disk read error" in said[0]
    source.before = lambda *_: None
    nothing_lost(dynamic)
    tell(dynamic, [4, 5], dynamic.settings.period)
    assert dynamic.copies.settle()
    assert dynamic.copies.counts.promotions > 0
    nothing_lost(dynamic)
    dynamic.close()


def test_a_device_that_refuses_a_copy_leaves_the_old_version(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    dynamic, source = made(device=place, said=said)

    def refuse(_work: Any) -> None:
        raise RuntimeError("CUDA error: out of memory")

    before, streams = high_of(dynamic), dynamic._form.streams
    with monkeypatch.context() as patch:
        patch.setattr(streams, "beside", refuse)
        dynamic.copies.request([Switch(0, 3, HIGH)])
    assert high_of(dynamic) == before
    assert "out of memory" in said[0]
    nothing_lost(dynamic)
    dynamic.copies.request([Switch(0, 3, HIGH)])
    assert high_of(dynamic)[0][3]
    assert as_published(dynamic, source, 0, 3)
    dynamic.close()


@pytest.mark.cases(0)
def test_calls_are_of_one_set_of_versions_while_another_thread_changes_them(place: str) -> None:
    dynamic, _ = made(device=place, period=1 << 30, background=True, busy=1.0)
    module, stop, rng = dynamic.modules[0], threading.Event(), random.Random(0)
    layer: Any = module.versions
    hidden = torch.randn(1, module.layer.hidden_size, device=place)
    given = hidden, CHOSEN.to(place), torch.full((1, 2), 0.5, device=place)

    def flip() -> None:
        while not stop.is_set():
            dynamic.copies.request(drawn(dynamic, rng))
            time.sleep(0.05)
            dynamic.copies.register()

    thread = threading.Thread(target=flip)
    thread.start()
    seen = set()
    try:
        deadline = time.monotonic() + 60
        while len(seen) < 2:
            assert time.monotonic() < deadline
            with layer.reading():
                names = [*layer.projections, "down_proj"]
                matrices = [{name: layer.matrix(e, name) for name in names} for e in range(module.num_experts)]
                result = layer(*given)
            described = LayerOfExperts(
                matrices=matrices, biases=[{}] * len(matrices), gate=module.math.gate, activation=module.math.activation
            )
            assert equal(TritonLayer(described)(*given), result)
            seen.add(tuple(one["down_proj"].bits for one in matrices[:2]))
    finally:
        stop.set()
        thread.join()
    assert dynamic.copies.settle()
    nothing_lost(dynamic)
    dynamic.close()


def test_no_copy_begins_while_it_is_still(place: str) -> None:
    dynamic, source = made(device=place, period=1 << 30, background=True, busy=1.0)
    asked = source.asked
    with dynamic.still():
        dynamic.copies.request([Switch(0, 3, HIGH)])
        time.sleep(0.02)
        assert dynamic.copies.register() == []
        assert source.asked == asked
    assert dynamic.copies.settle()
    assert high_of(dynamic)[0][3]
    dynamic.close()


def test_a_captured_step_decides_nothing(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    dynamic, _ = made(device=place)
    monkeypatch.setattr(dynamic._form.streams, "capturing", lambda: True)
    dynamic.step()
    assert dynamic.steps == 0
    dynamic.close()


def test_the_form_is_that_of_the_device(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    form = form_of(torch.device(place))
    assert isinstance(form, GpuForm)
    assert isinstance(form.streams, HostStreams) == (place == "cpu")
    monkeypatch.delenv(VARIABLE, raising=False)
    assert isinstance(form_of(torch.device("cpu")), CpuForm)
    with pytest.raises(ModelError, match="a CPU or a CUDA GPU, and this is meta"):
        form_of(torch.device("meta"))


def test_counts_come_out_into_memory_that_stays_pinned(place: str) -> None:
    """Pinned memory is let go with the tensor that was given for it, whatever views there are: else a copy waits."""

    class Pinned(HostStreams):
        def waiting(self, size: int) -> torch.Tensor:
            made = super().waiting(size)
            given.append(weakref.ref(made))
            return made

    given: list[weakref.ref[torch.Tensor]] = []
    seen = SeenThere([4, 6], 0.5, Pinned())
    gc.collect()
    assert [kept is not None and kept.nbytes for kept in (one() for one in given)] == [seen.held.nbytes]


def test_without_the_interpreter_it_is_refused_on_the_cpu(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, TRITON)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    model = tiny_model("mixtral").eval()
    source = Source(model)
    with pytest.raises(ModelError, match=r"experts cannot change their precision|there is no CUDA device"):
        DynamicMoE(model, source.layers, source, settings(), policy="fixed")


@pytest.mark.cuda
def test_generation_on_a_gpu_while_experts_change_keeps_to_the_budget() -> None:
    """What is allocated before, while and after everything changes; nothing is taken for copies."""
    dynamic, source = made(device="cuda", nested=True, background=True, busy=1.0, period=4, ema=0.5)
    ids = IDS.cuda()
    dynamic.generate(ids, max_new_tokens=8, do_sample=False, pad_token_id=0)
    torch.cuda.synchronize()
    rng, taken = random.Random(0), torch.cuda.memory_allocated()
    for _ in range(20):
        dynamic.copies.request(drawn(dynamic, rng))
        dynamic.generate(ids, max_new_tokens=8, do_sample=False, pad_token_id=0)
    assert dynamic.copies.settle()
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() <= taken + (1 << 20)
    assert dynamic.copies.counts.promotions > 5
    assert dynamic.copies.counts.failures == 0
    assert all(as_published(dynamic, source, number, expert) for number in range(3) for expert in range(6))
    nothing_lost(dynamic)
    dynamic.close()


@pytest.mark.cuda
def test_pools_and_tables_take_what_the_budget_says_of_the_allocator() -> None:
    torch.manual_seed(0)
    model = tiny_model("mixtral").eval()
    source = Source(model)
    model.to("cuda")
    experts = sum(model.get_submodule(layer.name).get_parameter(name).nbytes for layer in source.layers
                  for name, _ in model.get_submodule(layer.name).named_parameters())  # fmt: skip
    before = torch.cuda.memory_allocated() - experts
    dynamic = DynamicMoE(model, source.layers, source, settings(memory_bytes=1 << 30), policy="fixed")
    torch.cuda.synchronize()
    told = dynamic.budget.pool_bytes + dynamic.budget.other_bytes[BESIDE]
    taken = torch.cuda.memory_allocated() - before
    rounding = 512 * (4 + 4 * len(source.layers))  # of the allocator, a piece of memory
    assert taken <= told + rounding
    dynamic.close()


@pytest.mark.cuda
def test_a_captured_step_of_a_layer_follows_what_changes() -> None:
    """A graph of a layer with its counts, replayed while versions change."""
    dynamic, _ = made(device="cuda", background=True, busy=1.0, ema=0.5)
    module = dynamic.modules[0]
    hidden = torch.randn(1, module.layer.hidden_size, device="cuda")
    index, weights = CHOSEN.cuda(), torch.full((1, 2), 0.5, device="cuda")
    with torch.no_grad():
        module(hidden, index, weights)
        graph = torch.cuda.CUDAGraph()
        with dynamic.still(), torch.cuda.graph(graph):
            out = module(hidden, index, weights)
        index.copy_(torch.tensor([[4, 5]]))
        for turn in range(200):
            graph.replay()
            if turn % 20 == 0:  # before the step is over, which may publish other versions
                wanted = module.versions(hidden, index, weights)
                torch.testing.assert_close(out, wanted, rtol=1e-5, atol=1e-5)
            dynamic.step()
    assert dynamic.copies.settle()
    assert high_of(dynamic)[0][4]
    assert high_of(dynamic)[0][5]
    dynamic.close()
