"""Recorded traces: what fits together, steps in time, counts."""

from dataclasses import replace

import numpy as np
import pytest

from moeq.artifacts.trace import RoutingTrace, sequence_counts
from moeq.errors import ArtifactError, EstimateError
from moeq.estimator.geometry import ModelGeometry
from moeq.estimator.trace import check_trace, decode_steps, sequence_scores


def made_trace(lengths=(5, 3, 4), prefill=(2, 1, 3), layers=3, experts=6, top_k=2, seed=0) -> RoutingTrace:
    """A random trace; its first token chose one expert only in layer 0."""
    generator = np.random.default_rng(seed)
    order = generator.random((sum(lengths), layers, experts)).argsort(axis=2)
    chosen = order[:, :, :top_k].astype(np.int16)
    chosen[0, 0, -1] = -1
    return RoutingTrace(
        layers=tuple(f"model.layers.{i}.mlp" for i in range(layers)),
        num_experts=(experts,) * layers,
        top_k=top_k,
        experts=chosen,
        weights=generator.random(chosen.shape).astype(np.float16),
        lengths=np.array(lengths, dtype=np.int32),
        prefill=np.array(prefill, dtype=np.int32),
        domains=tuple("ab"[i % 2] for i in range(len(lengths))),
    )


def geometry(**changes) -> ModelGeometry:
    fields = {
        "name": "tiny", "num_layers": 3, "hidden_size": 8, "intermediate_size": 16, "num_experts": 6, "top_k": 2,
        "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 4, "non_expert_parameters": 100,
    }  # fmt: skip
    return ModelGeometry(**(fields | changes))


def test_rows_know_their_sequence_and_step():
    trace = made_trace()
    assert trace.sequence.tolist() == [0] * 5 + [1] * 3 + [2] * 4
    assert trace.step.tolist() == [0, 1, 2, 3, 4, 0, 1, 2, 0, 1, 2, 3]
    assert trace.is_prefill.tolist() == [1, 1, 0, 0, 0, 1, 0, 0, 1, 1, 1, 0]


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"experts": np.full((12, 3, 2), 6, dtype=np.int16)}, "expert 6 in layer model.layers.0.mlp, which has 6"),
        ({"experts": np.full((12, 3, 2), -2, dtype=np.int16)}, "expert -2"),
        ({"experts": np.zeros((11, 3, 2), dtype=np.int16)}, "experts are int16 [11, 3, 2], not int16 [12, 3, 2]"),
        ({"experts": np.zeros((12, 3, 2), dtype=np.int64)}, "experts are int64"),
        ({"weights": np.zeros((12, 3, 2), dtype=np.float32)}, "weights are float32"),
        ({"prefill": np.array([6, 1, 1], dtype=np.int32)}, "longer prefill"),
        ({"lengths": np.array([12, 0, 0], dtype=np.int32)}, "without tokens"),
        ({"domains": ("a",)}, "lengths are int32 [3], not int32 [1]"),
        ({"num_experts": (6, 6)}, "numbers of experts for 2 layers"),
        ({"num_experts": (6, 6, 1)}, "layers of [1, 6] experts"),
    ],
)
def test_what_does_not_fit_together_is_refused(changes, told):
    with pytest.raises(ArtifactError) as error:
        replace(made_trace(), **changes)
    assert told in str(error.value)


def test_a_trace_of_another_model_is_refused_in_one_line():
    trace = made_trace()
    check_trace(trace, geometry(), where="trace")
    for changes, told in [
        ({"num_layers": 4}, "a trace of 3 MoE layers, tiny has 4"),
        ({"num_experts": 8}, "a trace of 6 experts a layer, tiny has 8"),
        ({"top_k": 1}, "a trace of 2 experts a token, tiny has 1"),
    ]:
        with pytest.raises(EstimateError) as error:
            check_trace(trace, geometry(**changes), where="trace")
        assert told in str(error.value)
        assert "\n" not in str(error.value)


def test_decode_steps_are_those_after_the_prefill_in_time_order():
    steps = decode_steps(made_trace(), 2)
    assert steps.sequences.tolist() == [[0, 1], [2, -1]]
    assert steps.rows.tolist() == [[2, 6], [3, 7], [4, -1], [11, -1]]
    assert steps.group.tolist() == [0, 0, 0, 1]


def test_every_decode_token_is_in_one_step_whatever_the_batch():
    trace = made_trace(lengths=(9, 4, 7, 6, 5), prefill=(1, 4, 2, 0, 4))
    for batch in (1, 2, 3, 7):
        rows = decode_steps(trace, batch).rows
        assert sorted(rows[rows >= 0].tolist()) == np.flatnonzero(~trace.is_prefill).tolist()


def test_a_trace_that_is_all_prefill_has_no_steps():
    with pytest.raises(EstimateError, match="no sequence of the trace has tokens after its prefill"):
        decode_steps(made_trace(prefill=(5, 3, 4)), 1)
    with pytest.raises(EstimateError, match="a batch of 0"):
        decode_steps(made_trace(), 0)


def test_counts_and_scores_of_sequences_are_those_of_a_plain_loop():
    trace = made_trace(lengths=(9, 4, 7), prefill=(3, 1, 5))
    for tokens in (trace.is_prefill, ~trace.is_prefill):
        counts, scores = np.zeros((3, 6), dtype=int), np.zeros((3, 6))
        for row in np.flatnonzero(tokens):
            for expert, weight in zip(trace.experts[row, 0], trace.weights[row, 0], strict=True):
                if expert >= 0:
                    counts[trace.sequence[row], expert] += 1
                    scores[trace.sequence[row], expert] += float(weight)
        assert (sequence_counts(trace, 0, tokens) == counts).all()
        assert np.allclose(sequence_scores(trace, 0, tokens), scores)
