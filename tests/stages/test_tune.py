"""quantize.tune: scales trained on the whole model's output, taken only where held-out text says so; resumed."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from family_models import save
from safetensors.torch import load_file

from moeq import pipeline
from moeq.artifacts.files import BEGUN
from moeq.artifacts.stage import read_record
from moeq.artifacts.tuned import Tuned
from moeq.errors import MoeqError
from moeq.evaluation import reference_logits
from moeq.exporters.native_writer import extra_name, layer_name
from moeq.models.forward import forward
from moeq.planning.plan import add_up
from moeq.progress import Reporter
from moeq.recipe import load_recipe
from moeq.stages import assign, evaluate, quantize, refine, tune
from moeq.stages.context import Context
from moeq.stages.needs import Sizes

SMALL = (
    "corpus.sequences=48", "corpus.sequence_length=64", "corpus.batch_size=4", "losses.heldout_fraction=0.5",
    "losses.bits=[1,2]", "losses.methods=[rtn]", "losses.group_size=12", "assign={method: uniform, bits: 2}",
    "losses.per_projection=false", "eval.perplexity.sequences=16", "eval.perplexity.sequence_length=64",
    "eval.compare=[]", "eval.tasks=[]", "dtype=float32", "stream=never",
)  # fmt: skip
GRID = ("quantize.replicas=all",)
TRELLIS = (
    "losses.bits=[1]",
    "losses.methods=[trellis]",
    "losses.trellis_states=256",
    "assign={method: uniform, bits: 1}",
)
TUNE = "quantize.tune={steps: 4, batch_size: 4, learning_rate: 0.02}"
BEFORE = ("profile", "losses", "assign")


def make(model: Path | str, out: Path, *overrides: str) -> Context:
    recipe = load_recipe(None, [*SMALL, *overrides])
    return Context(recipe=recipe, model_name=str(model), out=out, reporter=Reporter(quiet=True))


def run(model: Path | str, out: Path, *overrides: str, stages: tuple[str, ...] = ("quantize",)) -> Context:
    context = make(model, out, *overrides)
    pipeline.run(context, stages)
    return context


@pytest.fixture(scope="module")
def plain(tiny_mixtral: Path, tmp_path_factory: pytest.TempPathFactory) -> Context:
    """Grids that are not tuned, with all replicas."""
    return run(tiny_mixtral, tmp_path_factory.mktemp("run") / "run", *GRID, stages=(*BEFORE, "quantize"))


@pytest.fixture
def out(plain: Context, tmp_path: Path) -> Path:
    """The same, of this test's own."""
    return Path(shutil.copytree(plain.out, tmp_path / "run"))


@pytest.fixture(scope="module")
def tuned(tiny_mixtral: Path, plain: Context, tmp_path_factory: pytest.TempPathFactory) -> Context:
    """The same, tuned."""
    out = shutil.copytree(plain.out, tmp_path_factory.mktemp("tuned") / "run")
    return run(
        tiny_mixtral, Path(out), *GRID, TUNE, "export.verify=false", stages=(*BEFORE, "quantize", "export", "eval")
    )


def contents(context: Context) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in quantize.files(context.directory("quantize"))}


def told(context: Context) -> Tuned:
    found = quantize.read_made(context.directory("quantize")).tuned
    assert found is not None
    return found


def makers(context: Context) -> set[str]:
    made = quantize.quantizers(context.directory("quantize"))
    return {method for layer in made.values() for expert in layer for method in expert.values()}


@torch.no_grad()
def divergence(context: Context, *, exported: bool) -> float:
    """Mean KL divergence on the evaluation text, which nothing was trained on or chosen by."""

    def predictions(model: Any) -> torch.Tensor:
        assert context.text.evaluation is not None
        return forward(model, context.text.evaluation.ids).logits.log_softmax(-1)

    with context.model.overlay() as overlay:
        wanted = predictions(overlay.set())
        found = predictions(evaluate.replaced(context, overlay, assign.load(context), exported=exported))
    return float((wanted.exp() * (wanted - found)).sum(-1).mean())


