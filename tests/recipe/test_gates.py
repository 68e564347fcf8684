"""Gates in recipes: what may be asked, and that a gate on what is not measured is refused when the recipe is read."""

from __future__ import annotations

import pytest

from moeq.errors import RecipeError
from moeq.recipe import load_recipe


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["gates.kl=0.1", "eval.perplexity=null"], "gates.kl needs eval.perplexity, which measures it"),
        (["gates.equal_top1=0.9", "eval.perplexity=null"], "gates.equal_top1 needs eval.perplexity"),
        (["gates.perplexity_increase=5", "eval.perplexity=null"], "gates.perplexity_increase needs eval.perplexity"),
        (["gates.kl=.nan"], "not a finite number"),
        (["gates.kl=0"], "gates.kl is 0; give a number above 0"),
        (["gates.equal_top1=90"], r"gates.equal_top1 is 90; give 1 or less"),
        (["gates.bytes=12 GiBs"], "unknown unit 'GiBs'"),
        (["gates.formats=[auto-round, auto-round]"], "formats must name none twice"),
        (["gates.formats=[ollama]"], "gates.formats"),
        (["gates.perplexity=5"], r"unknown key 'gates.perplexity'; did you mean 'perplexity_increase'\?"),
        (
            ["gates.tokens_per_second=5", "estimate.figures={cases: [{name: a, geometry: mixtral-8x7b, bits: 3, "
             "gpu_experts: 1}]}"],
            "gates are of a run",
        ),
    ],
)  # fmt: skip
def test_gates_that_nothing_could_judge_are_refused(overrides: list[str], message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        load_recipe(None, overrides)


def test_gates_are_read_with_their_units() -> None:
    gates = load_recipe(None, ["gates={kl: 0.1, bytes: 12GiB, formats: [auto-round, llama.cpp]}"]).gates
    assert (gates.kl, gates.bytes, gates.formats) == (0.1, 12 << 30, ["auto-round", "llama.cpp"])
    assert gates.any()
    assert not load_recipe(None, []).gates.any()
    assert load_recipe(None, ["eval.perplexity=null", "gates.bytes=1GiB"]).gates.of_text() == []
