"""quantize.refine: experts trained together on what the layers before leave; recorded, exported, resumed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import family_models
import pytest
import torch
from safetensors.torch import load_file

from moeq import inspection, pipeline
from moeq.artifacts.manifest import read_manifest
from moeq.errors import ArtifactError
from moeq.models.forward import forward
from moeq.progress import Reporter
from moeq.recipe import load_recipe
from moeq.stages import assign, evaluate, losses, quantize, refine
from moeq.stages.context import Context

SMALL = (
    "corpus.sequences=12", "corpus.sequence_length=48", "corpus.batch_size=5", "losses.group_size=16",
    "losses.bits=[1,2,3,4]", "losses.methods=[gptq,rtn]", "assign.code_bits=2", "assign.gpu_experts=1",
    "eval.perplexity.sequences=4", "eval.perplexity.sequence_length=48", "eval.compare=[]", "eval.tasks=[]",
    "estimate.grid.inputs=[128]",
)  # fmt: skip
REFINE = "quantize.refine={iterations: 25}"
STAGES = ("profile", "losses", "assign", "quantize", "export")


def make(model: Path, out: Path, *overrides: str) -> Context:
    recipe = load_recipe(None, [*SMALL, *overrides])
    return Context(recipe=recipe, model_name=str(model), out=out, reporter=Reporter(quiet=True))


def run(model: Path, out: Path, *overrides: str, stages: tuple[str, ...] = STAGES) -> Context:
    context = make(model, out, *overrides)
    pipeline.run(context, stages)
    return context


@torch.no_grad()
def divergence(context: Context, *, refined: bool) -> float:
    """Mean KL divergence of the next tokens on the calibration text, from the original model."""

    def predictions(model: Any) -> torch.Tensor:
        batches = context.text.calibration.batches(5)
        return torch.cat([forward(model, b.input_ids, b.mask.long()).logits[b.mask] for b in batches])

    with context.model.overlay() as overlay:
        wanted = predictions(overlay.set()).log_softmax(-1)
        model = evaluate.replaced(context, overlay, assign.load(context), exported=refined)
        found = predictions(model).log_softmax(-1)
    return float((wanted.exp() * (wanted - found)).sum(-1).mean())


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("family", "grid"),
    [
        ("tiny_mixtral", ("losses.group_size=16",)),
        ("tiny_qwen", ("losses.group_size=-1", "losses.symmetric=true")),
    ],
)
def test_refined_experts_are_nearer_to_the_original_and_in_the_checkpoint(
    family: str, grid: tuple[str, ...], tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    model = request.getfixturevalue(family)
    context = run(model, tmp_path, REFINE, "dtype=float32", *grid, stages=tuple(pipeline.BY_NAME))
    assert divergence(context, refined=True) < 0.9 * divergence(context, refined=False)
    assert evaluate.load(context).export_logit_error < 1e-5
    assert inspection.inspect(context.directory("export"))["check"].startswith("every size")
    replicas = [
        replica
        for layer in read_manifest(context.directory("export")).layers
        for expert in layer.experts
        for replica in expert.replicas
        if replica.bits < 16
    ]
    makers = [replica.quantizer for replica in replicas]
    assert set(makers) <= {"gptq", "gptq+refined"}
    assert makers.count("gptq+refined") > len(makers) / 2


@pytest.mark.full
@pytest.mark.parametrize(
    ("family", "links"),
    [
        ("switch_transformers", (1.0, 1.0, 1.0)),  # encoder and decoder
        ("minimax_m3_vl", (2.0,)),  # the sum of the experts is scaled before it is added
        ("nemotron_h", (None,)),  # experts of another size than the hidden states
        ("muse_spark", (None,)),  # a norm after the experts
    ],
)
def test_families_whose_experts_are_not_simply_added(
    family: str, links: tuple[float | None, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What earlier layers lost is asked for only where it can be, and scaled as the experts' outputs are."""
    found: list[float | None] = []
    measure = refine.link_of
    monkeypatch.setattr(refine, "link_of", lambda *given: (found.append(measure(*given)), found[-1])[1])
    overrides = (REFINE, "losses.bits=[2]", "losses.methods=[rtn]", "assign={method: uniform, bits: 2, quantizer: rtn}")
    model = family_models.save(family, tmp_path / "model")
    context = run(model, tmp_path / "run", *overrides, "dtype=float32", stages=STAGES[:-1])
    assert found == [None if link is None else pytest.approx(link, rel=0.02) for link in links]
    assert divergence(context, refined=True) < 0.9 * divergence(context, refined=False)


@pytest.mark.full
def test_streamed_and_loaded_give_the_same_bytes(tiny_mixtral: Path, tmp_path: Path) -> None:
    contexts = [
        run(tiny_mixtral, tmp_path / how, REFINE, f"stream={how}", "quantize.replicas=all", "assign.quantizer=best")
        for how in ("never", "always")
    ]
    first, second = (
        {path.name: path.read_bytes() for path in sorted(one.directory("quantize").glob("*.safetensors"))}
        for one in contexts
    )
    assert len(first) == 2 * len(contexts[0].model.layers)
    assert first == second


