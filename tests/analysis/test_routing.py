"""Similarity and activation of a trace against plain loops over its tokens."""

from __future__ import annotations

from dataclasses import replace
from itertools import permutations

import numpy as np
import pytest
from estimator.test_estimator_trace import made_trace

from moeq.analysis.routing import LANGUAGE, VISION, analyse
from moeq.artifacts.trace import RoutingTrace

LENGTHS, PREFILL = (9, 7, 8, 6, 10, 5), (4, 3, 5, 2, 6, 5)  # the last sequence has no decode


@pytest.fixture
def trace() -> RoutingTrace:
    images = np.arange(sum(LENGTHS), dtype=np.uint8) % 3 == 0
    return replace(made_trace(LENGTHS, PREFILL, seed=4), images=images.astype(np.uint8))


def counted(trace: RoutingTrace, layer: int, sequence: int, decode: bool) -> np.ndarray:
    """Activations [E] of one phase of one sequence, token by token."""
    found = np.zeros(trace.num_experts[layer])
    start = int(trace.starts[sequence])
    for step in range(trace.lengths[sequence]):
        if (step >= trace.prefill[sequence]) == decode:
            for expert in trace.experts[start + step, layer]:
                if expert >= 0:
                    found[expert] += 1
    return found


def cosine(one: np.ndarray, other: np.ndarray) -> float:
    return float(one @ other / np.linalg.norm(one) / np.linalg.norm(other))


def test_similarity_is_that_of_every_sequence_and_of_every_pair_of_its_domain(trace: RoutingTrace) -> None:
    found = analyse(trace)
    whole = range(trace.num_sequences - 1)
    for layer in range(trace.num_layers):
        phases = [[counted(trace, layer, one, decode) for decode in (False, True)] for one in whole]
        own = [cosine(*phases[one]) for one in whole]
        assert found.similarity.same[layer] == pytest.approx(np.mean(own))
        apart = []
        for name in "ab":
            mine = [one for one in whole if trace.domains[one] == name]
            pairs = [cosine(phases[a][0], phases[b][1]) for a, b in permutations(mine, 2)]
            assert found.by_domain[name].same[layer] == pytest.approx(np.mean([own[one] for one in mine]))
            assert found.by_domain[name].other[layer] == pytest.approx(np.mean(pairs))
            apart += [np.mean(pairs)] * len(mine)
        assert found.similarity.other[layer] == pytest.approx(np.mean(apart))
    assert found.similarity.sequences == 5
    assert found.by_domain["b"].sequences == 2


def test_sequences_that_are_alike_are_as_near_to_each_other_as_to_themselves() -> None:
    one = made_trace((8,), (4,))
    same = replace(
        one,
        experts=np.concatenate([one.experts] * 3),
        weights=None,
        lengths=np.array([8] * 3, dtype=np.int32),
        prefill=np.array([4] * 3, dtype=np.int32),
        domains=("a",) * 3,
    )
    found = analyse(same).similarity
    assert found.same == pytest.approx(found.other)
    assert (found.same < 1).all()


def test_activations_are_shares_by_domain_and_by_modality(trace: RoutingTrace) -> None:
    found = analyse(trace)
    layer = 1
    both = [sum(counted(trace, layer, one, decode) for decode in (False, True)) for one in range(trace.num_sequences)]
    assert found.activation[layer] == pytest.approx(sum(both) / sum(both).sum())
    mine = both[1] + both[3] + both[5]
    assert found.domain_activation["b"][layer] == pytest.approx(mine / mine.sum())
    seen = np.zeros(6)
    for token in np.flatnonzero(trace.images):
        seen[trace.experts[token, layer]] += 1
    assert found.modalities[VISION][layer] == pytest.approx(seen / seen.sum())
    assert found.modality_tokens == {VISION: 15, LANGUAGE: 30}
    assert found.between["a", "b"] == pytest.approx(
        np.mean([cosine(found.domain_activation["a"][i], found.domain_activation["b"][i]) for i in range(3)])
    )


def test_single_sequences_are_of_different_domains_and_have_both_phases(trace: RoutingTrace) -> None:
    found = analyse(trace)
    assert [one.domain for one in found.samples] == ["a", "b"]
    first = found.samples[0]
    prefill = counted(trace, 2, first.sequence, decode=False)
    assert first.prefill[2] == pytest.approx(prefill / prefill.sum())
    assert first.decode[2].sum() == pytest.approx(1)


def test_what_is_not_known_is_null() -> None:
    alone = made_trace((5, 4), (2, 4))
    found = analyse(alone).as_json()
    assert found["prefill_decode_cosine"]["all"]["sequences"] == 1
    assert found["prefill_decode_cosine"]["all"]["decode_of_another"] is None
    assert found["prefill_decode_cosine"]["by_domain"]["b"]["own_decode"] is None
    assert found["activation"]["by_modality"] == {}
    empty = replace(alone, experts=np.where(np.arange(9)[:, None, None] < 5, -1, alone.experts).astype(np.int16))
    assert analyse(empty).as_json()["activation"]["by_domain"]["a"][0] == [None] * 6
