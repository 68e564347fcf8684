"""Parameters that had a say in an assignment, and those that only stood there."""

from __future__ import annotations

import pytest

from moeq.recipe.used import parameters_text, used_parameters

EVERY = {
    "quantizer": "gptq", "gpu_experts": 0, "alpha": 0.5, "normalization": "sum", "statistics": "all",
    "loss_weighting": "mass", "selector": True, "hardware": "paper-ctxmoe",
}  # fmt: skip


@pytest.mark.parametrize(
    ("method", "own", "read"),
    [
        ("uniform", {"bits": 2}, {"quantizer", "code_bits"}),
        (
            "prefix-split",
            {"code_bits": "2"},
            {"quantizer", "code_bits", "alpha", "normalization", "statistics", "loss_weighting", "selector"},
        ),
        ("optimal", {"bits_per_weight": "23/10", "scope": "layer"},
         {"quantizer", "bits_per_weight", "scope", "statistics", "loss_weighting"}),
        ("mopeq", {"metric": "hessian"}, {"quantizer", "metric", "statistics"}),
    ],
)  # fmt: skip
def test_only_what_the_method_read_is_shown(method: str, own: dict[str, object], read: set[str]) -> None:
    assert set(used_parameters(method, EVERY | own)) == read
    placed = used_parameters(method, EVERY | own | {"gpu_experts": 2})
    assert set(placed) == read | {"gpu_experts", "alpha", "normalization", "statistics"}


def test_of_a_method_that_is_gone_all_are_shown() -> None:
    assert set(used_parameters("gone", EVERY)) == set(EVERY)


def test_as_a_line() -> None:
    text = parameters_text("optimal", EVERY | {"bits_per_weight": "23/10"})
    assert text == "bits_per_weight 2.3, loss_weighting mass, quantizer gptq, statistics all"
