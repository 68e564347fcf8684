"""Recipes: errors name key, line and nearest key; budgets are exact; shipped recipes load."""

from pathlib import Path

import pytest

from moeq.errors import RecipeError
from moeq.recipe import HUB_DATASET, load_recipe
from moeq.recipe.assign import budget_keys
from moeq.recipe.earlier import as_in_keys

RECIPES = Path(__file__).parents[2] / "recipes"


@pytest.mark.parametrize("path", sorted(RECIPES.glob("*.yaml")), ids=lambda path: path.name)
def test_shipped_recipes_load(path: Path) -> None:
    assert load_recipe(path).recipe_version == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("name: x\nlosses:\n  grup_size: 3\n", r"line 3: unknown key 'losses.grup_size'; did you mean 'group_size'\?"),
        ("asign: {}\n", r"line 1: unknown key 'asign'; did you mean 'assign'\?"),
        ("zzz: 1\n", r"unknown key 'zzz'; known keys here: assign, corpus"),
        ("name: x\nnull: 1\n", r"line 2: null is no key: keys are text; write the name of one$"),
        ("name: x\n1: y\n", r"line 2: 1 is no key: keys are text"),
        ("losses:\n  bits: [4]\n  true: x\n", r"line 3: losses\.true is no key: keys are text"),
        ("eval: {perplexity: {1.5: x}}\n", r"line 1: eval\.perplexity\.1\.5 is no key: keys are text"),
        ("corpus:\n  sequences: many\n", r"line 2: corpus.sequences is 'many'; give a whole number$"),
        ("losses: {bits: [1, 2, 5]}\n", r"line 1: losses.bits.2 is 5; give 1, 2, 3, 4 or 8$"),
        ("losses: {bits: [2, 2]}\n", "none twice"),
        (
            "losses: {symmetric: true, symmetric_range: narrow, methods: [gptq, signround]}\n",
            "narrow cannot go with signround",
        ),
        (
            "losses: {symmetric: true, symmetric_range: full}\nquantize: {refine: {}}\n",
            "symmetric_range cannot go with quantize.refine",
        ),
        (
            "corpus:\n  source: [bundled, 'hub:a b']\n",
            r"line 2: corpus.source: 'hub:a b' is not a hub dataset; write hub:ORG",
        ),
        (
            "eval:\n  perplexity: {source: 'hub:a/b:c:d:e'}\n",
            r"line 2: eval.perplexity.source: .* is not a hub dataset",
        ),
        ("corpus:\n  until_covered: {shares: 1}\n", r"line 2: unknown key .*did you mean 'share'"),
        ("corpus:\n  until_covered: {share: 2}\n", r"line 2: corpus.until_covered.share is 2; give 1 or less$"),
        (
            "corpus:\n  until_covered: {max_sequences: 9}\n",
            r"line 1: corpus: until_covered.max_sequences is 9, below seq",
        ),
        (
            "corpus: {chat_template: maybe}\n",
            r"line 1: corpus.chat_template is 'maybe'; give 'auto', true or false$",
        ),
        ("profile: {min_tokens: 0}\n", r"line 1: profile.min_tokens is 0; give 1 or more$"),
        ("losses: {group_size: 0}\n", r"group_size is 0; give -1 \(whole rows\) or at least 8"),
        ("assign: {method: prefix-split, code_bits: 7}\n", "code_bits is 7; give a number between 1 and 4"),
        ("assign: {code_bits: 17}\n", "code_bits is 17; give a number between 1 and 16"),
        ("assign: {code_bits: 2, selector: false}\n", "selector: false belongs to prefix-split, not to optimal"),
        ("assign: {bits_per_weight: 0.5}\n", "bits_per_weight is 0.5; give a number between 1 and 32"),
        ("assign: {bits_per_weight: 2, code_bits: 2}\n", "one budget is enough"),
        (
            "assign: {average_bits: 2, code_bits: 2}\n",
            "average_bits is what code_bits was called, and both are given; leave average_bits out",
        ),
        ("assign: {code_bits: lots}\n", "is 'lots'; give a number such as 2.5 or 5/2"),
        ("assign: {method: uniform}\n", "assign.method uniform needs bits, .*; give what it needs"),
        ("assign: {method: prefix-split, code_bits: 2.5, selector: false}\n", "assign.selector off"),
        ("losses: {bits: [2, 4]}\nassign: {method: uniform, bits: 3}\n", "assign: 3 bits is not among losses.bits"),
        ("losses: {methods: [rtn]}\nassign: {quantizer: gptq}\n", "quantizer gptq is not among losses.methods"),
        (
            "eval:\n  compare:\n    - {name: a, method: uniform, bitz: 3}\n",
            r"line 3: unknown key .*did you mean 'bits'",
        ),
        ("eval: {compare: [{name: original, method: uniform, bits: 3}]}\n", "needs a name of its own"),
        ("losses: {working_memory: 3 XB}\n", "unknown unit 'XB'"),
        ("a: 1\n  b: 2\n", r"line 2: not valid YAML"),
        ("- 1\n", "a recipe is a mapping"),
    ],
)
def test_errors_say_what_and_where(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(text)
    with pytest.raises(RecipeError, match=message) as caught:
        load_recipe(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("assign.code_bits", "not key=value"),
        ("assign.code_bitz=2", r"--set: unknown key 'assign\.code_bitz'; did you mean 'code_bits'"),
        ("assign.code_bits=19", r"--set: assign.code_bits is 19; give a number between 1 and 16$"),
        ("name.x=1", "not a section"),
    ],
)
def test_overrides_are_named(override: str, message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        load_recipe(None, [override, "name=y"] if override.startswith("a") else ["name=y", override])


def test_a_key_of_a_section_that_is_off_switches_it_on(tmp_path: Path) -> None:
    """Also where null is written, as in a run's own recipe."""
    for recipe in (None, {"quantize": {"tune": None}, "reparam": None}):
        changed = load_recipe(recipe, ["quantize.tune.steps=4", "reparam.w8a8.experts=plain"])
        assert changed.quantize.tune is not None
        assert changed.quantize.tune.steps == 4
        assert changed.reparam is not None
        assert changed.reparam.w8a8 is not None


def test_budgets_are_exact_and_sizes_have_units() -> None:
    recipe = load_recipe(None, ["assign.code_bits=2.1", "losses.working_memory=1.5GiB"])
    assert recipe.assign.code_bits == "21/10"
    assert recipe.losses.working_memory == 3 * 2**29


def test_earlier_names_are_read(tmp_path: Path) -> None:
    """Of the section, of entries of eval.compare and of --set, which has the last word under either name."""
    path = tmp_path / "r.yaml"
    path.write_text(
        "assign: {average_bits: 2.5}\neval: {compare: [{name: a, method: optimal, average_bits: 3}]}\n", "utf-8"
    )
    recipe = load_recipe(path)
    assert (recipe.assign.code_bits, recipe.eval.compare[0].code_bits) == ("5/2", "3")
    for name in ("average_bits", "code_bits"):
        assert load_recipe(path, [f"assign.{name}=3"]).assign.code_bits == "3"
    stored = load_recipe(path, ["assign.average_bits=null", "assign.bits_per_weight=2.3"]).assign
    assert (stored.bits_per_weight, stored.code_bits) == ("23/10", None)


@pytest.mark.parametrize("null", ["null", "~", " null", ""])
def test_a_budget_that_is_null_takes_no_place(null: str) -> None:
    section = load_recipe({"assign": {"expert_bytes": 2000000}}, [f"assign.bits_per_weight={null}"]).assign
    assert (section.expert_bytes, section.bits_per_weight) == (2000000, None)


@pytest.mark.parametrize("key", ["ndp_latency_ms", "speed"])
def test_a_limit_of_time_takes_the_others_place(key: str) -> None:
    """As a budget does that of another: what an earlier command left in the recipe was no limit beside it."""
    both = {"ndp_latency_ms": "speed", "speed": "ndp_latency_ms"}
    section = load_recipe({"assign": {"bits_per_weight": 3, both[key]: 2.5}}, [f"assign.{key}=20"]).assign
    assert getattr(section, both[key]) is None
    assert getattr(section, key) is not None
    with pytest.raises(RecipeError, match="each limit the time; give one of them"):
        load_recipe({"assign": {"bits_per_weight": 3}}, ["assign.speed=20", "assign.ndp_latency_ms=2"])


@pytest.mark.parametrize(
    ("assign", "entry", "budget"),
    [
        ({"bits_per_weight": 4.5}, {}, ("bits_per_weight", "9/2")),
        ({"average_bits": 3}, {}, ("code_bits", "3")),
        ({"size": "3MiB"}, {"method": "budget"}, ("size", 3 * 2**20)),
        ({"expert_bytes": 2000000}, {"method": "uniform"}, ("expert_bytes", 2000000)),
        ({"bits_per_weight": 4.5}, {"average_bits": 2}, ("code_bits", "2")),
        ({"bits_per_weight": 4.5}, {"method": "uniform", "bits": 2}, ("bits", 2)),
        ({"code_bits": 3}, {"method": "budget"}, ("bits_per_weight", "9/4")),
        ({"method": "uniform", "bits": 4}, {}, ("bits_per_weight", "9/4")),
        ({"bits_per_weight": 4.5}, {"method": "mopeq"}, None),
        ({"bits_per_weight": 4.5}, {"method": "optimal", "speed": 20}, ("bits_per_weight", "17")),
    ],
)
def test_what_is_compared_has_the_budget_of_the_recipes_own(
    assign: dict[str, object], entry: dict[str, object], budget: tuple[str, object] | None
) -> None:
    """Unless it has its own, or its method does not take that one."""
    data = {"assign": assign, "eval": {"compare": [{"name": "a", "method": "frequency"} | entry]}}
    (one,) = load_recipe(data).eval.compare
    given = [(key, value) for key in budget_keys() if (value := one.model_dump()[key]) is not None]
    assert given == [budget] * (budget is not None)


def test_a_budget_that_a_command_sets_holds_for_what_is_compared() -> None:
    data = {"assign": {"bits_per_weight": 4}, "eval": {"compare": [{"name": "a", "method": "frequency"}]}}
    assert load_recipe(data, ["assign.bits_per_weight=6"]).eval.compare[0].bits_per_weight == "6"


def test_keys_of_stages_are_those_of_the_earlier_names() -> None:
    """Of a section with code_bits; bits_per_weight is in them where it is given."""
    codes = as_in_keys(load_recipe(None, ["assign.code_bits=2.5"]).model_dump(mode="json"))["assign"]
    assert codes["average_bits"] == "5/2"
    assert not {"code_bits", "bits_per_weight"} & set(codes)
    stored = as_in_keys(load_recipe(None, ["assign.bits_per_weight=2.5"]).model_dump(mode="json"))["assign"]
    assert (stored["average_bits"], stored["bits_per_weight"]) == (None, "5/2")


def test_corpora_can_be_set_from_the_command_line() -> None:
    overrides = ["corpus.until_covered.share=0.5", "corpus.chat_template=true", "corpus.image_field=null",
                 "corpus.source=hub:allenai/c4@main:en:train", "profile.min_tokens=5"]  # fmt: skip
    recipe = load_recipe(None, overrides)
    assert recipe.corpus.until_covered is not None
    assert (recipe.corpus.until_covered.share, recipe.corpus.until_covered.max_sequences) == (0.5, 2048)
    assert recipe.corpus.chat_template is True
    assert recipe.corpus.image_field is None
    assert recipe.profile.min_tokens == 5
    assert load_recipe(None, ["corpus.chat_template=auto"]).corpus.chat_template == "auto"


@pytest.mark.parametrize(
    ("source", "parts"),
    [
        ("hub:wikitext", ("wikitext", None, None, None)),
        ("hub:allenai/c4:en", ("allenai/c4", None, "en", None)),
        ("hub:a/b::validation", ("a/b", None, "", "validation")),
        ("hub:a/b@refs/convert/parquet:default:train_sft", ("a/b", "refs/convert/parquet", "default", "train_sft")),
    ],
)
def test_hub_datasets_are_written_in_one_word(source: str, parts: tuple[str | None, ...]) -> None:
    match = HUB_DATASET.fullmatch(str(load_recipe(None, [f"corpus.source={source}"]).corpus.source))
    assert match is not None
    assert match.group("name", "revision", "config", "split") == parts


def test_best_chooses_among_the_methods_there_are() -> None:
    one = load_recipe(None, ["losses.methods=[rtn]", "assign.quantizer=best", "eval.compare=[]"])
    assert (one.assign.quantizer, one.losses.methods) == ("best", ["rtn"])
    with pytest.raises(RecipeError, match=r"quantizer gptq is not among losses\.methods"):
        load_recipe(None, ["losses.methods=[rtn]", "assign.quantizer=gptq", "eval.compare=[]"])
    only = load_recipe(None, ["losses.methods=[rtn]", "eval.compare=[{name: two, method: uniform, bits: 2}]"])
    assert [only.assign.quantizer, only.eval.compare[0].quantizer] == ["rtn", "rtn"]
    with pytest.raises(RecipeError, match=r"quantizer gptq is not among losses\.methods"):
        load_recipe(None, ["losses.methods=[rtn,signround]", "eval.compare=[]"])


def test_others_are_full_precision_by_default() -> None:
    section = load_recipe(None).others
    assert section.widths() == {}
    assert (section.method, section.group_size, section.symmetric, section.damping) == ("gptq", None, False, None)
    chosen = load_recipe(None, ["others={attention: 4, head: 8, shared: null}"]).others
    assert chosen.widths() == {"attention": 4, "head": 8}


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("others.attention=16", r"others\.attention is 16; give 2, 3, 4 or 8$"),
        ("others.attention=1", r"others\.attention"),
        ("others.atention=4", r"unknown key 'others\.atention'.*did you mean 'attention'"),
        ("others.router=4", r"unknown key 'others\.router'"),
        ("others.method=signround", r"others\.method"),
        ("others.group_size=0", r"group_size is 0; give -1 \(whole rows\) or at least 8"),
        ("others.group_size=4", r"group_size is 4; give -1 \(whole rows\) or at least 8"),
        ("others.damping=0", r"others\.damping"),
    ],
)
def test_others_that_cannot_be_are_named(override: str, message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        load_recipe(None, [override])


@pytest.mark.parametrize(("size", "count"), [("1e9", 10**9), ("1.5e3 MiB", 1500 * 2**20), ("1.0e+9", 10**9), ("5", 5)])
def test_a_size_may_have_an_exponent(size: str, count: int) -> None:
    assert load_recipe(None, [f"assign.size={size}"]).assign.size == count
