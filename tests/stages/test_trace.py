"""profile.trace: what is recorded is what the profile counts, and recording changes nothing else."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest
import torch
from tiny_models import save_tiny

from moeq import pipeline
from moeq.artifacts.coactivation import NAME as COACTIVATION
from moeq.artifacts.trace import NAME, RoutingTrace, read_trace, sequence_counts
from moeq.errors import ArtifactError
from moeq.estimator.trace import sequence_scores
from moeq.inspection import inspect
from moeq.models.corpus import Sequences
from moeq.models.experts import ExpertLayer
from moeq.models.walk import LayerInputs
from moeq.progress import Reporter
from moeq.recipe import load_recipe
from moeq.stages import export, profile
from moeq.stages.context import Context
from moeq.stages.needs import Sizes
from moeq.stages.recorder import Recorder

SMALL = (
    "corpus.sequences=8", "corpus.sequence_length=16", "corpus.batch_size=3", "losses.group_size=16",
    "losses.bits=[1, 2, 3, 4]", "losses.methods=[rtn]", "losses.per_projection=false", "assign.quantizer=rtn",
    "eval.compare=[]", "eval.perplexity=null", "profile.prefill_fraction=0.3",
)  # fmt: skip
TRACED = "profile.trace=true"


def context(model: Path, out: Path, *overrides: str) -> Context:
    recipe = load_recipe(None, [*SMALL, *overrides])
    return Context(recipe=recipe, model_name=str(model), out=out, reporter=Reporter(quiet=True))


def recorded(one: Context) -> RoutingTrace:
    pipeline.run(one, ("profile",))
    return read_trace(one.directory("profile") / NAME)


def agrees(trace: RoutingTrace, one: Context) -> None:
    """The trace says of every sequence and phase what the profile says."""
    found = profile.load(one)
    assert trace.layers == found.layers
    assert trace.text == found.text
    assert (np.stack([trace.prefill, trace.lengths - trace.prefill], 1) == found.tokens).all()
    for layer in range(trace.num_layers):
        for phase, tokens in enumerate((trace.is_prefill, ~trace.is_prefill)):
            assert (sequence_counts(trace, layer, tokens) == found.counts[layer][:, phase]).all()
            scores = found.scores[layer][:, phase]
            assert np.allclose(sequence_scores(trace, layer, tokens), scores, rtol=1e-3, atol=1e-3)


@pytest.mark.cases(1)
@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
@pytest.mark.parametrize("stream", ["never", "always"])
def test_the_trace_says_what_the_profile_says(family: str, stream: str, tmp_path: Path) -> None:
    one = context(save_tiny(tmp_path / "model", family), tmp_path / "run", TRACED, f"stream={stream}")
    trace = recorded(one)
    agrees(trace, one)
    assert trace.domains == one.text.calibration.domains
    assert len(set(trace.domains)) > 1
    assert trace.model == one.model.stamp


def test_a_share_that_is_a_whole_number_of_tokens_has_so_many(tmp_path: Path) -> None:
    model = save_tiny(tmp_path / "model", "mixtral")
    one = context(model, tmp_path / "run", "corpus.sequence_length=25", "profile.prefill_fraction=0.28")
    pipeline.run(one, ("profile",))
    assert profile.load(one).tokens.tolist() == [[7, 18]] * 8


def test_inspect_reads_the_trace_of_a_profile(tmp_path: Path) -> None:
    """It is no file of the stage's record: it has digests of its own."""
    one = context(save_tiny(tmp_path / "model", "mixtral"), tmp_path / "run", TRACED)
    recorded(one)
    directory = one.directory("profile")
    inspect(directory)
    data = bytearray((directory / NAME).read_bytes())
    data[-1] ^= 4
    (directory / NAME).write_bytes(data)
    with pytest.raises(ArtifactError, match=NAME):
        inspect(directory)


def test_tokens_that_were_left_out_or_chose_fewer_keep_their_row() -> None:
    sequences = Sequences(
        ids=torch.zeros((2, 3), dtype=torch.long),
        mask=torch.tensor([[True, True, True], [True, True, False]]),
        domains=("a", "b"),
    )
    recorder = Recorder(sequences, torch.tensor([1, 2]))
    for name, top_k in (("wide", 2), ("narrow", 1)):
        layer = SimpleNamespace(name=name, num_experts=4)
        there = torch.tensor([0, 2, 3, 4])  # of five tokens the second is left out
        recorder.add(
            LayerInputs(
                layer=cast(ExpertLayer, layer),
                hidden=torch.zeros((4, 8)),
                experts=torch.tensor([[0, 4], [1, 2], [3, 0], [2, 1]])[:, :top_k],  # 4 stands for none
                weights=torch.full((4, top_k), 0.5),
                sequence=torch.tensor([0, 0, 0, 1, 1])[there],
                position=torch.tensor([0, 1, 2, 0, 1])[there],
                left_out=1,
            )
        )
    trace = recorder.trace()
    assert trace.experts[:, 0].tolist() == [[0, -1], [-1, -1], [1, 2], [3, 0], [2, 1]]
    assert trace.experts[:, 1].tolist() == [[0, -1], [-1, -1], [1, -1], [3, -1], [2, -1]]
    assert trace.weights is not None
    assert trace.weights[:, 0].tolist() == [[0.5, 0.0], [0.0, 0.0], [0.5, 0.5], [0.5, 0.5], [0.5, 0.5]]
    assert trace.prefill.tolist() == [1, 2]


