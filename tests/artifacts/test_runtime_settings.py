"""`--for RUNTIME`: what the recipe gains follows from the target, and what is assigned then is what it loads."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from moeq import pipeline
from moeq.artifacts.runtime_settings import grid_settings, settings_for
from moeq.artifacts.targets import targets
from moeq.bundled.preset_files import QUALITIES
from moeq.errors import RecipeError
from moeq.folders import RECIPE_COPY
from moeq.options import BuildOptions, StageOptions
from moeq.progress import Reporter
from moeq.recipe import Recipe, Start, load_recipe
from moeq.recipe.editing import as_yaml
from moeq.runtimes import runtimes
from moeq.stages import assign, export
from moeq.stages.context import Context
from moeq.stages.loading import where_it_loads
from moeq.starting import context_of

SMALL = (
    "corpus.sequences=8", "corpus.sequence_length=48", "losses.methods=[rtn]", "assign.quantizer=rtn",
    "assign.bits_per_weight=3", "eval.compare=[]",
)  # fmt: skip
SYMMETRIC = ("transformers", "vllm", "vllm-cuda", "vllm-gptq", "humming")
NARROW = 4  # bits a weight that some runtimes cannot store it in


def recipe_for(name: str, *given: str) -> tuple[Recipe, dict[str, str]]:
    settings = settings_for(name, load_recipe(None, given))
    return load_recipe(None, [*given, *(one.change for one in settings)]), {one.key: one.value for one in settings}


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Context:
    """The bundled model, whose matrices have 128 and 256 inputs, in symmetric grids."""
    recipe = load_recipe(None, [*SMALL, "losses.symmetric=true"])
    out = tmp_path_factory.mktemp("for") / "run"
    context = Context(recipe=recipe, model_name="bundled:tiny-mixtral", out=out, reporter=Reporter(quiet=True))
    pipeline.run(context, ("profile", "losses"))
    return context


@pytest.mark.cases(1)
@pytest.mark.parametrize("name", runtimes())
def test_what_is_assigned_is_what_the_runtime_loads(measured: Context, name: str) -> None:
    target = runtimes()[name].target
    if name == "exl3":
        pytest.skip("it takes codes of its own, and slowly: tests/exporters/test_exl3.py")
    most = 3 if target is None or min(target.widths) < NARROW else 5
    given = [*SMALL, "losses.symmetric=true", f"assign.bits_per_weight={most}"]
    settings = settings_for(name, load_recipe(None, given), measured.model.layers)
    context = replace(measured, recipe=load_recipe(None, [*given, *(one.change for one in settings)]))
    export.check(context)
    made = assign.decide(assign.inputs_of(context, context.recipe.assign, "asked"))
    export.check_formats(context, made)
    assert made.code_bits() is not None
    assert assign.summarize(context, made)["bits_per_weight_all"] <= most
    where = where_it_loads(context, made)
    assert name == "dequantized" or where[name] is None


@pytest.mark.parametrize("quality", QUALITIES)
@pytest.mark.parametrize("name", runtimes())
def test_presets_make_grids_for_runtimes_that_read_no_trellis_codes(quality: str, name: str) -> None:
    start = Start(preset=quality)
    changes = [one.change for one in settings_for(name, start.recipe(), said=())]
    recipe, target = Start(preset=quality, changes=changes).recipe(), runtimes()[name].target
    grids = quality == "fast" or not (target is None or "trellis" in target.codes)
    method = "exl3" if name == "exl3" else "gptq" if grids else "trellis"
    assert (recipe.losses.methods, recipe.assign.quantizer) == ([method], method)
    assert (recipe.losses.clip, recipe.losses.act_order) == ("mse", True)
    assert (recipe.quantize.refine is not None) == (quality == "best" and method == "gptq")
    assert (recipe.quantize.tune is not None) == (quality == "best")


def test_settings_follow_from_the_target() -> None:
    for name, target in targets().items():
        recipe, settings = recipe_for(name)
        assert recipe.assign.target == (target.rounded or name)
        assert recipe.export.formats == ([] if name == "native" else [target.rounded or name])
        assert ("losses.symmetric" in settings) == (name in SYMMETRIC)
        assert recipe.assign.method == "optimal"
        assert "assign.method" not in settings
        decides = target.granularity in ("layer", "model") or 1 not in target.widths
        given = "assign.method=prefix-split"
        changes = [one.change for one in settings_for(name, load_recipe(None, [given]), said=())]
        assert ("assign.method=optimal" in changes) == decides, "prefix-split has fixed widths"
        least = "9/4" if min(target.widths) < NARROW else "33/8"
        assert load_recipe(None, [given, *changes]).assign.bits_per_weight == least
    assert recipe_for("dequantized")[1] == {"assign.target": "dequantized", "export.formats": "[dequantized]"}


def test_what_is_given_stays_and_what_does_not_fit_goes() -> None:
    assert "losses.symmetric" not in recipe_for("llama.cpp", "losses.symmetric=false")[1]
    asymmetric = load_recipe(None, ["losses.symmetric=false"])
    of_cuda = {one.key: one.value for one in settings_for("vllm-cuda", asymmetric)}
    assert of_cuda["losses.symmetric"] == "true", "it loads no other, whatever the recipe says"
    beside = settings_for("vllm-cuda", asymmetric, fixed=("losses.symmetric",))
    assert "losses.symmetric" not in {one.key for one in beside}, "and is refused then"
    few = (
        "losses.bits=[1, 3]",
        "losses.symmetric=false",
        "eval.compare=[]",
        "assign={method: optimal, bits_per_weight: 3}",
    )
    assert "losses.bits" not in recipe_for("vllm-cuda", *few)[1]
    every = settings_for("vllm-cuda", load_recipe(None, few), said=())
    assert {"losses.bits=[1, 2, 3, 4, 8]", "losses.symmetric=true"} <= {one.change for one in every}
    odd = ["others.attention=4", "assign={method: prefix-split, gpu_experts: 1, bits_per_weight: 3}"]
    recipe = load_recipe(None, odd)
    settings = {one.key: one.value for one in settings_for("transformers", recipe, said=())}
    assert settings["others.attention"] == "null"
    assert settings["assign.gpu_experts"] == "0"
    packed = recipe_for("gptqmodel", "others={attention: 4, embeddings: 8, head: 4}")[0].others
    assert packed.widths() == {"attention": 4}, "embeddings and heads it loads in full precision only"
    assert all(str(one).count("\n") == 0 and one.why for one in settings_for("transformers", recipe, said=()))


@pytest.mark.parametrize("name", ["auto-round", "vllm", "transformers", "llama.cpp", "vllm-gptq"])
def test_a_written_recipe_gives_way_where_nothing_of_it_would_load(name: str) -> None:
    """As `moeq init` writes one, of trellis codes and widths by matrix; what stands beside it stays, or is refused."""
    given = ["losses.methods=[trellis]", "assign.quantizer=trellis", "assign.granularity=projection",
             "assign.gpu_experts=0", "losses.group_size=48", "assign.bits_per_weight=5"]  # fmt: skip
    recipe, changes = recipe_for(name, *given)
    assert recipe.losses.encoding.codes == "grid"
    target = targets()[name]
    assert target.groups is None or recipe.losses.group_size in target.groups
    assert recipe.assign.granularity is None or target.stacks or target.granularity == "projection"
    assert "assign.bits_per_weight" not in changes
    with pytest.raises(RecipeError, match=f"losses.methods: --for {name} reads no trellis codes"):
        settings_for(name, load_recipe(None, given), fixed=("losses.methods",))
    fixed = settings_for(name, load_recipe(None, given), fixed=("losses.group_size",))
    assert "losses.group_size" not in {one.key for one in fixed}


def test_another_runtime_takes_the_place_of_the_one_before() -> None:
    before = ["assign.target=auto-round", "export.formats=[auto-round, dequantized]"]
    settings = {one.key: one.value for one in settings_for("vllm", load_recipe(None, before), said=())}
    assert (settings["assign.target"], settings["export.formats"]) == ("vllm", "[dequantized, vllm]")


def test_the_budget_is_the_least_that_loads() -> None:
    """Unless it was given: what the runtime cannot hold in it is refused then."""
    settings = {one.key: one for one in settings_for("vllm", load_recipe(None), said=())}
    assert settings["assign.bits_per_weight"].value == "33/8"
    assert settings["assign.bits_per_weight"].why == "vllm loads nothing narrower than 4 bits"
    asked = ["assign.bits_per_weight=3"]
    said = {"assign.bits_per_weight"}
    assert "assign.bits_per_weight" not in {
        one.key for one in settings_for("vllm", load_recipe(None, asked), said=said)
    }
    wide = load_recipe(None, ["assign.bits_per_weight=5", "losses.group_size=32"])
    settings = {one.key: one for one in settings_for("vllm", wide, said=())}
    assert "assign.bits_per_weight" not in settings
    assert settings["losses.group_size"].value in ("64", "128"), "no kernel for groups of 32"


def test_groups_follow_from_the_models_matrices() -> None:
    class Layer:
        name, projections = "experts", ("up_proj",)

        def shape(self, projection: str) -> tuple[int, int]:
            return 256, 96

    settings = settings_for("auto-round", load_recipe(None), [Layer()])
    assert "losses.group_size=32" in {one.change for one in settings}, "96 inputs are no whole groups of 128 or 64"


@pytest.mark.parametrize(
    ("granularity", "bits", "size", "exact"),
    [
        ("projection", "3.5", None, "256"),  # 2.625 bits of one and 4.5 of the other are more
        ("projection", "3.5625", "32", "256"),
        ("expert", "3.5625", None, None),  # 4 bits of both
        ("expert", "4.5", "32", None),
    ],
)
def test_groups_are_those_in_which_most_is_loaded_of_each_matrix(
    granularity: str, bits: str, size: str | None, exact: str | None
) -> None:
    """llama.cpp has 2 and 3 bits in blocks of 256, of which 1408 inputs of `down_proj` are no multiple; its blocks have
    scales for every 16 or 32 weights, which take no more where a budget pays for the blocks."""

    class Layer:
        name, projections = "experts", ("up_proj", "down_proj")

        def shape(self, projection: str) -> tuple[int, int]:
            return (1408, 2048) if projection == "up_proj" else (2048, 1408)

    recipe = load_recipe(None, [f"assign={{method: optimal, bits_per_weight: {bits}, granularity: {granularity}}}"])
    changes = {one.key: one.value for one in settings_for("llama.cpp", recipe, [Layer()], said=())}
    assert changes["assign.target"] == "llama.cpp-refit"
    assert changes["export.formats"] == "[llama.cpp-refit]"
    assert changes.get("losses.group_size") == size
    as_they_are = recipe.model_copy(update={"assign": recipe.assign.model_copy(update={"target": "llama.cpp"})})
    changes = {one.key: one.value for one in settings_for("llama.cpp", as_they_are, [Layer()], said=())}
    assert changes["assign.target"] == "llama.cpp"
    assert changes.get("losses.group_size") == exact
    again = recipe.model_copy(update={"assign": recipe.assign.model_copy(update={"target": "llama.cpp-refit"})})
    assert settings_for("llama.cpp", again, [Layer()])[0].value == "llama.cpp-refit", "a run that goes on"


class Sides:
    """A layer of such matrices."""

    name, projections = "experts", ("up_proj",)

    def __init__(self, rows: int = 512, inputs: int = 256) -> None:
        self.sides = rows, inputs

    def shape(self, projection: str) -> tuple[int, int]:
        return self.sides


@pytest.mark.parametrize(
    ("sides", "given", "methods", "name"),
    [
        ((512, 256), ["assign.bits_per_weight=3"], "[iq]", None),
        ((512, 256), ["assign.bits_per_weight=2.5625"], "[iq]", None),  # IQ2_S exactly
        ((512, 256), ["assign.bits_per_weight=2.5"], "[iq]", "xs"),
        ((512, 256), ["assign.bits_per_weight=2.1"], "[iq]", "xxs"),
        ((512, 256), ["assign.bits_per_weight=1.6"], "[iq]", "xxs"),
        ((512, 256), ["assign.bits_per_weight=1.5"], "[gptq]", None),  # below IQ1_S
        ((512, 384), ["assign.bits_per_weight=3"], "[gptq]", None),  # no whole blocks
        ((384, 256), ["assign.bits_per_weight=3"], "[gptq]", None),  # rows are what the next matrix is given
    ],
)
def test_llama_cpp_has_i_quants_where_they_fit(
    sides: tuple[int, int], given: list[str], methods: str, name: str | None
) -> None:
    recipe = Start(preset="balanced", changes=given).recipe()
    settings = {one.key: one.value for one in settings_for("llama.cpp", recipe, [Sides(*sides)], said=())}
    made = methods == "[iq]"
    assert settings["losses.methods"] == methods
    assert settings["assign.quantizer"] == methods.strip("[]")
    assert settings.get("losses.iq_set") == name
    assert settings["assign.target"] == ("llama.cpp" if made else "llama.cpp-refit")
    assert not made or not {"losses.group_size", "assign.bits_per_weight"} & {*settings}


def test_llama_cpp_has_grids_where_they_are_asked_for() -> None:
    budget = "assign.bits_per_weight=3"
    for given in ("losses.group_size=64", "losses.symmetric=true"):
        recipe = Start(preset="balanced", changes=[budget]).recipe()
        said = {given.partition("=")[0]}
        settings = {one.key: one.value for one in settings_for("llama.cpp", recipe, [Sides()], said=said)}
        assert settings["losses.methods"] == "[gptq]"
    gptq = Start(preset="balanced", changes=[budget, "losses.methods=[gptq]", "assign.quantizer=gptq"]).recipe()
    settings = {one.key: one.value for one in settings_for("llama.cpp", gptq, [Sides()], said=("losses.methods",))}
    assert "losses.methods" not in settings
    assert settings["assign.target"] == "llama.cpp-refit"
    unknown = Start(preset="balanced", changes=[budget]).recipe()
    settings = {one.key: one.value for one in settings_for("llama.cpp", unknown, said=())}
    assert settings["losses.methods"] == "[gptq]", "no model is known"
    sized = Start(preset="balanced", changes=["assign.size=1GiB", "assign.bits_per_weight=null"]).recipe()
    for room, name in ((Fraction(3), None), (Fraction(9, 4), "xxs")):
        settings = {one.key: one.value for one in settings_for("llama.cpp", sized, [Sides()], said=(), room=room)}
        assert (settings["losses.methods"], settings.get("losses.iq_set")) == ("[iq]", name)


def test_the_option_changes_the_recipe_and_tells_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = StageOptions(for_="vllm", model="bundled:tiny-mixtral", out=tmp_path / "run")
    context = context_of(asked, "plan")
    assert context.recipe.export.formats == ["vllm"]
    assert context.recipe.losses.symmetric
    told = capsys.readouterr().err.replace("\n", " ")
    for words in ("assign.target: vllm", "losses.symmetric: true (it reads symmetric grids only)"):
        assert words in told


def test_two_runtimes_on_a_command_line_have_to_agree(tmp_path: Path) -> None:
    """Of --target, or --set, and --for neither is taken silently; which target of llama.cpp may be said."""
    made = {"model": "bundled:tiny-mixtral", "out": tmp_path / "run"}
    for name in ("llama.cpp", "llama.cpp-refit"):
        asked = StageOptions(**made, set_=[f"assign.target={name}"], for_="llama.cpp")
        assert context_of(asked, "plan").recipe.assign.target == name
    other = StageOptions(**made, set_=["assign.target=gptqmodel"], for_="auto-round")
    with pytest.raises(RecipeError, match=r"assign\.target: gptqmodel says otherwise than --for auto-round"):
        context_of(other, "plan")


@pytest.mark.parametrize("options", [{"for_": "vllm"}, {"set_": ["assign.target=vllm"]}], ids=["option", "target"])
def test_a_grid_may_be_asked_for_beside_codes_that_give_way(options: dict[str, Any], tmp_path: Path) -> None:
    """The default preset makes trellis codes, which have no symmetric grids, and the runtime reads none."""
    grid = ["losses.symmetric=true", "losses.group_size=64"]
    given = options | {"set_": [*options.get("set_", ()), *grid]}
    made = {"model": "bundled:tiny-mixtral", "out": tmp_path / "run"}
    losses = context_of(StageOptions(**made, **given), "plan").recipe.losses
    assert (losses.methods, losses.symmetric, losses.group_size) == (["gptq"], True, 64)
    for refused in ({"set_": grid}, {"set_": grid, "for_": "native"}):
        with pytest.raises(RecipeError, match="cannot go with trellis"):
            context_of(StageOptions(**made, **refused), "plan")
    with pytest.raises(RecipeError, match=r"losses\.symmetric is 'maybe'"):
        context_of(StageOptions(**made, **given | {"set_": ["losses.symmetric=maybe"]}), "plan")


def test_the_recipe_of_a_run_that_goes_on_may_be_changed_too(tmp_path: Path) -> None:
    """It says every key, of which the user gave few; a recipe of the user's own is kept where something of it loads."""
    out = tmp_path / "run"
    first = context_of(StageOptions(model="bundled:tiny-mixtral", out=out), "run")
    out.mkdir()
    text = as_yaml(first.recipe.model_dump(mode="json") | {"model": "bundled:tiny-mixtral"})
    for place in (out / RECIPE_COPY, tmp_path / "mine.yaml"):
        place.write_text(text, "utf-8")
    recipe = context_of(StageOptions(for_="vllm", out=out), "run").recipe
    assert recipe.losses.symmetric
    assert recipe.assign.granularity is None
    mine = StageOptions(for_="vllm", what=str(tmp_path / "mine.yaml"), out=tmp_path / "other")
    kept = context_of(mine, "run").recipe
    assert (kept.losses.symmetric, kept.losses.bits) == (True, first.recipe.losses.bits)
    assert kept.assign.bits_per_weight == first.recipe.assign.bits_per_weight != recipe.assign.bits_per_weight


