"""Losses and quantize over the replica store: only what is missing is made, and the bytes come out the same."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from moeq import pipeline
from moeq.artifacts import replicas
from moeq.artifacts.replica_store import MARKER
from moeq.artifacts.replicas import Made, layer_file, rows_file
from moeq.artifacts.run import STORE_VARIABLE
from moeq.errors import ArtifactError
from moeq.inspection import inspect
from moeq.models.single import ExpertReader
from moeq.numerics import gptq
from moeq.progress import Reporter
from moeq.recipe import LossesSection, load_recipe
from moeq.registry import Registry
from moeq.stages import assign, losses, quantize
from moeq.stages import non_experts as others
from moeq.stages.context import Context
from moeq.stages.replicas import Replicas, entries, load_index, load_losses, planned

SMALL = (
    "corpus.sequences=12", "corpus.sequence_length=48", "losses.group_size=16", "assign={method: uniform, bits: 2}",
    "eval.compare=[]", "estimate.grid.inputs=[128]", "estimate.grid.outputs=[512]",
)  # fmt: skip
STAGES = ("profile", "losses", "assign", "quantize", "export")
LAYERS = 2


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, tuple[str, ...], tuple[int, ...]]]:
    """(layer, methods, widths) of every call of `quantize_layer`; GPTQ's and RTN's own calls must agree."""
    found: list[tuple[int, tuple[str, ...], tuple[int, ...]]] = []
    whole, one = losses.quantize_layer, gptq.quantize

    def counting(inputs: Any, weights: Any, math: Any, config: LossesSection, biases: Any, **more: Any) -> Any:
        found.append((inputs.layer.index, tuple(config.methods), tuple(config.bits)))
        return whole(inputs, weights, math, config, biases, **more)

    def quantizing(weight: Any, factor: Any, *, bits: Sequence[int], **options: Any) -> Any:
        if found:  # while losses runs
            assert tuple(bits) == found[-1][2]
            assert ("rtn" if factor is None else "gptq") in found[-1][1]
        return one(weight, factor, bits=bits, **options)

    monkeypatch.setattr(losses, "quantize_layer", counting)
    monkeypatch.setattr(gptq, "quantize", quantizing)
    return found


def context(model: Path, out: Path, *overrides: str, said: list[str] | None = None) -> Context:
    reporter = Reporter(quiet=True)
    if said is not None:
        reporter.say = said.append  # type: ignore[method-assign]
    return Context(recipe=load_recipe(None, [*SMALL, *overrides]), model_name=str(model), out=out, reporter=reporter)


def run(
    model: Path, out: Path, *overrides: str, stages: tuple[str, ...] = ("profile", "losses"), **more: Any
) -> Context:
    made = context(model, out, *overrides, **more)
    pipeline.run(made, stages)
    return made


def content(folder: Path) -> dict[str, bytes]:
    """Bytes of a stage's files, dates and seconds apart."""
    found = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path.name == "stage.json":
            record = json.loads(path.read_text())
            found[path.name] = json.dumps({k: v for k, v in record.items() if k != "volatile"}).encode()
        elif path.is_file():
            found[path.relative_to(folder).as_posix()] = path.read_bytes()
    return found


def store_bytes(context: Context) -> dict[str, bytes]:
    return {name: data for name, data in content(context.store).items() if not name.endswith(".lock")}


@pytest.mark.full
def test_further_widths_are_made_alone(
    tiny_mixtral: Path, tmp_path: Path, calls: list[tuple[int, tuple[str, ...], tuple[int, ...]]]
) -> None:
    run(tiny_mixtral, tmp_path / "grown", "losses.bits=[2,4]")
    assert calls == [(layer, ("gptq", "rtn"), (2, 4)) for layer in range(LAYERS)]
    calls.clear()
    grown = run(tiny_mixtral, tmp_path / "grown", "losses.bits=[1,2,3,4,8]", stages=STAGES)
    assert calls == [(layer, ("gptq", "rtn"), (1, 3, 8)) for layer in range(LAYERS)]
    calls.clear()
    once = run(tiny_mixtral, tmp_path / "once", "losses.bits=[1,2,3,4,8]", stages=STAGES)
    assert calls == [(layer, ("gptq", "rtn"), (1, 2, 3, 4, 8)) for layer in range(LAYERS)]
    assert store_bytes(grown) == store_bytes(once)
    for stage in STAGES:
        assert content(grown.directory(stage)) == content(once.directory(stage)), stage
    calls.clear()
    back = run(tiny_mixtral, tmp_path / "grown", "losses.bits=[2,4]")
    assert calls == []
    assert load_losses(back).bits() == [2, 4]


