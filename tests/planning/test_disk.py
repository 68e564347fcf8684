"""Foretold bytes of every stage's files against those that a run really writes."""

from __future__ import annotations

from pathlib import Path

import family_models
import pytest
from tiny_models import some

from moeq import pipeline
from moeq.artifacts.non_experts import read_index
from moeq.planning.plan import add_up
from moeq.planning.result import Need
from moeq.progress import Reporter
from moeq.recipe import AssignSection, load_recipe
from moeq.stages import needs_losses, quantize
from moeq.stages.context import Context
from moeq.stages.hessian_traces import traces
from moeq.stages.needs import Sizes
from moeq.stages.needs_losses import SET
from moeq.stages.non_expert_sizes import DIGEST as OTHERS_DIGEST
from moeq.stages.order import STAGES as EVERY
from moeq.stages.order import Stage
from moeq.stages.replicas import load_index

STAGES = tuple(stage for stage in EVERY if stage.name != "reparam")

SMALL = (
    "corpus.sequences=12", "corpus.sequence_length=48", "eval.perplexity.sequences=6",
    "eval.perplexity.sequence_length=48", "estimate.grid.inputs=[128]", "estimate.grid.outputs=[512]",
    "eval.tasks=[moeq_continuation]", "eval.limit=2",
    "eval.compare=[{name: uniform-3, method: uniform, bits: 3}, {name: u1, method: uniform, bits: 1, quantizer: rtn}]",
)  # fmt: skip
CASES = {
    "prefix-split": ("tiny_mixtral", ("losses.group_size=16", "assign.code_bits=5/2", "assign.gpu_experts=1")),
    "all replicas": ("tiny_qwen", ("losses.group_size=-1", "assign.code_bits=2.2", "quantize.replicas=all")),
    "symmetric": (
        "tiny_mixtral",
        ("losses.group_size=24", "losses.symmetric=true", "assign={method: uniform, bits: 4, gpu_experts: 2}"),
    ),
    "best": ("tiny_qwen", ("losses.group_size=16", "quantize.replicas=all",
                           "assign={method: uniform, bits: 3, quantizer: best}")),
    "refined": ("tiny_mixtral", ("losses.group_size=16", "losses.methods=[gptq,rtn]", "assign.code_bits=2",
                                 "quantize={replicas: all, refine: {iterations: 5}}")),
    "tuned": ("tiny_mixtral", ("losses.methods=[rtn]", "quantize={refine: {iterations: 2}, tune: {steps: 2}}",
                               "assign={method: uniform, bits: 2, quantizer: rtn}", "eval.compare=[]")),
    "others": ("tiny_qwen", ("losses.group_size=16", "assign={method: uniform, bits: 2}", "export.max_shard=30KB",
                             "others={attention: 4, dense: 3, shared: 4, embeddings: 8, head: 8, symmetric: true}")),
    "projections": ("tiny_mixtral", ("losses.group_size=16", "quantize.replicas=all",
                                     "assign={method: optimal, code_bits: 2, granularity: projection}")),
    "effects": ("tiny_mixtral", ("losses.methods=[rtn]", "losses.layer_effects={sequences: 1}",
                                 "losses.expert_effects={sequences: 1, experts: 3}", "eval.compare=[]",
                                 "assign={method: uniform, bits: 3, quantizer: rtn}")),
    "rtn": ("tiny_qwen", ("losses.methods=[rtn]", "assign={method: uniform, bits: 3, quantizer: rtn}",
                          "eval.compare=[]", "export.max_shard=30KB", "losses.per_projection=false")),
}  # fmt: skip


