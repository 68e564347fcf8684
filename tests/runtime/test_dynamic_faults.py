"""Experts with changing precision when copies fail, wait or have no room, and what is refused."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from dynamic_made import IDS, Source, high_of, made, nothing_lost, settings
from family_models import build as tiny_model

from moeq.errors import ModelError
from moeq.models.experts import ExpertLayer
from moeq.runtime.dynamic.copies import Switch
from moeq.runtime.dynamic.model import DynamicMoE
from moeq.runtime.dynamic.pools import HIGH, LOW


@pytest.mark.cases(1)
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


def test_demotions_that_fail_hold_up_promotions_only_until_they_can_be_made() -> None:
    """Promoted experts beyond the places of their layers fill the buffer, and no more; later they make room again."""
    dynamic, source = made(ema=0.3)
    counts, low = dynamic.copies.counts, dynamic.settings.low

    def fail(_layer: ExpertLayer, _expert: int, key: int) -> None:
        if key == low:
            raise OSError("low replicas are gone")

    def steps() -> None:
        for seed in range(24):
            torch.manual_seed(seed)
            dynamic(input_ids=torch.randint(0, 30, (2, 6)))
            spare = sum(map(sum, high_of(dynamic))) - dynamic.places * len(dynamic.layers)
            assert spare <= dynamic.settings.transient

    source.before = fail
    steps()
    assert 0 < counts.promotions <= dynamic.settings.transient
    assert counts.demotions == 0
    assert counts.failures > 0
    source.before = lambda *_: None
    steps()
    assert counts.demotions > 0
    assert all(sum(row) <= dynamic.places for row in high_of(dynamic))
    nothing_lost(dynamic)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
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


def test_what_was_read_ahead_is_not_given_up_for_what_is_less_likely() -> None:
    """A cache of one slot keeps the first, and reads no other until something else is foreseen."""
    dynamic, source = made(host_bytes=1)
    copies, foreseen = dynamic.copies, [Switch(0, expert, HIGH) for expert in (3, 4, 5)]
    before = source.asked
    for _ in range(2):
        copies.request([], ahead=foreseen)
        assert [one.key in copies.host for one in foreseen] == [True, False, False]
    assert source.asked - before == copies.counts.prefetched == 1
    copies.request([], ahead=foreseen[1:])
    assert [one.key in copies.host for one in foreseen] == [False, True, False]
    dynamic.close()


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