def test_tuned_scales_are_in_the_checkpoint_and_nothing_else_is_changed(plain: Context, tuned: Context) -> None:
    assert told(tuned).is_better
    assert told(tuned).gain > told(tuned).least > 0
    assert divergence(tuned, exported=True) < divergence(plain, exported=True)  # on text that nobody saw
    assert evaluate.load(tuned).export_logit_error < 1e-5  # type: ignore[operator]
    assert not (tuned.directory("quantize") / tune.STARTS).exists()
    made = quantize.quantizers(tuned.directory("quantize"))
    before = quantize.quantizers(plain.directory("quantize"))
    for layer in tuned.model.layers:
        for name in (layer_name(layer.index), extra_name(layer.index)):
            old, new = (load_file(one.directory("quantize") / name) for one in (plain, tuned))
            assert old.keys() == new.keys()
            changed = {key for key in new if not torch.equal(old[key], new[key])}
            assert bool(changed) == (name == layer_name(layer.index))
            assert all(key.endswith(".scales") for key in changed)
            for expert in range(layer.num_experts) if changed else ():
                is_changed = any(key.startswith(f"{layer.name}.{expert}.") for key in changed)
                maker = before[layer.name][expert][2] + ("+tuned" if is_changed else "")
                assert made[layer.name][expert] == {2: maker, 1: "rtn"}  # one that no token came to is as it was
    assert {"rtn", "rtn+tuned"} <= makers(tuned)


@pytest.mark.full
def test_scales_of_trellis_codes_of_a_trained_model(tmp_path: Path) -> None:
    where = "bundled:tiny-mixtral", tmp_path / "run"
    context = run(*where, *TRELLIS, TUNE, stages=(*BEFORE, "quantize"))
    assert told(context).is_better
    assert divergence(context, exported=True) < 0.97 * divergence(context, exported=False)
    assert "trellis+tuned" in makers(context)


@pytest.mark.full
def test_what_is_not_better_beyond_chance_leaves_every_byte(tiny_mixtral: Path, out: Path, plain: Context) -> None:
    context = run(tiny_mixtral, out, *GRID, TUNE, "quantize.tune.learning_rate=1e6")
    assert not told(context).is_better
    assert contents(context) == contents(plain)
    assert makers(context) == makers(plain)
    assert "kept as they were" in told(context).told()


