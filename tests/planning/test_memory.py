"""Foretold peaks of memory against those of a process that runs the stages."""

from __future__ import annotations

import argparse
import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

from moeq.models.experts import ExpertLayer
from moeq.planning.plan import add_up, make_plan
from moeq.planning.result import Need
from moeq.quantizers.layer import expert_batches
from moeq.quantizers.layer_training import WEIGHT_BYTES
from moeq.recipe import Recipe, load_recipe
from moeq.stages import export, needs_evaluate, needs_losses, quantize, reparam
from moeq.stages.context import Context
from moeq.stages.needs import APART, LEVERS, Sizes
from moeq.stages.needs_losses import batch_moments
from moeq.stages.order import STAGES

ROOT = Path(__file__).parents[2]
SMALL = (
    "corpus.sequences=16", "corpus.sequence_length=64", "corpus.batch_size=8", "losses.methods=[rtn]",
    "losses.bits=[2,3,4]", "losses.per_projection=false", "assign={method: uniform, bits: 3, quantizer: rtn}",
    "eval.compare=[]", "eval.perplexity.sequences=16", "eval.perplexity.sequence_length=64",
    "estimate.grid.inputs=[128]", "estimate.grid.outputs=[512]",
)  # fmt: skip
SIZES = {  # hidden and intermediate size, experts, layers
    "60 MB": (256, 256, 18, 8),
    "400 MB": (768, 768, 18, 6),
}


def make(folder: Path, size: str) -> Path:
    """The random Mixtral of the memory benchmark, whose logits stand up to bfloat16."""
    spec = importlib.util.spec_from_file_location("memory_benchmark", ROOT / "benchmarks" / "memory.py")
    assert spec is not None
    assert spec.loader is not None
    benchmark = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(benchmark)
    hidden, inner, experts, layers = SIZES[size]
    options = argparse.Namespace(hidden=hidden, intermediate=inner, experts=experts)
    found: Path = benchmark.make(folder, layers, options)
    return found


def measured(model: Path, out: Path, overrides: tuple[str, ...]) -> dict[str, dict[str, float]]:
    command = [sys.executable, str(ROOT / "benchmarks" / "plan.py"), "--one", str(model), "", str(out), *overrides]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found: dict[str, dict[str, float]] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize(
    ("size", "stream"),
    [
        pytest.param("60 MB", "never", marks=pytest.mark.full),
        pytest.param("60 MB", "always", marks=pytest.mark.full),
        pytest.param("400 MB", "never", marks=pytest.mark.full),
        pytest.param("400 MB", "always", marks=pytest.mark.full),
    ],
)
def test_peaks_are_bounded_and_not_far_off(size: str, stream: str, tmp_path: Path) -> None:
    model = make(tmp_path / "model", size)
    overrides = (*SMALL, f"stream={stream}")
    plan = make_plan(
        Context(recipe=load_recipe(None, list(overrides)), model_name=str(model), out=tmp_path / "none"), probe=False
    )
    found = measured(model, tmp_path / "run", overrides)
    for need in plan.stages:
        taken = found[need.stage]["ram_bytes"]
        assert 0.95 * taken <= need.ram <= 1.4 * taken, (need.stage, taken, need.ram, need.ram_terms)


def needs(context: Context) -> dict[str, Need]:
    return {need.stage: need for need in add_up(Sizes(context))}


def batch_bytes(layer: ExpertLayer, recipe: Recipe, routed: int, *, gpu: bool = False) -> int:
    return max(batch for batch, _ in batch_moments(layer, recipe.losses, routed, gpu=gpu))


@pytest.mark.full
def test_memory_grows_with_what_it_hangs_on(sparse_small: Path, tmp_path: Path) -> None:
    def of(stage: str, *overrides: str) -> int:
        recipe = load_recipe(None, ["stream=always", *overrides])
        context = Context(recipe=recipe, model_name=str(sparse_small), out=tmp_path)
        return needs(context)[stage].ram

    tokens = 128 * 512 * 4096
    more = of("profile", "corpus.sequences=256") - of("profile")
    assert 5 * 2 * tokens * 0.9 < more < 5 * 2 * tokens * 1.5  # five copies of every token in bfloat16, and routing
    less = of("losses") - of("losses", "losses.working_memory=1GiB")
    assert 0 < less < 4 * 2**30
    shorter = of("eval") - of("eval", "eval.perplexity.batch_size=4")
    logits = 12 * 512 * 151936 * 2  # as the model gives them: a few at once are in float64
    assert logits < shorter < 3 * logits  # and the activations of a batch
    refined = of("quantize", "quantize.refine={}") - of("quantize")
    trained = 3 * WEIGHT_BYTES * 3 * 4096 * 1024  # as many experts as go into 2 GiB
    assert 8 * 2 * tokens + trained < refined < 24 * 2 * tokens + 8 * 2**30  # two runs' tokens, and the training
    whole = of("profile", "stream=never")
    assert whole > 18 * 2**30 > of("profile")


