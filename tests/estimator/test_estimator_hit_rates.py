"""Hit rates: a trace small enough to work out by hand, bounds that hold on any trace, what is refused."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from cases import examples
from estimator.test_estimator_trace import made_trace
from hypothesis import given, settings
from hypothesis import strategies as st

from moeq.artifacts.trace import RoutingTrace
from moeq.errors import EstimateError
from moeq.estimator.hit_rates import HitRate, alternate_sequences, hit_rates


def one_expert_a_token(sequences: list[tuple[str, list[int], list[int]]], experts: int = 4) -> RoutingTrace:
    """A trace of one layer and one expert a token from (domain, experts of the prefill, experts of the decode)."""
    chosen = np.array([expert for _, prefill, decode in sequences for expert in prefill + decode], dtype=np.int16)
    return RoutingTrace(
        layers=("layer",),
        num_experts=(experts,),
        top_k=1,
        experts=chosen[:, None, None],
        weights=np.ones((len(chosen), 1, 1), dtype=np.float16),
        lengths=np.array([len(prefill + decode) for _, prefill, decode in sequences], dtype=np.int32),
        prefill=np.array([len(prefill) for _, prefill, _ in sequences], dtype=np.int32),
        domains=tuple(domain for domain, _, _ in sequences),
    )


BY_HAND = one_expert_a_token(
    [
        ("a", [0, 0, 0], [0, 0, 0]),  # learnt from
        ("a", [1, 1, 0], [1, 1, 1, 0]),  # measured: context-aware 3, static 1 of 4
        ("b", [2, 2], [2, 2]),  # learnt from
        ("b", [2, 2, 3], [3, 3, 3, 2]),  # measured: context-aware 1, static 0, oracle 3 of 4
    ]
)


def row(found, domain: str) -> HitRate:
    return next(one for one in found.rows if one.domain == domain)


def test_rates_worked_out_by_hand():
    found = hit_rates(BY_HAND, 1)
    assert found.training_sequences == 2
    assert [(one.domain, one.sequences, one.expert_tokens) for one in found.rows] == [
        ("a", 1, 4), ("b", 1, 4), ("all", 2, 8)
    ]  # fmt: skip
    wanted = {
        "context_aware": (0.75, 0.25),
        "context_aware_with_prior": (0.25, 0.0),  # 9.6 tokens of expert 0 and 6.4 of expert 2 come first
        "static": (0.25, 0.0),
        "static_of_domain": (0.25, 0.25),
        "static_in_hindsight": (0.75, 0.0),
        "oracle": (0.75, 0.75),
    }
    for name, rates in wanted.items():
        assert (row(found, "a").rates[name], row(found, "b").rates[name]) == rates, name
    assert found.overall.rates["context_aware"] == 0.5
    assert found.overall.gain == 0.5 - 0.125


def test_a_prior_decides_less_the_longer_the_prompt_is():
    """Training says expert 0; the prompt says 1, and 16 tokens of training weigh more than 3 of it, not than 30."""
    for length, rate in ((3, 0.0), (30, 1.0)):
        trace = one_expert_a_token([("a", [0, 0], [0, 0]), ("a", [1] * length, [1, 1])])
        rates = hit_rates(trace, 1).overall.rates
        assert rates["context_aware"] == 1.0
        assert rates["context_aware_with_prior"] == rate


def test_alternate_sequences_are_taken_in_every_domain():
    assert alternate_sequences(BY_HAND).tolist() == [True, False, True, False]


def test_the_routing_weights_decide_too():
    weights = BY_HAND.weights.copy()
    weights[19] = 5  # the last prefill token of the last sequence, at expert 3
    trace = replace(BY_HAND, weights=weights)
    assert trace.experts[19, 0, 0] == 3
    assert row(hit_rates(replace(trace, weights=None), 1), "b").rates["context_aware"] == 0.25
    assert row(hit_rates(trace, 1), "b").rates["context_aware"] == 0.75


def test_without_weights_the_counts_decide():
    assert hit_rates(replace(BY_HAND, weights=None), 1).alpha == 1


def test_tokens_that_chose_no_expert_do_not_count():
    experts = BY_HAND.experts.copy()
    experts[12] = -1  # the last token of the second sequence, at expert 0
    found = hit_rates(replace(BY_HAND, experts=experts), 1)
    assert row(found, "a").expert_tokens == 3
    assert row(found, "a").rates["context_aware"] == 1.0


@settings(max_examples=examples(60), deadline=None)
@given(seed=st.integers(0, 10**6), count=st.integers(0, 6), weighted=st.booleans())
def test_bounds_on_any_trace(seed: int, count: int, weighted: bool):
    trace = made_trace(lengths=(9, 8, 7, 12, 5, 6), prefill=(4, 3, 2, 6, 1, 5), seed=seed)
    trace = trace if weighted else replace(trace, weights=None)
    found = hit_rates(trace, count)
    for one in found.rows:
        rates = one.rates
        assert all(0 <= rate <= 1 for rate in rates.values())
        assert all(rate <= rates["oracle"] for rate in rates.values())
        if count in (0, 6):
            assert set(rates.values()) == {count / 6}
    assert found.overall.rates["static"] <= found.overall.rates["static_in_hindsight"]
    parts = found.rows[:-1]
    assert sum(one.expert_tokens for one in parts) == found.overall.expert_tokens
    more = hit_rates(trace, min(6, count + 1)).overall.rates
    assert all(more[name] >= rate for name, rate in found.overall.rates.items())


@pytest.mark.parametrize(
    ("trace", "count", "told"),
    [
        (made_trace(), 7, "7 of 6 experts on the GPU"),
        (made_trace(), -1, "-1 of 6 experts"),
        (made_trace(), [1, 2], "GPU experts of 2 layers, the trace has 3"),
        (one_expert_a_token([("a", [0], [0])]), 1, "1 sequences to learn from and 0 with a decode"),
    ],
)
def test_what_makes_no_sense_is_refused(trace, count, told):
    with pytest.raises(EstimateError) as error:
        hit_rates(trace, count)
    assert told in str(error.value)
    assert "\n" not in str(error.value)