@pytest.mark.full
def test_a_killed_run_goes_on_and_gives_the_same_bytes(
    tiny_mixtral: Path, out: Path, tuned: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[int] = []
    backward, write = tune.Text.backward, tune.StateFiles.write

    def dying(files: tune.StateFiles, state: Any) -> None:
        if state.steps == 3:
            raise KeyboardInterrupt
        write(files, state)

    monkeypatch.setattr(tune.Text, "backward", lambda text, step: (steps.append(step), backward(text, step))[1])
    monkeypatch.setattr(tune.StateFiles, "write", dying)
    with pytest.raises(KeyboardInterrupt):
        run(tiny_mixtral, out, *GRID, TUNE)
    monkeypatch.setattr(tune.StateFiles, "write", write)
    context = run(tiny_mixtral, out, *GRID, TUNE)
    assert steps == [0, 1, 2, 2, 3]
    assert contents(context) == contents(tuned)
    assert told(context) == told(tuned)


@pytest.mark.cases(1)
@pytest.mark.parametrize("change", ["losses.damping=0.5", "others.damping=0.5", "losses.heldout_fraction=0.25"])
def test_a_state_of_other_codes_outside_of_the_experts_is_another(
    tiny_mixtral: Path, tmp_path: Path, change: str
) -> None:
    """Rounded experts stay as they are where the damping changes, GPTQ's codes of attention do not."""
    keys = []
    for overrides in ([], [change], [change]):
        context = run(tiny_mixtral, tmp_path / "run", TUNE, "others={attention: 3}", *overrides, stages=BEFORE)
        section, assignment = context.recipe.quantize.tune, assign.load(context)
        assert section is not None
        keys.append(tune.StateFiles.of(context, assignment, section, tmp_path).key)
    assert keys[0] != keys[1] == keys[2]


def test_a_damaged_state_is_none(tmp_path: Path) -> None:
    folder = tmp_path / "start"
    folder.mkdir()
    files = tune.StateFiles(folder=folder, key="key")
    state = tune.State.begun(torch.zeros(5))
    state.note(torch.ones(3, dtype=torch.float64))
    state.adam(torch.arange(5.0), 0.1)
    state.note(torch.full((3,), 0.5, dtype=torch.float64))
    files.write(state)
    again = files.read(torch.zeros(5))
    assert again is not None
    assert torch.equal(again.change, state.change)
    assert torch.equal(again.best, state.best)
    assert again.means == state.means == [1.0, 0.5]
    assert tune.StateFiles(folder=folder, key="other").read(torch.zeros(5)) is None
    path = folder / f"{tune.STATE}1"
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    assert files.read(torch.zeros(5)) is None


@pytest.mark.full
def test_more_text_than_was_calibrated_on_and_few_logits_of_it(
    tiny_mixtral: Path, out: Path, tuned: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a vocabulary that is too large only the likeliest tokens are kept of the original; some sequences at once."""
    monkeypatch.setattr(reference_logits, "MOST_BYTES", 1)
    monkeypatch.setattr(reference_logits, "LEAST_KEPT", 512)
    context = run(tiny_mixtral, out, *GRID, TUNE, "quantize.tune.sequences=56", "quantize.tune.working_memory=1")
    assert (told(context).sequences, told(context).heldout) == (28, 28)
    assert told(context).is_better
    assert told(context).divergence[0] < told(tuned).divergence[0]  # type: ignore[operator]  # the rest as one outcome


def test_nothing_is_left_of_a_tuning_that_is_no_longer_asked_for(
    tiny_mixtral: Path, out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone, refined = Path(shutil.copytree(out, tmp_path / "alone")), "quantize.refine={iterations: 2}"
    monkeypatch.setattr(tune.StateFiles, "write", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        run(tiny_mixtral, out, *GRID, TUNE, refined)
    assert (out / f"quantize{BEGUN}" / tune.STARTS).is_dir()
    made, wanted = (run(tiny_mixtral, each, *GRID, refined).directory("quantize") for each in (out, alone))
    assert not (made / tune.STARTS).exists()
    assert read_record(made, "quantize").digest == read_record(wanted, "quantize").digest


@pytest.mark.full
def test_what_is_refined_is_tuned_after_it_and_not_refined_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    where = "bundled:tiny-mixtral", tmp_path / "run"
    tuned = "quantize.tune={steps: 16, learning_rate: 0.01, sequences: 192}"
    asked = (tuned, "quantize.refine={iterations: 2}")
    run(*where, stages=BEFORE)
    write = tune.StateFiles.write
    monkeypatch.setattr(tune.StateFiles, "write", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        run(*where, *asked)
    monkeypatch.setattr(tune.StateFiles, "write", write)
    monkeypatch.setattr(refine, "refine_layer", lambda *_, **__: pytest.fail("refined again"))
    assert "rtn+refined+tuned" in makers(run(*where, *asked))


@pytest.mark.full
def test_matrices_that_stay_as_they_are(tiny_mixtral: Path, tmp_path: Path) -> None:
    keys = (
        "losses.per_projection=true",
        "assign={method: optimal, granularity: projection, widths: [2, 16], code_bits: 8}",
    )
    context = run(tiny_mixtral, tmp_path, *keys, TUNE, stages=(*BEFORE, "quantize", "export"))
    assert any(method.endswith("+tuned") for method in makers(context))


def test_without_an_expert_below_16_bits_there_is_nothing_to_tune(tiny_mixtral: Path, tmp_path: Path) -> None:
    context = run(tiny_mixtral, tmp_path, TUNE, "assign={method: uniform, bits: 16}", stages=(*BEFORE, "quantize"))
    assert quantize.read_made(context.directory("quantize")).tuned is None
    assert makers(context) == set()


def test_steps_whose_tokens_come_to_no_quantized_expert_move_nothing(tmp_path: Path) -> None:
    model = save("switch_transformers", tmp_path / "model")  # whose experts are modules of their own
    keys = (
        "corpus.sequences=8", "corpus.sequence_length=8", "losses.group_size=8",
        "assign={method: uniform, bits: 2, gpu_experts: 5}", "quantize.tune={steps: 2, batch_size: 1}",
    )  # fmt: skip
    context = run(model, tmp_path / "run", *keys, stages=(*BEFORE, "quantize"))
    found = told(context)
    assert (found.steps, found.chosen, found.is_better) == (2, 0, False)


def test_what_it_came_to_is_told() -> None:
    found = {"scales": 1200, "steps": 96, "sequences": 48, "heldout": 16, "gain": 0.002, "least": 0.001}
    better = Tuned(**found, chosen=84, is_better=True, divergence={0: 0.02, 84: 0.018, 96: 0.0181})
    assert better.told() == (
        "1,200 scales trained on the whole model's output, 84 steps; KL on 16 held-out sequences 0.0200 to 0.0180 "
        "(10.0% less)"
    )
    kept = better.model_copy(update={"is_better": False})
    assert "kept as they were: the best of 96 steps was not better beyond chance on 16" in kept.told()
    assert "not finite" in better.model_copy(update={"divergence": {0: None}}).told()


def test_plan_names_what_it_takes(tiny_mixtral: Path, tmp_path: Path) -> None:
    found = []
    for tuned in ("quantize.tune=null", "quantize.tune={}"):
        sizes = Sizes(make(tiny_mixtral, tmp_path, tuned))
        found.append(next(need for need in add_up(sizes) if need.stage == "quantize"))
    assert found[1].ram > found[0].ram
    assert {"units of codes", "activations and logits for gradients"} <= set(found[1].ram_terms)
    assert found[1].temporary > found[0].temporary == 0


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (("stream=always", "quantize.refine={}"), "the model is streamed, and quantize.refine trains its scales"),
        (("quantize.tune.sequences=3",), "leave fewer than 2"),
        (("corpus.sequences=2",), "leave fewer than 2"),
        (("quantize.tune.steps=0",), "steps is 0"),
        (
            ("losses.nested=true", "losses.bits=[2,3,4]", "losses.methods=[gptq]", "assign.quantizer=gptq"),
            "nested cannot go with quantize.tune",
        ),
    ],
)
def test_what_it_cannot_go_with(change: tuple[str, ...], why: str, tiny_mixtral: Path, tmp_path: Path) -> None:
    with pytest.raises(MoeqError, match=why):
        pipeline.run(make(tiny_mixtral, tmp_path / "run", "quantize.tune={}", *change))
    assert not (tmp_path / "run").exists()


@pytest.mark.full
def test_a_streamed_model_is_tuned_layer_by_layer(tiny_mixtral: Path, tmp_path: Path) -> None:
    """As refining is, but codes stay; what it lost is less, and it goes on where it was killed."""
    streamed = (*TRELLIS, "stream=always")
    plain = run(tiny_mixtral, tmp_path / "plain", *streamed, stages=(*BEFORE, "quantize"))
    stages = (*BEFORE, "quantize")
    tuned = run(tiny_mixtral, tmp_path / "run", *streamed, "quantize.tune={steps: 30}", stages=stages)
    marks = quantize.quantizers(tuned.directory("quantize"))
    assert {method for layer in marks.values() for one in layer for method in one.values()} == {"trellis+tuned"}
    for layer in tuned.model.layers:
        before, after = (load_file(one.directory("quantize") / layer_name(layer.index)) for one in (plain, tuned))
        changed = {key for key in before if not torch.equal(before[key], after[key])}
        assert changed
        assert all(key.endswith(".scales") for key in changed)
    assert (tuned.directory("quantize") / refine.PROGRESS).exists()
    assert divergence(tuned, exported=True) < 0.97 * divergence(plain, exported=True)
    assert Sizes(tuned).streams
    assert add_up(Sizes(tuned)) is not None