def test_a_batch_of_experts_stays_near_the_working_memory(sparse_small: Path, tmp_path: Path) -> None:
    for memory in ("1GiB", "4GiB", "16GiB"):
        recipe = load_recipe(None, [f"losses.working_memory={memory}"])
        layer = Context(recipe=recipe, model_name=str(sparse_small), out=tmp_path).model.layers[0]
        assert 0.3 < batch_bytes(layer, recipe, 4096) / recipe.losses.working_memory < 3


@pytest.mark.parametrize(("memory", "experts"), [("16MB", 3), ("2GiB", 8)])
def test_no_more_experts_are_in_training_than_a_layer_has(memory: str, experts: int, tmp_path: Path) -> None:
    """All of the working memory was foretold, however small the experts."""
    made = f"quantize.refine={{iterations: 2, working_memory: {memory}}}"
    context = Context(recipe=load_recipe(None, [*SMALL, made]), model_name="bundled:tiny-mixtral", out=tmp_path)
    terms = [moment.get("experts in training", 0) for moment in quantize.needs(Sizes(context)).moments]
    weights = experts * WEIGHT_BYTES * context.model.layers[0].parameters_per_expert
    assert weights < max(terms) < 1.6 * weights  # and activations of a step


def test_a_batch_holds_on_a_cpu_what_its_column_loop_leaves(sparse_small: Path, tmp_path: Path) -> None:
    """Weights, their codes, a copy of gate and up, and Hessians a few times: no float32 tensor of all widths."""
    recipe = load_recipe(None, ["losses.working_memory=4GiB", "losses.methods=[gptq]"])
    layer = Context(recipe=recipe, model_name=str(sparse_small), out=tmp_path).model.layers[0]
    first = next(expert_batches(layer, recipe.losses))
    weights = (first.stop - first.start) * layer.parameters_per_expert
    hessians = 4 * (first.stop - first.start) * (layer.hidden_size**2 + layer.intermediate_size**2)
    codes = len(recipe.losses.bits) * weights
    tensors = 4 * weights + 4 * weights + 3 * hessians + codes
    assert 0.8 * tensors < batch_bytes(layer, recipe, 512) < 1.1 * tensors < batch_bytes(layer, recipe, 512, gpu=True)


def test_a_gpu_holds_what_computes_and_the_machine_the_rest(tiny_mixtral: Path, tmp_path: Path) -> None:
    sizes = Sizes(Context(recipe=load_recipe(None, list(SMALL)), model_name=str(tiny_mixtral), out=tmp_path))
    sizes.gpu = True
    found = {need.stage: need for need in add_up(sizes)}
    for stage in ("profile", "losses", "eval"):
        gpu = set(found[stage].gpu_terms)
        ram = set(found[stage].ram_terms)
        assert "program" in ram - gpu
        assert gpu
        assert not gpu & {"program", "text", "headers", "loss table and profile"}


def test_words_that_lie_in_the_file_count_where_logits_are_made(tiny_mixtral: Path, tmp_path: Path) -> None:
    """Of a model that is nearly all embeddings twice what profile and assign take was foretold."""

    def of(*overrides: str) -> dict[str, dict[str, int]]:
        recipe = load_recipe(None, [*SMALL, "losses.layer_effects={}", *overrides])
        context = Context(recipe=recipe, model_name=str(tiny_mixtral), out=tmp_path).given()
        needed = add_up(Sizes(context))
        return {need.stage: need.ram_terms for need in needed} | {"": {"whole": Sizes(context).whole}}

    config = json.loads((tiny_mixtral / "config.json").read_text("utf-8"))
    words = 2 * config["vocab_size"] * config["hidden_size"] * 4
    in_place, cast = of(), of("dtype=bfloat16")
    assert in_place["assign"]["model"] == in_place[""]["whole"] - words
    assert cast["assign"]["model"] == cast[""]["whole"]
    assert of("stream=always")["estimate"]["resident weights"] < words
    assert {stage: "embeddings and head" in terms for stage, terms in in_place.items()} == {
        stage: stage in ("losses", "eval") for stage in in_place
    }