def test_a_further_method_is_made_alone(
    tiny_mixtral: Path, tmp_path: Path, calls: list[tuple[int, tuple[str, ...], tuple[int, ...]]]
) -> None:
    rtn = "assign={method: uniform, bits: 2, quantizer: rtn}"
    run(tiny_mixtral, tmp_path / "run", "losses.methods=[rtn]", "losses.bits=[2,3]", rtn)
    calls.clear()
    both = run(tiny_mixtral, tmp_path / "run", "losses.methods=[rtn,gptq]", "losses.bits=[2,3]", rtn)
    assert calls == [(layer, ("gptq",), (2, 3)) for layer in range(LAYERS)]
    assert load_losses(both).listed_methods() == ["rtn", "gptq"]


@pytest.mark.full
def test_what_decides_no_codes_keeps_the_replicas(tiny_mixtral: Path, tmp_path: Path) -> None:
    first = run(tiny_mixtral, tmp_path / "run", "losses.bits=[2]")
    name = load_index(first).set
    path = layer_file(first.store / name, 0)
    before = path.read_bytes(), path.stat().st_mtime_ns
    other = run(tiny_mixtral, tmp_path / "run", "losses.bits=[2]", "losses.max_measured_tokens=20")
    assert load_index(other).set == name
    assert (path.read_bytes(), path.stat().st_mtime_ns) == before
    fewer, more = load_losses(other).matrix("gptq"), run(tiny_mixtral, tmp_path / "new", "losses.bits=[2]",
                                                         "losses.max_measured_tokens=20")  # fmt: skip
    assert [layer[2].tolist() for layer in fewer] == [layer[2].tolist() for layer in load_losses(more).matrix("gptq")]
    for override in ("losses.damping=0.02", "losses.group_size=24", "corpus.sequences=16", "losses.tokens=all"):
        changed = run(tiny_mixtral, tmp_path / "run", "losses.bits=[2]", override)
        assert load_index(changed).set != name, override
    assert path.read_bytes() == before[0]


def test_settings_named_after_a_method_count_for_it_alone() -> None:
    steps = [entries(LossesSection(methods=["gptq", "signround"], signround_iterations=n)) for n in (10, 20)]
    assert [made.method for made, again in zip(*steps, strict=True) if made != again] == ["signround"] * 5
    one, other = (entries(LossesSection(bits=[2], max_measured_tokens=count)) for count in (10, 20))
    assert [made.entry for made in one] == [made.entry for made in other]
    assert [made.rows for made in one] != [made.rows for made in other]


def test_a_seed_is_named_where_a_method_draws() -> None:
    section = LossesSection(methods=["gptq", "signround"], bits=[2])
    first, other, third = (entries(section, seed=seed) for seed in (0, 5, 6))
    assert first == entries(section)
    assert first[0] == other[0] == third[0]
    assert len({one[1].entry for one in (first, other, third)}) == 3
    assert len({one[1].rows for one in (first, other, third)}) == 3


def test_what_stores_were_given_before_is_found_by_its_names() -> None:
    """Only the revisions, and other settings, may change them: else nothing of a store made before is found."""
    recipe = load_recipe(
        None, ["losses={methods: [gptq, rtn, signround], bits: [4], signround_iterations: 30, "
               "clip: minmax, hessian_weighting: none}",
               "assign={method: uniform, bits: 4}", "eval.compare=[]"],
    )  # fmt: skip
    computed = {"device": "cpu", "dtype": "float32"}
    model = SimpleNamespace(stamp=SimpleNamespace(digest="d" * 64), compute=lambda: computed)
    run: Any = SimpleNamespace(recipe=recipe, model=model)
    index = losses.planned(run, "t" * 64)
    assert index.set == "68f656d645d7a68f24ac312953043d0d94c255ec8220974c0d6a7221582689e2"
    assert [(made.entry, made.rows) for made in index.made] == [
        ("gptq.4.ca3d163bab055381", "gptq.4.691f0b4d93e115ed"),
        (None, "rtn.4.e5bd7e0893d09ec1"),
        ("signround.4.30a287708147b251", "signround.4.1eb2041aa2f8d608"),
    ]