def test_a_target_alone_chooses_its_grid_before_anything_is_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = {"model": "bundled:tiny-mixtral", "out": tmp_path / "run"}
    asked = StageOptions(set_=["assign.target=vllm", "assign.bits_per_weight=5"], **made)
    recipe = context_of(asked, "run").recipe
    assert recipe.losses.symmetric
    assert recipe.export.formats == []
    told = capsys.readouterr().err.replace("\n", " ")
    assert "for vllm: losses.symmetric: true (vllm reads symmetric grids only)" in told
    small = load_recipe(None, ["losses.group_size=32", "losses.symmetric=true"])
    assert [one.change for one in grid_settings("vllm", small, said=())] == ["losses.group_size=64"]
    assert grid_settings("vllm", small) == grid_settings("llama.cpp", small, said=()) == []
    given = StageOptions(set_=["assign.target=vllm", "losses.symmetric=false"], **made)
    assert not context_of(given, "run").recipe.losses.symmetric
    other = StageOptions(set_=["assign.target=auto-round"], **made)
    assert not context_of(other, "run").recipe.losses.symmetric


def test_a_targets_grid_hangs_on_the_recipe_alone(tmp_path: Path) -> None:
    """A recipe that is given again means the same; the one in a run's directory says all, and so what is measured."""
    run, mine = tmp_path / "run", tmp_path / "mine.yaml"
    mine.write_text(as_yaml({"model": "bundled:tiny-mixtral", "assign": {"target": "vllm", "bits_per_weight": 5}}))
    asked = StageOptions(what=str(mine), out=run)
    first = context_of(asked, "run").recipe
    (run / "losses").mkdir(parents=True)
    (run / RECIPE_COPY).write_text(as_yaml(first.model_dump(mode="json")), "utf-8")
    assert first.losses.symmetric
    assert context_of(asked, "run").recipe == first
    preset = BuildOptions(preset="fast", model="bundled:tiny-mixtral", out=run, set_=["assign.target=vllm"])
    assert context_of(preset, "run").recipe.losses.symmetric
    plain = load_recipe(None, ["model=bundled:tiny-mixtral"]).model_dump(mode="json")
    (run / RECIPE_COPY).write_text(as_yaml(plain), "utf-8")
    within = StageOptions(out=run, set_=["assign.target=vllm"])
    assert not context_of(within, "assign").recipe.losses.symmetric


@pytest.mark.full
@pytest.mark.parametrize("name", runtimes())
def test_it_is_exported_for_every_runtime(name: str, tmp_path: Path) -> None:
    target = runtimes()[name].target
    wide = ["assign.bits_per_weight=5"] if target is not None and min(target.widths) >= NARROW else []
    small = [one for one in SMALL if name != "exl3" or "rtn" not in one]  # rounding makes none of EXL3's codes
    asked = StageOptions(
        for_=name, model="bundled:tiny-mixtral", out=tmp_path / "run", set_=[*small, *wide], quiet=True
    )
    context = context_of(asked, "run")
    pipeline.run(context, ("profile", "losses", "assign", "quantize", "export"))
    written = target.rounded or name if target is not None else name
    assert name == "native" or (export.format_directory(context.out, written) / "config.json").is_file()
