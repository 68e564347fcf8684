"""The effect of layers: that of whole runs, streamed or not, in groups or not; how many sequences it is measured on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from family_models import save

from moeq import pipeline
from moeq.artifacts.effects import LayerEffects, read_effects
from moeq.errors import QuantizationError
from moeq.models.streaming import StreamedModel
from moeq.numerics.divergence import kl_divergence
from moeq.progress import Reporter
from moeq.recipe import load_recipe
from moeq.stages import effects
from moeq.stages.context import Context
from moeq.stages.effects import divergence

SMALL = (
    "corpus.sequences=12", "corpus.sequence_length=48", "losses.group_size=16", "losses.methods=[gptq]",
    "losses.bits=[2]", "losses.per_projection=false", "eval.compare=[]", "dtype=float32",
)  # fmt: skip


class Ears(Reporter):
    """A reporter that keeps what it is told."""

    def __init__(self) -> None:
        super().__init__(quiet=True)
        self.said: list[str] = []

    def say(self, text: str) -> None:
        self.said.append(text)


def context_of(model: Path, out: Path, section: str, *overrides: str) -> Context:
    recipe = load_recipe(None, [*SMALL, f"losses.layer_effects={section}", *overrides])
    return Context(recipe=recipe, model_name=str(model), out=out, reporter=Ears())


def run(context: Context) -> LayerEffects:
    pipeline.run(context, ("profile", "losses"))
    found = read_effects(context.directory("losses"))
    assert found is not None
    return found


def whole(context: Context, sequences: int) -> list[float]:
    """The mean divergence of every layer in runs of the whole model."""
    layers = effects.expert_layers(context)
    worker = effects._Worker(context=context, bits=2, method="gptq", layers=layers, advance=lambda: None)
    batches = effects.heldout_batches(context, sequences)
    tokens = sum(int(batch.mask.sum()) for batch in batches)
    sums = [worker._one_by_one(batch) for batch in batches]
    return [sum(column) / tokens for column in zip(*sums, strict=True)]


@pytest.fixture(scope="module")
def deep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save("qwen3_moe", tmp_path_factory.mktemp("deep") / "model", num_hidden_layers=5)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("store")


def test_every_effect_is_that_of_a_whole_run(deep: Path, store: Path, tmp_path: Path) -> None:
    context = context_of(deep, tmp_path / "run", "{bits: 2, sequences: 3}", f"store={store}")
    found = run(context)
    assert found.sequences == 3
    assert found.divergence == pytest.approx(whole(context, 3), rel=1e-6)
    assert len(set(found.divergence)) == 4  # the first of five layers is dense
    assert min(found.divergence) > 0
    assert not any("whole model" in line for line in context.reporter.said)  # type: ignore[attr-defined]


def test_groups_of_batches_give_the_same(deep: Path, store: Path, tmp_path: Path) -> None:
    together = run(context_of(deep, tmp_path / "one", "{sequences: 3}", f"store={store}"))
    small = context_of(deep, tmp_path / "three", "{sequences: 3}", f"store={store}", "losses.working_memory=60kB")
    found = run(small)
    assert len(effects.grouped(effects.heldout_batches(small, 3), 4, small)) == 3
    assert found.divergence == pytest.approx(together.divergence, rel=1e-4)


def test_a_streamed_model_is_read_twice_and_once_to_compare(
    deep: Path, store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = run(context_of(deep, tmp_path / "loaded", "{sequences: 3}", f"store={store}", "stream=never"))
    context = context_of(deep, tmp_path / "streamed", "{sequences: 3}", f"store={store}", "stream=always")
    assert run(context) == loaded
    reads: list[str] = []
    load = StreamedModel.load

    def counting(self: StreamedModel, block: str) -> None:
        reads.extend([block] * (block not in self.loaded))
        load(self, block)

    monkeypatch.setattr(StreamedModel, "load", counting)
    assert effects.measure(context, context.recipe.losses.layer_effects) == loaded  # type: ignore[arg-type]
    assert len(reads) == 5 + 4 + 5  # every layer, once more those with experts; a whole run


def test_families_whose_layers_read_more_run_whole(tmp_path: Path) -> None:
    context = context_of(save("switch_transformers", tmp_path / "model"), tmp_path / "run", "{sequences: 2}")
    found = run(context)
    assert sum("the whole model runs for each layer" in line for line in context.reporter.said) == 1  # type: ignore[attr-defined]
    assert found.divergence == pytest.approx(whole(context, 2), rel=1e-6)


@pytest.mark.full
@pytest.mark.parametrize("family", ["qwen3_moe", "switch_transformers"])
def test_workers_measure_what_one_process_does(family: str, tmp_path: Path, parts: list[list[tuple[str, Any]]]) -> None:
    """Of five batches two workers have two and three; switch's layers need more than the one before."""
    model = save(family, tmp_path / "model")
    small = ("corpus.sequences=20", "losses.working_memory=60kB", "threads=1")
    alone = context_of(model, tmp_path / "alone", "{sequences: 5}", *small)
    expected = run(alone)
    assert len(effects.heldout_batches(alone, 5, kept=1)) == 5
    assert parts == []
    apart = context_of(model, tmp_path / "apart", "{sequences: 5}", *small, "workers=2")
    assert run(apart) == expected
    whole = family == "switch_transformers"
    names = [[name for name, _ in some] for some in parts]
    assert [some for some in names if some[0].startswith("layer effects")] == [
        ["layer effects, part 1", "layer effects, part 2"],
        *[["layer effects, part 2"]] * whole,
    ]
    assert apart.reporter.said.count(effects.WHOLE) == whole  # type: ignore[attr-defined]


def test_what_disagrees_with_a_whole_run_is_not_believed(
    deep: Path, store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A family that hands on more than a layer's output, without its being seen in what layers are called with."""
    given = run(context_of(deep, tmp_path / "given", "{sequences: 3}", f"store={store}"))
    call = effects.Carried._run

    def forgetful(self: effects.Carried, name: str) -> None:
        call(self, name)
        for states in self.changed.values():
            states[:] = [state * 0.9 for state in states]

    monkeypatch.setattr(effects.Carried, "_run", forgetful)
    context = context_of(deep, tmp_path / "run", "{sequences: 3}", f"store={store}")
    assert run(context).divergence == pytest.approx(given.divergence, rel=1e-6)
    assert any("the whole model runs for each layer" in line for line in context.reporter.said)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("layers", "calibration", "sequences"), [(4, 128, 16), (48, 128, 4), (94, 128, 2), (400, 128, 1), (48, 512, 16)]
)
def test_effects_take_no_longer_than_a_pass_over_the_text(layers: int, calibration: int, sequences: int) -> None:
    section = load_recipe(None, ["losses.layer_effects={}"]).losses.layer_effects
    assert section is not None
    assert effects.sequence_count(section, layers, calibration) == sequences
    assert sequences * effects.passes(layers) <= calibration or sequences == 1
    assert effects.sequence_count(section.model_copy(update={"sequences": 7}), layers, calibration) == 7


def test_tokens_that_are_ruled_out_diverge_in_nothing() -> None:
    exact = torch.tensor([[1.0, 2.0, -torch.inf]]).log_softmax(1)
    changed = torch.tensor([[1.5, 2.0, -torch.inf]]).log_softmax(1)
    assert divergence(exact, changed, "layer 0") == pytest.approx(float(kl_divergence(exact, changed)))
    with pytest.raises(QuantizationError, match="layer 0: the output is not finite"):
        divergence(exact, exact * torch.nan, "layer 0")