@pytest.mark.full
def test_other_widths_stay_as_stored(tiny_mixtral: Path, tmp_path: Path) -> None:
    plain = run(tiny_mixtral, tmp_path, "quantize.replicas=all")
    before = [load_file(path) for path in quantize.files(plain.directory("quantize"))]
    refined = run(tiny_mixtral, tmp_path, "quantize.replicas=all", REFINE)
    paths = quantize.files(refined.directory("quantize"))
    after = [load_file(path) for path in paths]
    for path, old, new in zip(paths, before, after, strict=True):
        assert old.keys() == new.keys()
        same = all(torch.equal(old[key], new[key]) for key in old)
        assert same == path.name.startswith("replicas-"), path.name
    made = quantize.quantizers(refined.directory("quantize"))
    kinds = {method for layer in made.values() for expert in layer for method in expert.values()}
    assert kinds == {"gptq", "gptq+refined"}
    again = run(tiny_mixtral, tmp_path, "quantize.replicas=all")
    assert all(
        torch.equal(old[key], new[key])
        for old, path in zip(before, quantize.files(again.directory("quantize")), strict=True)
        for new in [load_file(path)]
        for key in old
    )
    assert not (again.directory("quantize") / refine.PROGRESS).exists()


@pytest.mark.full
def test_the_seed_decides_the_tokens_that_are_drawn(tiny_mixtral: Path, tmp_path: Path) -> None:
    """In one directory, as the stage's key has to say."""
    quick = ("losses.bits=[2]", "losses.methods=[rtn]", "assign={method: uniform, bits: 2, quantizer: rtn}",
             "quantize.refine={iterations: 4}")  # fmt: skip
    made = []
    for seed in (0, 5, 0):
        context = run(tiny_mixtral, tmp_path, *quick, f"seed={seed}", stages=STAGES[:4])
        made.append([path.read_bytes() for path in quantize.files(context.directory("quantize"))])
    assert made[0] == made[2] != made[1]
    assert refine.revision(context) == refine.REVISION, "as runs have it that were made without a seed"


@pytest.mark.full
def test_a_killed_run_goes_on_with_the_next_layer(
    tiny_mixtral: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    unbroken = run(tiny_mixtral, tmp_path / "unbroken", REFINE)
    trained: list[str] = []
    train = refine.refine_layer

    def dying(job, *more, **how):  # type: ignore[no-untyped-def]
        trained.append(job.inputs.layer.name)
        if len(trained) == 2:
            raise KeyboardInterrupt
        return train(job, *more, **how)

    monkeypatch.setattr(refine, "refine_layer", dying)
    with pytest.raises(KeyboardInterrupt):
        run(tiny_mixtral, tmp_path / "killed", REFINE)
    context = run(tiny_mixtral, tmp_path / "killed", REFINE)
    names = [layer.name for layer in context.model.layers]
    assert trained == [names[0], names[1], *names[1:]]
    for path in quantize.files(unbroken.directory("quantize")):
        assert (context.directory("quantize") / path.name).read_bytes() == path.read_bytes()
    digests = [
        json.loads((one.directory("quantize") / "stage.json").read_text())["digest"] for one in (unbroken, context)
    ]
    assert digests[0] == digests[1]


@pytest.mark.full
def test_a_damaged_or_changed_layer_is_trained_again(
    tiny_mixtral: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    context = run(tiny_mixtral, tmp_path, REFINE)
    path = quantize.files(context.directory("quantize"))[1]
    good = path.read_bytes()
    path.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
    trained: list[str] = []
    train = refine.refine_layer
    monkeypatch.setattr(
        refine,
        "refine_layer",
        lambda job, *more, **how: (trained.append(job.inputs.layer.name), train(job, *more, **how))[1],
    )
    run(tiny_mixtral, tmp_path, REFINE)
    assert trained == [context.model.layers[1].name]
    assert path.read_bytes() == good
    run(tiny_mixtral, tmp_path, "quantize.refine={iterations: 20}")
    assert trained[1:] == [layer.name for layer in context.model.layers]


def test_losses_of_other_text_are_refused(tiny_mixtral: Path, tmp_path: Path) -> None:
    run(tiny_mixtral, tmp_path, stages=("profile", "losses", "assign"))
    other = make(tiny_mixtral, tmp_path, REFINE, "corpus.sequences=11")
    with pytest.raises(ArtifactError, match="made of other text or settings"):
        pipeline.run_alone(other, "quantize")


@pytest.mark.full
def test_the_model_is_as_it_was_afterwards(tiny_mixtral: Path, tmp_path: Path) -> None:
    """Refining overwrites the loaded experts; the next stage has the checkpoint's again."""
    context = run(tiny_mixtral, tmp_path, stages=("profile", "losses", "assign"))
    batches = context.text.calibration.batches(5)
    before = [inputs.hidden for inputs in context.model.walk(batches)]
    other = run(tiny_mixtral, tmp_path, REFINE)
    after = [inputs.hidden for inputs in other.model.walk(batches)]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert losses.is_intact(other)