def test_documents_of_unequal_length_and_growing_text(tiny_mixtral: Path, tmp_path: Path) -> None:
    grow = ("profile.min_tokens=40", "corpus.until_covered={share: 1.0, max_sequences: 64}")
    for overrides in (("corpus.packed=false",), grow):
        one = context(tiny_mixtral, tmp_path / overrides[0], TRACED, *overrides)
        trace = recorded(one)
        agrees(trace, one)
    assert trace.num_sequences > 8
    assert trace.domains == one.text.grown_calibration.domains


@pytest.mark.full
def test_switching_it_on_changes_no_other_byte_and_runs_nothing_else(tiny_mixtral: Path, tmp_path: Path) -> None:
    stages = ("profile", "losses", "assign")
    plain = context(tiny_mixtral, tmp_path)
    pipeline.run(plain, stages)
    folder = plain.directory("profile")
    before = {path.name: path.read_bytes() for path in folder.iterdir() if path.name != "stage.json"}
    ran = lambda *more: [not one.skipped for one in pipeline.run(context(tiny_mixtral, tmp_path, *more), stages)]  # noqa: E731
    assert ran(TRACED) == [True, False, False]
    after = {path.name: path.read_bytes() for path in folder.iterdir() if path.name != "stage.json"}
    assert set(after) - set(before) == {NAME}
    assert {name: after[name] for name in before} == before
    assert ran(TRACED) == [False, False, False]
    assert ran() == [True, False, False]
    assert not (folder / NAME).exists(), "a trace of another run is not left behind"


def test_a_checkpoint_of_all_replicas_says_what_follows_once_it_is_switched_on(
    tiny_mixtral: Path, tmp_path: Path
) -> None:
    stages = ("profile", "losses", "assign", "quantize", "export")
    given = ("losses.bits=[2]", "assign={method: uniform, bits: 2, quantizer: rtn}", "export.verify=false")

    def ran(*more: str) -> list[str]:
        made = pipeline.run(context(tiny_mixtral, tmp_path, "quantize.replicas=all", *given, *more), stages)
        return [one.stage for one in made if not one.skipped]

    said = tmp_path / "checkpoint" / COACTIVATION
    ran()
    assert not said.exists()
    assert ran(TRACED) == ["profile", "export"]
    assert said.is_file()
    assert ran() == ["profile", "export"]
    assert not said.exists()
    one_replica = [export.other_inputs(context(tiny_mixtral, tmp_path, *more)) for more in ((), (TRACED,))]
    assert one_replica == [None, None]


DAMAGE: dict[str, Callable[[Path], object]] = {
    "gone": lambda path: path.unlink(),
    "cut": lambda path: path.write_bytes(path.read_bytes()[:-5]),
    "flipped": lambda path: path.write_bytes(path.read_bytes()[:-1] + b"\x7f"),
}


@pytest.mark.cases(1)
@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_trace_is_recorded_again(tiny_mixtral: Path, tmp_path: Path, damage: str) -> None:
    one = context(tiny_mixtral, tmp_path, TRACED)
    recorded(one)
    path = one.directory("profile") / NAME
    whole = path.read_bytes()
    DAMAGE[damage](path)
    assert not pipeline.run(context(tiny_mixtral, tmp_path, TRACED), ("profile",))[0].skipped
    assert path.read_bytes() == whole


def test_the_plan_foretells_its_bytes(tiny_mixtral: Path, tmp_path: Path) -> None:
    one = context(tiny_mixtral, tmp_path, TRACED)
    recorded(one)
    fresh = context(tiny_mixtral, tmp_path / "elsewhere", TRACED)
    foretold = profile.needs(Sizes(fresh)).files[NAME]
    assert foretold == pytest.approx((one.directory("profile") / NAME).stat().st_size, abs=200)


def test_the_plan_counts_its_memory(tiny_mixtral: Path, tmp_path: Path) -> None:
    """Experts and weights of every layer, two bytes each, and the experts once more as they become one array."""
    tables = []
    for overrides in ((), (TRACED,)):
        one = context(tiny_mixtral, tmp_path, *overrides)
        tables.append(max(moment.get("routing counts", 0) for moment in profile.needs(Sizes(one)).moments))
    assert tables[1] - tables[0] == 8 * 16 * 2 * 2 * (2 + 2 + 2)


def test_inspect_says_what_it_is(tiny_mixtral: Path, tmp_path: Path) -> None:
    one = context(tiny_mixtral, tmp_path, TRACED)
    trace = recorded(one)
    found = inspect(one.directory("profile") / NAME)
    assert found["kind"] == "routing trace"
    assert found["sequences"] == 8
    assert sum(found["sequences_by_domain"].values()) == 8
    assert found["tokens"] == trace.num_tokens == 8 * 16
    assert found["prefill_tokens"] == 8 * 5
    path = one.directory("profile") / NAME
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ArtifactError, match="truncated"):
        inspect(path)
