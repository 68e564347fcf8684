"""What is wrong with a recipe is said in moeq's words, whatever stands at whichever key, and no key twice."""

from __future__ import annotations

from typing import Any

import pytest
import yaml
from cases import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from recipe_words import TYPES, check_words
from robustness.test_hostile_yaml import _keys

from moeq.errors import RecipeError
from moeq.recipe import Recipe, load_recipe
from moeq.recipe.wording import WANTED

SCHEMA = Recipe.model_json_schema()
KEYS = sorted(set(_keys(SCHEMA, SCHEMA["$defs"])))
TEXTS = st.text(st.characters(codec="utf-8", categories=("L", "N", "P", "Zs")), max_size=12)
NAMES = TEXTS.filter(lambda name: name and not TYPES.search(f".{name}"))  # a key that is called float is named so
VALUES: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**40), 2**40) | st.floats(allow_nan=False, allow_infinity=False) | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=2),
    max_leaves=4,
)


@settings(max_examples=examples(300), deadline=None, derandomize=True, database=None)
@given(key=st.sampled_from(KEYS), value=VALUES)
def test_any_key_by_any_value(key: str, value: Any) -> None:
    text = yaml.safe_dump(value, default_flow_style=True, allow_unicode=True).removesuffix("...\n").strip()
    try:
        load_recipe(None, [f"{key}={text}"])
    except RecipeError as error:
        check_words(error, key)


def _types(schema: Any) -> set[str]:
    """The types of pydantic's schema of a model, anywhere in it."""
    if isinstance(schema, dict):
        own = {schema["type"]} if isinstance(schema.get("type"), str) else set()
        return own.union(*map(_types, schema.values()))
    return set().union(*map(_types, schema)) if isinstance(schema, list | tuple) else set()


def test_every_type_of_a_recipes_values_has_words() -> None:
    """By pydantic's own schema of a recipe: the kinds of values that it knows are those of the table."""
    kinds = {"bool", "dict", "float", "int", "list", "str", "model", "tuple", "set"}
    named = {"str": "string", "model": "model"}
    used = _types(Recipe.__pydantic_core_schema__) & kinds
    assert {"bool", "float", "int", "list", "str", "model"} <= used
    assert {f"{named.get(kind, kind)}_type" for kind in used} <= set(WANTED)


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("corpus.source={}", "--set: corpus.source.path is missing; add it"),
        ("corpus.source=[[]]", "--set: corpus.source.0 is an empty list; give text or a mapping of keys to values"),
        ("corpus=3", "--set: corpus is 3; give a mapping of keys to values"),
        ("assign.code_bits=many", "--set: assign.code_bits is 'many'; give a number such as 2.5 or 5/2"),
        ("assign.target=vlm", "--set: assign.target: unknown runtime 'vlm'; did you mean 'vllm'?"),
        ("eval.compare=[{method: uniform}]", "--set: eval.compare.0.name is missing; add it"),
        ("losses.bits=[]", "--set: losses.bits must name at least one value and none twice; name each of them once"),
        ("device=gpu", "--set: device is 'gpu'; give auto, cpu, cuda or cuda:NUMBER"),
        ("corpus.chat_template=3", "--set: corpus.chat_template is 3; give 'auto', true or false"),
        (
            "reparam={integer: {percentile: 99}}",
            "--set: reparam.integer.percentile needs range: percentile; give what it needs, or leave it out",
        ),
        (
            "export.formats=[vllm, auto-round, vllm]",
            "--set: export.formats must name none twice; name each of them once",
        ),
        ("estimate.grid.outputs=[]", "--set: estimate.grid.outputs is an empty list; give at least 1 of them"),
        (
            "losses.working_memory=1.2.3GB",
            "--set: losses.working_memory is '1.2.3GB'; give a number of bytes such as 2000000000 or 2GB",
        ),
        ("engine=ray:a b", "--set: engine is 'ray:a b'; give processes, ray or ray:ADDRESS"),
        ("threads=on", "--set: threads is true; give a whole number"),
        ("losses.damping=no", "--set: losses.damping is false; give a number"),
        ("losses.bits=[yes, 2]", "--set: losses.bits.0 is true; give 1, 2, 3, 4 or 8"),
        (
            "losses.working_memory=on",
            "--set: losses.working_memory is true; give a number of bytes such as 2000000000 or 2GB",
        ),
        ("eval.num_fewshot=on", "--set: eval.num_fewshot is true; give a whole number or a mapping of keys to values"),
        ("assign={method: uniform, bits: on}", "--set: assign.bits is true; give 1, 2, 3, 4, 8 or 16"),
        ("quantize.refine=true", "--set: quantize.refine is true; give a mapping of keys to values"),
    ],
)
def test_lines_as_they_are(override: str, line: str) -> None:
    with pytest.raises(RecipeError) as caught:
        load_recipe(None, [override])
    assert str(caught.value) == line
