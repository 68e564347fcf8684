"""Rows with different replicas in one forward pass, for every kind of experts module."""

from __future__ import annotations

from typing import Any

import family_models
import numpy as np
import pytest
import torch
from replicas_made import Made

from moeq.models import loading
from moeq.models.experts import set_expert_weights
from moeq.models.source import open_source
from moeq.runtime.context_aware import ContextAwareModel, PrefillStore
from moeq.runtime.experts_by_row import Dequantized, Rows, by_row

CPU = torch.device("cpu")
FAMILIES = ("gpt_oss", "dbrx", "llama4_text", "jetmoe", "nemotron_h")  # biases and every kind of a decoder's experts


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Made]:
    folder = family_models.save(request.param, tmp_path_factory.mktemp("families") / request.param)
    model: Any = loading.load_model(open_source(str(folder)), torch.float32, CPU)
    return model, Made(model)


def logits(model: Any, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=ids, use_cache=False).logits


@pytest.mark.cases(2)
@pytest.mark.parametrize("kernels", [True, False])
def test_each_row_computes_with_its_own_replicas(
    family: tuple[Any, Made], kernels: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Packed replicas go through a kernel, but for MOEQ_KERNEL=reference and where experts are given every token."""
    if not kernels:
        monkeypatch.setenv("MOEQ_KERNEL", "reference")
    model, made = family
    experts = made.layers[0].num_experts
    ids = torch.randint(8, 60, (3, 7), generator=torch.Generator().manual_seed(1))
    mixed = np.where(np.arange(experts) % 2 == 0, 16, 2)
    keys = np.stack([np.tile(row, (len(made.layers), 1)) for row in (np.full(experts, 16), np.full(experts, 2), mixed)])
    replicas = Dequantized(made, torch.float32, CPU)
    with by_row(model, made.layers, replicas, lambda: Rows(keys=torch.from_numpy(keys))):
        found = logits(model, ids)
    called = kernels and made.layers[0].kind.name != "llama4"
    assert set(replicas.prepared) == {(layer.index, 2) for layer in made.layers if called}
    assert None not in replicas.prepared.values()
    for row in range(3):
        write(model, made, keys[row])
        wanted = logits(model, ids[row : row + 1])[0]
        write(model, made, np.full_like(keys[row], 16))
        assert torch.allclose(found[row], wanted, atol=1e-4), row
    assert not torch.allclose(found[1], logits(model, ids)[1], atol=1e-3)


def write(model: Any, made: Made, keys: np.ndarray) -> None:
    for layer in made.layers:
        for expert in range(layer.num_experts):
            stored = made.expert(layer, expert, int(keys[layer.index, expert]))[0]
            values = {n: one if isinstance(one, torch.Tensor) else one.dequantize() for n, one in stored.items()}
            set_expert_weights(model, layer, expert, values)


def test_exact_experts_after_a_prefill_are_the_model(family: tuple[Any, Made]) -> None:
    """Caches of any kind: with windows, states or plain keys; contexts of several lengths at once."""
    model, made = family
    replicas = Dequantized(made, model.dtype, CPU)
    runtime = ContextAwareModel(model, made.layers, replicas, lambda seen: np.full(seen.counts.shape, 16))
    generator = torch.Generator().manual_seed(2)
    texts = [torch.randint(8, 60, (length,), generator=generator).tolist() for length in (3, 14, 9)]
    with runtime.installed():
        pieces = [runtime.continuation(runtime.prefill(one[:-2]), [one[-2:]]) for one in texts]
        found = [one[0][0] for one in runtime.score(pieces)]
    for one, mine in zip(texts, found, strict=True):
        wanted = logits(model, torch.tensor([one]))[0, -3:-1].log_softmax(-1)[[0, 1], one[-2:]]
        assert mine.tolist() == pytest.approx(wanted.tolist(), abs=1e-4)


def test_kept_replicas_and_prefills_stay_within_their_bytes(family: tuple[Any, Made]) -> None:
    _, made = family
    layer = made.layers[0]
    small = Dequantized(made, torch.float32, CPU, limit=1)
    assert Dequantized(made, torch.float32, CPU).fit(made.layers)
    assert not small.fit(made.layers)
    first = small(layer, 0, 2)[0]
    small(layer, 1, 2)
    again = small(layer, 0, 2)[0]
    assert again is not first
    assert all(torch.equal(first[name], again[name]) for name in first)
    store = PrefillStore(limit=0)
    made_of: list[int] = []

    class Run:
        cache = None

    for key in (1, 2, 1, 1):  # without bytes, nothing is dropped
        store.get(key, lambda key=key: made_of.append(key) or Run())
    assert made_of == [1, 2]