def test_a_call_makes_replicas_by_one_method_only() -> None:
    def made(method: str, bits: int, kept: bool = True) -> Any:
        return Made(method=method, bits=bits, entry=f"{method}.{bits}" if kept else None, rows="x")

    all_three = [made(method, bits, method != "rtn") for method in ("rtn", "gptq", "x") for bits in (2, 3)]
    found = [{one.method for one in call} for call in losses.calls(all_three)]
    assert found == [{"rtn", "gptq"}, {"x"}]
    apart = losses.calls([made("gptq", 2), made("rtn", 2, False), made("rtn", 3, False)])
    assert [[(one.method, one.bits) for one in call] for call in apart] == [[("gptq", 2)], [("rtn", 2), ("rtn", 3)]]


def test_whose_store_it_is_lets_others_write(
    tiny_mixtral: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run begins in its directory while another one writes to the store in it."""
    first, chunks = run(tiny_mixtral, tmp_path / "first", "losses.bits=[2]"), replicas._chunks

    def meanwhile(*given: Any) -> Any:
        run(tiny_mixtral, first.out, "losses.bits=[2]", stages=("profile",))
        monkeypatch.setattr(replicas, "_chunks", chunks)
        return chunks(*given)

    monkeypatch.setattr(replicas, "_chunks", meanwhile)
    other = run(tiny_mixtral, tmp_path / "other", "losses.bits=[2,3]", f"store={first.store}")
    assert replicas._chunks is chunks
    assert load_index(other).set == load_index(first).set
    assert losses.is_intact(other)


@pytest.mark.cases(1)
@pytest.mark.parametrize("how", ["recipe", "environment"])
def test_runs_share_a_store(
    tiny_mixtral: Path,
    tmp_path: Path,
    how: str,
    calls: list[tuple[int, tuple[str, ...], tuple[int, ...]]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shared = tmp_path / "shared"
    option = (f"store={shared}",) if how == "recipe" else ()
    if how == "environment":
        monkeypatch.setenv(STORE_VARIABLE, str(shared))
    first = run(tiny_mixtral, tmp_path / "first", *option, stages=STAGES)
    calls.clear()
    second = run(tiny_mixtral, tmp_path / "second", *option, stages=STAGES)
    assert calls == []
    assert (first.store, second.store) == (shared, shared)
    assert not (tmp_path / "first" / "store").exists()
    for stage in STAGES:
        assert content(first.directory(stage)) == content(second.directory(stage)), stage
    monkeypatch.delenv(STORE_VARIABLE, raising=False)
    alone = run(tiny_mixtral, tmp_path / "alone", stages=STAGES)
    for stage in STAGES:
        assert content(alone.directory(stage)) == content(first.directory(stage)), stage
    recipe = load_recipe(tmp_path / "second" / "recipe.yaml")
    assert recipe.store == str(shared)
    assert load_recipe(tmp_path / "alone" / "recipe.yaml").store is None


@pytest.mark.cases(1)
@pytest.mark.parametrize("damage", ["flipped", "truncated", "deleted", "rows"])
def test_a_damaged_store_is_named_and_mended(
    tiny_mixtral: Path, tmp_path: Path, damage: str, calls: list[tuple[int, tuple[str, ...], tuple[int, ...]]]
) -> None:
    made = run(tiny_mixtral, tmp_path / "run", stages=STAGES)
    index = load_index(made)
    path = layer_file(made.store / index.set, 1)
    if damage == "rows":
        path = rows_file(made.store / index.set, 1, index.made[0].rows)
        made.directory("losses").joinpath("losses.parquet").unlink()  # the rows are only read with it
    whole, before = path.read_bytes(), {stage: content(made.directory(stage)) for stage in STAGES[2:]}
    data = bytearray(whole)
    data[-100] ^= 1
    path.unlink()
    if damage != "deleted":
        path.write_bytes(whole[:-50] if damage == "truncated" else data)
    if damage != "rows":
        (made.directory("quantize") / "stage.json").unlink()
        with pytest.raises(ArtifactError, match=r"layer-001\.safetensors.*run `moeq losses` again"):
            pipeline.run_alone(context(tiny_mixtral, tmp_path / "run"), "quantize")
    calls.clear()
    said: list[str] = []
    run(tiny_mixtral, tmp_path / "run", stages=STAGES, said=said)
    assert {layer for layer, _, _ in calls} == {1}
    named = [line for line in said if "damaged, made again" in line]
    assert [str(path) in line for line in named] == ([] if damage == "deleted" else [True])
    assert path.read_bytes() == whole
    assert {stage: content(made.directory(stage)) for stage in STAGES[2:]} == before


@pytest.mark.full
def test_a_store_that_lost_its_mark_has_it_again(tiny_mixtral: Path, tmp_path: Path) -> None:
    """Without it neither `moeq gc` nor `moeq inspect` would know the folder."""
    made = run(tiny_mixtral, tmp_path / "run", stages=STAGES)
    marker = made.store / MARKER
    whole = marker.read_bytes()
    marker.unlink()
    said: list[str] = []
    run(tiny_mixtral, tmp_path / "run", stages=STAGES, said=said)
    assert marker.read_bytes() == whole
    assert any("store.json: missing or damaged" in line for line in said)


@pytest.mark.full
def test_damaged_rows_are_seen_by_inspect_and_with_check(tiny_mixtral: Path, tmp_path: Path) -> None:
    """They are read when a table is made of them; a run that skips its losses does not, unless it is told to."""
    made = run(tiny_mixtral, tmp_path / "run", stages=STAGES)
    path = sorted(made.store.glob("*/losses/*.json"))[-1]
    whole = path.read_bytes()
    path.write_bytes(whole.replace(b'"bits":', b'"bitz":', 1))
    with pytest.raises(ArtifactError, match=rf"{path.name}: missing or damaged"):
        inspect(made.store)
    said: list[str] = []
    pipeline.run(replace(context(tiny_mixtral, tmp_path / "run", said=said), check=True), STAGES)
    assert any(f"{path.name}: missing or damaged" in line for line in said)
    assert path.read_bytes() == whole
    assert inspect(made.store)["kind"] == "moeq replica store"


@pytest.mark.full
def test_an_interrupted_layer_is_the_only_one_made_again(
    tiny_mixtral: Path,
    tmp_path: Path,
    calls: list[tuple[int, tuple[str, ...], tuple[int, ...]]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    add = replicas.add_rows

    def failing(directory: Path, layer: int, *more: Any) -> None:
        if layer == 1:
            raise KeyboardInterrupt
        add(directory, layer, *more)

    monkeypatch.setattr(replicas, "add_rows", failing)
    with pytest.raises(KeyboardInterrupt):
        run(tiny_mixtral, tmp_path / "run")
    monkeypatch.setattr(replicas, "add_rows", add)
    calls.clear()
    resumed = run(tiny_mixtral, tmp_path / "run")
    assert {layer for layer, _, _ in calls} == {1}
    whole = run(tiny_mixtral, tmp_path / "whole")
    assert content(resumed.directory("losses")) == content(whole.directory("losses"))
    assert store_bytes(resumed) == store_bytes(whole)


@pytest.mark.cases(1)
@pytest.mark.parametrize("replicas", ["placed", "all"])
def test_best_takes_each_experts_replica_from_the_method_that_lost_least(
    tiny_qwen: Path, tmp_path: Path, replicas: str
) -> None:
    best = run(tiny_qwen, tmp_path / "run", "losses.heldout_fraction=0.5", f"quantize.replicas={replicas}",
               "assign={method: prefix-split, code_bits: 2, quantizer: best}", stages=STAGES)  # fmt: skip
    table = load_losses(best)
    assert table.listed_methods() == ["gptq", "rtn"]
    exact, rounded, lowest = (table.matrix(method) for method in ("gptq", "rtn", "best"))
    seen = set()
    manifest = json.loads((best.directory("export") / "placement.json").read_text())
    chosen = json.loads((best.directory("assign") / "assignment.json").read_text())
    for index, layer in enumerate(manifest["layers"]):
        for expert in layer["experts"]:
            number = expert["expert"]
            for replica in expert["replicas"]:
                bits = replica["bits"]
                if bits == 16:
                    assert "quantizer" not in replica
                    continue
                losing = {"gptq": exact[index][bits][number], "rtn": rounded[index][bits][number]}
                winner = min(losing, key=lambda method: losing[method])
                assert replica["quantizer"] == winner
                assert lowest[index][bits][number] == losing[winner]
                seen.add(winner)
                if replica["placed"]:
                    assert chosen["layers"][index]["experts"][number]["quantizer"] == winner
            assert len(expert["replicas"]) == (6 if replicas == "all" else 1)
    assert seen == {"gptq", "rtn"}, "a test in which both win somewhere"
    assert stored_as_said(best)


def stored_as_said(context: Context) -> bool:
    """Whether every placed expert has the codes of the method that the assignment names."""
    assignment = assign.load(context)
    for layer in context.model.layers:
        mine = Replicas(context, assignment, layer)
        for expert, choice in enumerate(assignment.layers[layer.index].experts):
            only = assignment.model_copy(update={"parameters": {"quantizer": choice.quantizer}})
            wanted = Replicas(context, only, layer).packed(expert, choice.bits)
            for projection, packed in mine.packed(expert, choice.bits).items():
                if not all(
                    (packed.parts()[part] == tensor).all() for part, tensor in wanted[projection].parts().items()
                ):
                    return False
    return True


@pytest.mark.full
def test_a_width_edited_by_hand_takes_the_best_method(tiny_qwen: Path, tmp_path: Path) -> None:
    made = run(tiny_qwen, tmp_path / "run", "losses.heldout_fraction=0.5",
               "assign={method: uniform, bits: 2, quantizer: best}", stages=STAGES)  # fmt: skip
    path = made.directory("assign") / "assignment.json"
    edited = json.loads(path.read_text())
    for expert in edited["layers"][0]["experts"]:
        expert |= {"bits": 4, "quantizer": None}
    path.write_text(json.dumps(edited))
    run(tiny_qwen, tmp_path / "run", "losses.heldout_fraction=0.5",
        "assign={method: uniform, bits: 2, quantizer: best}", stages=STAGES)  # fmt: skip
    found = quantize.quantizers(made.directory("quantize"))
    best = load_losses(made).best()
    names = list(found)
    assert [one[4] for one in found[names[0]]] == best[0][4].tolist()
    assert [one[2] for one in found[names[1]]] == best[1][2].tolist()


@pytest.mark.full
def test_rtn_alone_keeps_no_replicas(tiny_mixtral: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = run(tiny_mixtral, tmp_path / "run", "losses.methods=[rtn]", "losses.bits=[2]",
               "assign={method: uniform, bits: 2, quantizer: rtn}", stages=STAGES)  # fmt: skip
    assert not list(made.store.rglob("*.safetensors"))
    reads: list[int] = []
    read = ExpertReader.read
    monkeypatch.setattr(ExpertReader, "read", lambda *given: (reads.append(1), read(*given))[1])
    assert np.prod(Replicas(made, assign.load(made), made.model.layers[0]).packed(0, 2)["up_proj"].codes.shape)
    assert reads


def test_replicas_of_other_settings_of_a_quantizer_are_others(tiny_mixtral: Path, tmp_path: Path) -> None:
    """Models that are measured one after the other take over what is the same, by its name."""

    def identity(*more: str) -> str:
        recipe = load_recipe(
            None, ["losses.methods=[signround]", "assign={method: uniform, bits: 2, quantizer: signround}", *more]
        )
        context = Context(recipe=recipe, model_name=str(tiny_mixtral), out=tmp_path, reporter=Reporter(quiet=True))
        layer = context.model.layers[0]
        chosen = SimpleNamespace(bits=2, widths=2, key=2, quantizer=None)
        assignment = SimpleNamespace(
            layers=[SimpleNamespace(experts=[chosen])], parameters={"quantizer": recipe.assign.quantizer}
        )
        found = Replicas(context, assignment, layer)
        vars(found)["index"] = planned(context, "0" * 64)
        return found.identity(0)

    assert identity() == identity("losses.damping=0.01")
    assert identity() != identity("losses.signround_iterations=30")


def test_versions_of_somebody_elses_quantizers_are_kept_apart(
    tiny_mixtral: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = context(tiny_mixtral, tmp_path, "losses.methods=[gptq,rtn]", "others.attention=4", "others.method=rtn")

    def by(package: str | None) -> tuple[Any, ...]:
        """What names the replicas by gptq and by rtn and what is no expert, and what the stage's key holds, where rtn
        is a package's."""
        monkeypatch.setattr(Registry, "origin", lambda _, name: package if name == "rtn" else None)
        mine, theirs = (
            [one.rows for one in planned(made, "text").made if one.method == method] for method in ("gptq", "rtn")
        )
        return mine, theirs, [one.entry for one in others.planned(made, "text").made], losses.more_wanted(made)

    own, first, second = by(None), by("strangers 1.0"), by("strangers 2.0")
    assert own[0] == first[0] == second[0]
    for wanted in (first, second):
        assert all(one != other for one, other in zip(own[1:], wanted[1:], strict=True))
    assert all(one != other for one, other in zip(first[1:], second[1:], strict=True))
    assert (own[3], second[3]) == (None, ["strangers 2.0"])