def test_a_packed_head_counts_where_it_is_held_against_the_original(tiny_mixtral: Path, tmp_path: Path) -> None:
    """Its values and the original's beside the codes; what is compared is so a block at a time."""
    context = Context(recipe=load_recipe(None, [*SMALL, "others.head=8"]), model_name=str(tiny_mixtral), out=tmp_path)
    sizes = Sizes(context.given())
    (head,) = sizes.others.modules
    terms = [moment.get("one module, compared", 0) for moment in quantize.needs(sizes).moments]
    assert 7 * head.rows * head.inputs < max(terms) < 8 * head.rows * head.inputs


@pytest.mark.parametrize("others", ["null", "{attention: 4, head: 8}"])
def test_what_evaluation_puts_back_and_what_a_plain_copy_takes_count(
    others: str, tiny_mixtral: Path, tmp_path: Path
) -> None:
    """Measured on embeddings and a head of 67 million weights each: eval took 1,267 MiB, the export 2,236."""
    overrides = (*SMALL, "stream=never", "export.formats=[dequantized]", *([f"others={others}"] * (others != "null")))
    context = Context(recipe=load_recipe(None, list(overrides)), model_name=str(tiny_mixtral), out=tmp_path)
    sizes, width = Sizes(context.given()), 4
    replaced = sizes.expert_parameters + sum(module.rows * module.inputs for module in sizes.others.modules)
    swapping = max(
        (moment for moment in needs_evaluate.needs(sizes).moments if "one module, dequantized" in moment),
        key=lambda moment: sum(moment.values()),
    )
    assert swapping["weights that were replaced"] == replaced * width
    largest = max((module.rows * module.inputs for module in sizes.others.modules), default=0)
    assert width * largest <= swapping["one module, dequantized"] <= 1.5 * width * largest
    apart = max(moment.get(APART, 0) for moment in export.needs(sizes).moments) - export.TARGET_PROGRAM
    assert apart == sizes.whole  # all of it in float32


def test_every_term_that_lies_with_the_model_is_known(tiny_mixtral: Path, tmp_path: Path) -> None:
    """A GPU holds what is in the list: no name of it stands for nothing, whatever the recipe asks for."""
    found: set[str] = set()
    for overrides in (
        ("stream=never", "eval.tasks=[moeq_continuation]", "eval.limit=2"),
        ("stream=always", "others.head=8", "eval.perplexity.sequences=4"),
        ("losses.layer_effects={}", "quantize={refine: {}, tune: {}}", "reparam.samples=4"),
        ("workers=2", "quantize.replicas=all", "eval.dynamic=[{}]"),
    ):
        recipe = load_recipe(None, [*SMALL, *overrides])
        context = Context(recipe=recipe, model_name=str(tiny_mixtral), out=tmp_path).given()
        sizes = Sizes(context)
        stages = [stage for stage in STAGES if stage.name != "reparam" or recipe.reparam is not None]
        found |= {what for stage in stages for moment in stage.needs(sizes).moments for what in moment}
    recipe = load_recipe(None, ["corpus.source=digits", "corpus.sequences=32", "reparam.integer={}"])
    vision = Context(recipe=recipe, model_name="bundled:tiny-moe-vit", out=tmp_path).given()
    found |= {what for moment in reparam.needs(Sizes(vision)).moments for what in moment}
    assert set(LEVERS) <= found


@pytest.mark.parametrize("effects", ["layer_effects", "expert_effects"])
def test_outputs_that_are_compared_count_and_shrink_with_the_working_memory(
    tiny_mixtral: Path, tmp_path: Path, effects: str
) -> None:
    def compared(memory: str) -> int:
        options = ("corpus.sequences=64", "corpus.sequence_length=64", "eval.perplexity=null", "eval.compare=[]")
        recipe = load_recipe(None, [*options, f"losses.{effects}={{}}", f"losses.working_memory={memory}"])
        context = Context(recipe=recipe, model_name=str(tiny_mixtral), out=tmp_path / "run")
        moments = needs_losses.needs(Sizes(context)).moments
        return int(max(moment.get("outputs that are compared", 0) for moment in moments))

    assert compared("1GiB") == pytest.approx(16 * compared("1MB"), rel=0.01)  # 16 held-out sequences, or one at a time
