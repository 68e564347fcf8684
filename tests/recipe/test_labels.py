"""What people read instead of a recipe's names."""

from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter

from moeq.recipe import AssignSection, load_recipe
from moeq.recipe.labels import label, labels

RECIPES = sorted((Path(__file__).resolve().parents[2] / "recipes").glob("*.yaml"))
LONGEST = 72  # characters that a table folds over three lines at most, beside its figures in 60 columns


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"method": "uniform", "bits": 2}, "uniform 2-bit"),
        ({"method": "uniform", "bits": 1}, "uniform 1-bit"),
        ({"method": "uniform", "bits_per_weight": 3.5}, "uniform, 3.5 bits"),
        ({"method": "uniform", "bits": 2, "gpu_experts": 1}, "1 expert in FP16 + 2-bit"),
        ({"method": "prefix-split", "bits_per_weight": 2.3}, "prefix-split, 2.3 bits"),
        ({"method": "prefix-split", "code_bits": "5/2"}, "prefix-split, 2.5 code bits"),
        (
            {"method": "prefix-split", "code_bits": 2, "gpu_experts": 4, "selector": False},
            "4 experts in FP16 + 2-bit",
        ),
        (
            {"method": "prefix-split", "bits_per_weight": 2.3, "gpu_experts": 4},
            "4 experts in FP16 + prefix-split, 2.3 bits",
        ),
        (
            {"method": "prefix-split", "code_bits": 3, "loss_weighting": "none"},
            "prefix-split, 3 code bits, losses as printed",
        ),
        ({"method": "optimal", "size": "2MiB"}, "optimal, all in 2.00 MiB"),
        ({"method": "optimal", "expert_bytes": "1200KB"}, "optimal, experts in 1.15 MiB"),
        ({"method": "optimal", "bits_per_weight": 2.3, "granularity": "projection"}, "optimal by matrix, 2.3 bits"),
        (
            {"method": "optimal", "bits_per_weight": 3, "widths": [2, 4], "scope": "layer"},
            "optimal, of 2/4, within layers, 3 bits",
        ),
        ({"method": "mopeq", "metric": "hessian", "quantizer": "signround"}, "MoPEQ, hessian, SignRound"),
        (
            {"method": "budget", "bits_per_weight": 3, "hot_bits": 8, "ema": 0.8},
            "hot and cold, hot 8-bit, 3 bits",
        ),
    ],
)
def test_an_assignment_is_named_as_people_do(keys: dict[str, Any], said: str) -> None:
    assert label(AssignSection.of(**keys)) == said


def test_refining_is_named_and_the_best_replicas_go_with_it() -> None:
    section = AssignSection.of("optimal", bits_per_weight=2.3, quantizer="best")
    assert label(section) == "optimal, 2.3 bits, best replicas"
    assert label(section, refined=True) == "optimal, 2.3 bits, refined"
    assert label(section, refined=True, tuned=True) == "optimal, 2.3 bits, refined, tuned"
    assert label(section, tuned=True) == "optimal, 2.3 bits, best replicas, tuned"


def test_rows_are_labelled_by_their_names_and_only_the_exported_one_is_refined() -> None:
    named = [{"name": "beside", "method": "optimal", "bits_per_weight": 2.3}]
    keys = TypeAdapter(Any).dump_json({"method": "optimal", "bits_per_weight": 2.3}).decode()
    compared = TypeAdapter(Any).dump_json(named).decode()
    recipe = load_recipe(None, ["name=own", f"assign={keys}", "quantize.refine={}", f"eval.compare={compared}"])
    assert labels(recipe) == {
        "original": "as trained",
        "own": "optimal, 2.3 bits, refined",
        "beside": "optimal, 2.3 bits",
    }


def test_where_labels_collide_the_names_stand_behind_them() -> None:
    rows = [{"name": name, "method": "uniform", "bits": 2, "alpha": alpha} for name, alpha in (("a", 0.1), ("b", 0.9))]
    compared = TypeAdapter(Any).dump_json(rows).decode()
    found = labels(load_recipe(None, ["name=own", f"eval.compare={compared}"]))
    assert (found["a"], found["b"]) == ("uniform 2-bit (a)", "uniform 2-bit (b)")


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_every_row_of_the_recipes_has_a_short_label_of_its_own(path: Path) -> None:
    found = labels(load_recipe(path, []))
    assert len(set(found.values())) == len(found)
    assert max(map(len, found.values())) <= LONGEST