@pytest.fixture(scope="module", params=some(CASES, 1))
def finished(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Context:
    fixture, overrides = CASES[request.param]
    context = Context(
        recipe=load_recipe(None, [*SMALL, *overrides]),
        model_name=str(request.getfixturevalue(fixture)),
        out=tmp_path_factory.mktemp("run") / "run",
        reporter=Reporter(quiet=True),
    )
    pipeline.run(context)
    return context


@pytest.fixture(scope="module")
def sizes(finished: Context) -> Sizes:
    return fresh_sizes(finished)


@pytest.fixture(scope="module")
def plan(sizes: Sizes) -> dict[str, Need]:
    return foretold(sizes)


FAMILIES = ("gpt_oss", "nemotron_h", "switch_transformers")  # biases, two matrices, experts by number


@pytest.mark.full
@pytest.mark.parametrize("family", FAMILIES)
def test_other_kinds_of_experts_take_the_foretold_bytes(family: str, tmp_path: Path) -> None:
    overrides = (*SMALL, "losses.group_size=16", "assign={method: uniform, bits: 3}", "quantize.replicas=all")
    context = Context(
        recipe=load_recipe(None, list(overrides)),
        model_name=str(family_models.save(family, tmp_path / "model")),
        out=tmp_path / "run",
        reporter=Reporter(quiet=True),
    )
    pipeline.run(context, ("profile", "losses", "assign", "quantize", "export"))
    plan = foretold(fresh_sizes(context))
    for stage in ("profile", "losses", "quantize", "export"):
        folder = context.directory(stage)
        for name, size in plan[stage].lasting.items():
            if name.endswith(".safetensors"):
                assert size == (folder / name).stat().st_size, (stage, name)
        size, written = sizes_of(plan[stage], context)
        assert abs(size - written) <= 0.03 * written + 600, stage


def sizes_of(need: Need, context: Context) -> tuple[int, int]:
    """Bytes foretold and written of a stage; the store counts with losses."""
    folders = [context.directory(need.stage), *([context.store] if need.stage == "losses" else [])]
    written = sum(path.stat().st_size for folder in folders for path in folder.rglob("*") if path.is_file())
    return sum(need.lasting.values()) + need.elsewhere, written


def fresh_sizes(context: Context) -> Sizes:
    return Sizes(Context(recipe=context.recipe, model_name=context.model_name, out=context.out / "elsewhere"))


def foretold(sizes: Sizes) -> dict[str, Need]:
    """Needs by stage, the files of the store apart."""
    return {need.stage: need for need in add_up(sizes, STAGES, elsewhere=True)}


@pytest.mark.cases(1)
def test_every_file_of_every_stage_is_named(finished: Context, plan: dict[str, Need]) -> None:
    for stage, need in plan.items():
        folder = finished.directory(stage)
        found = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
        assert set(need.lasting) == found, stage


@pytest.mark.cases(1)
def test_every_file_of_the_store_is_foretold(finished: Context, sizes: Sizes) -> None:
    found = {path.relative_to(finished.store).as_posix(): path.stat().st_size
             for path in finished.store.rglob("*") if path.is_file() and path.name != ".lock"}  # fmt: skip
    names = {SET: load_index(finished).set}
    if finished.recipe.others.widths():
        names[OTHERS_DIGEST] = read_index(finished.directory("losses")).set
    named = lambda path: names.get(path.partition("/")[0], "") + path.removeprefix(path.partition("/")[0])  # noqa: E731
    store = needs_losses.needs(sizes).store
    wanted = {named(path) if "/" in path else path: size for path, size in store.items()}
    assert {path for path in wanted if path.endswith("tensors")} == {path for path in found if path.endswith("tensors")}
    assert len(wanted) == len(found)
    for path, size in wanted.items():
        if path.endswith("tensors"):
            assert size == found[path], path
    rows = [sum(size for path, size in sizes.items() if "/losses/" in path) for sizes in (wanted, found)]
    assert rows[0] == pytest.approx(rows[1], rel=0.03)


@pytest.mark.cases(1)
def test_files_that_follow_from_shapes_are_exact(finished: Context, plan: dict[str, Need]) -> None:
    uniform = finished.recipe.assign.method == "uniform"
    for stage, need in plan.items():
        for name, size in need.lasting.items():
            written = (finished.directory(stage) / name).stat().st_size
            packed = name.startswith(("experts-", "replicas-layer"))
            exact = name.endswith((".safetensors", "schema.json", "tokenizer.json")) and (uniform or not packed)
            if exact and not (packed and finished.recipe.assign.gpu_experts):
                assert size == written, (stage, name)
            elif packed and not name.startswith("replicas") and finished.recipe.assign.method != "optimal":
                assert written <= size * 1.001, (stage, name)
                assert size <= written * 1.1, (stage, name)


def test_a_run_and_its_larger_stages_are_within_three_percent(finished: Context, plan: dict[str, Need]) -> None:
    """Of the others, tables and figures nobody knows yet: those of a few thousand bytes and the page of drawings."""
    whole = [0, 0]
    for stage, need in plan.items():
        size, written = sizes_of(need, finished)
        whole = [whole[0] + size, whole[1] + written]
        tolerance = {"assign": 0.1, "eval": 0.1, "estimate": 0.1, "report": 0.15}.get(stage, 0.03)
        assert abs(size - written) <= tolerance * written + 600, (stage, size, written)
    assert whole[0] == pytest.approx(whole[1], rel=0.03)


FORMATS = {
    "zero points": ("others={attention: 4}", "export.formats=[gptqmodel,auto-round,dequantized]"),
    "symmetric": ("losses.symmetric=true", "export.formats=[gptqmodel,auto-round,vllm-cuda]"),
    "one file": ("export.formats=[llama.cpp]", "export.widen=true"),
    "one width": ("assign={method: optimal, bits_per_weight: 4, target: transformers, quantizer: rtn}",
                  "losses.symmetric=true", "export.formats=[transformers]"),
}  # fmt: skip


@pytest.mark.parametrize("case", some(FORMATS, 1))
def test_other_formats_take_the_foretold_bytes(case: str, tmp_path: Path) -> None:
    made = ("losses.methods=[rtn]", "losses.group_size=32", "assign={method: uniform, bits: 4, quantizer: rtn}")
    context = Context(
        recipe=load_recipe(None, [*SMALL[:2], *made, "export.verify=false", "eval.compare=[]", *FORMATS[case]]),
        model_name="bundled:tiny-mixtral",
        out=tmp_path / "run",
        reporter=Reporter(quiet=True),
    )
    pipeline.run(context, ("profile", "losses", "assign", "quantize", "export"))
    need = foretold(fresh_sizes(context))["export"]
    for name in context.recipe.export.formats:
        folder = tmp_path / "run" / f"checkpoint-{name}"
        size, written = need.lasting[f"../{folder.name}"], sum(path.stat().st_size for path in folder.iterdir())
        assert size == pytest.approx(written, rel=0.02 if name == "llama.cpp" else 0.01), (name, size, written)


SHARED = {  # bits of layers, or of the matrices of each
    "a layer": ("4.7", "vllm-cuda", (), [4, 4, 4, 4]),
    "one step left": ("6", "vllm-cuda", (), [8, 4, 4, 4]),
    "a stack": ("4.9", "llama.cpp-refit", ("assign.granularity=projection",), [{"gate_proj": 8}, 4, 4, 4]),
    "no other width": ("4.7", "llama.cpp", ("losses.bits=[1,2,3,4]", "losses.symmetric=false", "losses.group_size=128"),
                       [1, 1, 1, 1]),
    "types of rows": (
        "3", "llama.cpp-refit", ("assign.granularity=projection", "losses.bits=[1,2,3,4]", "losses.group_size=128"),
        [{"down_proj": 3}, {"down_proj": 3}, {"gate_proj": 1, "up_proj": 1, "down_proj": 3},
         {"gate_proj": 1, "up_proj": 1, "down_proj": 2}],
    ),
    "an expert": ("4.7", "native", (), None),
}  # fmt: skip


@pytest.mark.parametrize("case", SHARED)
def test_what_shares_a_width_is_foreseen_as_wide_as_all_else(case: str, tmp_path: Path) -> None:
    """The first layer was given 8 bits and the last ones 2: the same budget, which no assignment spends so."""
    bits, target, more, wanted = SHARED[case]
    made = ("losses.methods=[rtn]", "losses.group_size=32", "losses.bits=[2,3,4,8]", "losses.symmetric=true")
    recipe = load_recipe(None, [*made, f"assign={{bits_per_weight: {bits}, target: {target}}}", *more])
    sizes = Sizes(Context(recipe=recipe, model_name="bundled:tiny-mixtral", out=tmp_path / "run"))
    (layers, *_) = sizes.widths
    if wanted is None:
        assert {bits for experts in layers for bits in experts} > {8}
    else:
        same = dict.fromkeys(sizes.layers[0].projections, 4)
        assert layers == [[own if isinstance(own, int) else same | own] * 8 for own in wanted]
    assert 8 * sizes.placed[0] <= float(bits) * sum(
        layer.num_experts * layer.weights_per_expert for layer in sizes.layers
    )
    quantize.packed_files(sizes)


def test_assign_reads_every_expert_once(finished: Context, plan: dict[str, Need]) -> None:
    fresh = Context(recipe=finished.recipe, model_name=finished.model_name, out=finished.out / "elsewhere")
    traces(fresh, AssignSection(method="mopeq"))
    assert fresh.model.expert_reader.bytes_read == plan["assign"].read - sum(plan["assign"].lasting.values())


def test_linked_files_are_counted_once(finished: Context, plan: dict[str, Need]) -> None:
    inodes = {path.stat().st_ino: path.stat().st_size for stage in ("quantize", "export")
              for path in finished.directory(stage).rglob("*") if path.is_file()}  # fmt: skip
    size = sum(plan[stage].written for stage in ("quantize", "export"))
    assert abs(size - sum(inodes.values())) <= 0.03 * size + 1200


def test_a_stage_without_needs_cannot_be_made() -> None:
    with pytest.raises(TypeError, match="needs"):
        Stage(name="new", run=lambda context: {}, sections=())  # type: ignore[call-arg]


def test_the_originals_logits_lie_on_the_disk_while_eval_runs(tiny_mixtral: Path, tmp_path: Path) -> None:
    def temporary(*overrides: str) -> int:
        recipe = load_recipe(None, [*SMALL, *overrides])
        return foretold(Sizes(Context(recipe=recipe, model_name=str(tiny_mixtral), out=tmp_path)))["eval"].temporary

    logits = 6 * 47 * 2048 * 4
    assert logits < temporary() < 1.05 * logits
    assert temporary("eval.perplexity.sequences=12") == 2 * temporary()
    assert temporary("eval.perplexity=null") == 0
