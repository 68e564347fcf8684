"""Logits are compared where routers agree; ties that break another way leave their sequence out, nothing else does."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from moeq.errors import ModelError
from moeq.integers.same_outputs import Outputs, compare

SEQUENCE = torch.tensor([0, 0, 1, 1, 2])


def outputs(logits: Tensor, experts: Tensor | None = None, weights: Tensor | None = None) -> Outputs:
    chosen = torch.tensor([[0, 2]]).expand(5, 2).clone() if experts is None else experts
    mass = torch.tensor([[0.6, 0.4]]).expand(5, 2).clone() if weights is None else weights
    return Outputs(logits=[(logits, SEQUENCE)], routing=[(SEQUENCE, chosen, mass)])


def test_the_error_is_relative_over_all_tokens() -> None:
    logits = torch.randn(5, 7)
    found = compare(outputs(logits), outputs(1.01 * logits))
    assert found.error == pytest.approx(0.01, rel=1e-4)
    assert (found.sequences, found.left_out, found.changed_tokens) == (3, 0, 0)


def test_a_tie_leaves_its_sequence_out() -> None:
    logits = torch.randn(5, 7)
    moved, experts = logits.clone(), torch.tensor([[0, 2]] * 5)
    moved[2:4] += 1
    experts[2] = torch.tensor([0, 1])
    found = compare(outputs(logits), outputs(moved, experts, torch.tensor([[0.60001, 0.39999]] * 5)))
    assert (found.error, found.left_out, found.changed_tokens) == (0, 1, 1)


def test_routing_that_changes_by_more_than_a_tie_counts() -> None:
    logits = torch.randn(5, 7)
    moved, experts = logits.clone(), torch.tensor([[0, 2]] * 5)
    moved[2] += 1
    experts[2] = torch.tensor([0, 1])
    found = compare(outputs(logits), outputs(moved, experts, torch.tensor([[0.61, 0.39]] * 5)))
    assert found.left_out == 0
    assert found.error > 0.1


def test_ties_everywhere_leave_nothing_to_compare() -> None:
    logits = torch.randn(5, 7)
    with pytest.raises(ModelError, match="nothing is left to compare"):
        compare(outputs(logits), outputs(logits, torch.tensor([[0, 1]] * 5)))


def test_logits_that_are_all_zero_are_named_as_such() -> None:
    with pytest.raises(ModelError, match="all logits of the model are 0; check the weights"):
        compare(outputs(torch.zeros(5, 7)), outputs(torch.zeros(5, 7)))
