"""profile, effects of layers and eval by workers that open the run for themselves: the bytes of a run without."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from moeq import pipeline
from moeq.errors import NotFiniteError
from moeq.planning.plan import make_plan
from moeq.progress import Reporter
from moeq.recipe import load_recipe
from moeq.stages import needs_evaluate, needs_losses, profile, workers
from moeq.stages.context import Context
from moeq.stages.needs import Sizes

SMALL = (
    "corpus.sequences=14", "corpus.sequence_length=48", "corpus.batch_size=4", "losses.group_size=16",
    "losses.bits=[2,3]", "losses.methods=[rtn]", "threads=1", "assign={method: uniform, bits: 2}",
    "eval.compare=[{name: three, method: uniform, bits: 3}, {name: plain, method: uniform, bits: 2}]",
    "eval.perplexity.sequence_length=64", "eval.perplexity.sequences=6", "export.verify=false", "profile.trace=true",
)  # fmt: skip
TO_EVAL = ("profile", "losses", "assign", "quantize", "export", "eval")
IMAGES = Path(__file__).parents[2] / "recipes" / "coqmoe-digits.yaml"
DIGITS = (
    "corpus.sequences=24", "corpus.batch_size=8", "losses.methods=[rtn]", "losses.layer_effects=null",
    "losses.expert_effects=null",
    "eval.compare=[{name: two, method: uniform, bits: 2}]", "reparam=null", "threads=1", "export.verify=false",
    "assign={method: uniform, bits: 3}", "losses.bits=[2,3]",
)  # fmt: skip


def context(model: str, out: Path, *overrides: str, recipe: Path | None = None) -> Context:
    settings = [*(SMALL if recipe is None else DIGITS), *overrides]
    return Context(recipe=load_recipe(recipe, settings), model_name=model, out=out, reporter=Reporter(quiet=True))


def run(made: Context) -> dict[str, bytes]:
    """Bytes of what profile, losses and eval left, their records without what changes from run to run."""
    pipeline.run(made, TO_EVAL)
    found = {}
    for stage in ("profile", "losses", "eval"):
        for path in sorted(path for path in (made.out / stage).iterdir() if path.is_file()):
            if path.name == "stage.json":
                record = json.loads(path.read_text())
                found[f"{stage}, record"] = json.dumps({k: v for k, v in record.items() if k != "volatile"}).encode()
            else:
                found[f"{stage}, {path.name}"] = path.read_bytes()
    return found


@pytest.mark.full
def test_text_is_counted_and_variants_are_measured_with_the_bytes_of_one_process(
    tiny_mixtral: Path, tmp_path: Path, parts: list[list[tuple[str, Any]]]
) -> None:
    """Of 14 sequences in batches of 4 two workers have 8 and 6."""
    alone = run(context(str(tiny_mixtral), tmp_path / "alone"))
    assert parts == []
    assert {"profile, trace.safetensors", "eval, eval.json", "eval, samples.json"} <= set(alone)
    assert run(context(str(tiny_mixtral), tmp_path / "two", "workers=2")) == alone
    assert [[name for name, _ in some] for some in parts] == [
        ["profile, sequences 0 to 7", "profile, sequences 8 to 13"],
        ["eval of run", "eval of three", "eval of plain"],
    ]


@pytest.mark.full
@pytest.mark.parametrize("count", [2, 4])
def test_a_streamed_model_text_that_grows_and_tasks(tiny_qwen: Path, tmp_path: Path, count: int) -> None:
    more = (
        "stream=always", "dtype=bfloat16", "profile.min_tokens=40", "corpus.sequences=4",
        "corpus.until_covered={share: 1.0, max_sequences: 16}", "eval.tasks=[moeq_continuation]", "eval.limit=3",
    )  # fmt: skip
    alone = run(context(str(tiny_qwen), tmp_path / "alone", *more))
    assert run(context(str(tiny_qwen), tmp_path / "workers", *more, f"workers={count}")) == alone


@pytest.mark.full
def test_images(tmp_path: Path, parts: list[list[tuple[str, Any]]]) -> None:
    alone = run(context("bundled:tiny-moe-vit", tmp_path / "alone", recipe=IMAGES))
    assert run(context("bundled:tiny-moe-vit", tmp_path / "two", "workers=2", recipe=IMAGES)) == alone
    assert len(parts) == 2


def test_the_run_does_it_itself_where_memory_has_no_room_for_two_models_or_workers_are_a_clusters(
    tiny_mixtral: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def asked(*overrides: str) -> list[int | None]:
        effects = ("losses.layer_effects={sequences: 3}", "losses.working_memory=60kB")
        sizes = Sizes(context(str(tiny_mixtral), tmp_path, *effects, *overrides))
        section = sizes.recipe.losses.layer_effects
        assert section is not None
        by_layer = needs_losses.effect_openers(sizes, section)
        found = profile.openers(sizes, 9), by_layer, needs_evaluate.openers(sizes)
        return [None if one is None else one.count for one in found]

    assert asked() == [None, None, None]
    assert asked("workers=1") == [None, None, None]
    assert asked("workers=2", "engine=ray:auto") == [None, None, None]
    assert asked("workers=8") == [8, 3, 3], "no more than there are batches or variants"
    each = workers.WORKER + workers.LIBRARIES
    monkeypatch.setattr(workers, "memory_bytes", lambda _: (workers.SERVER + 3.5 * each) / workers.MEMORY_SHARE)
    assert asked("workers=8") == [3, 3, 3]
    monkeypatch.setattr(workers, "memory_bytes", lambda _: (workers.SERVER + 1.9 * each) / workers.MEMORY_SHARE)
    assert asked("workers=8") == [None, None, None]


@pytest.mark.parametrize("stage", ["profile", "eval"])
def test_the_plan_counts_the_models_of_workers(tiny_mixtral: Path, tmp_path: Path, stage: str) -> None:
    def need(*overrides: str) -> Any:
        plan = make_plan(context(str(tiny_mixtral), tmp_path, *overrides), probe=False)
        return next(one for one in plan.stages if one.stage == stage)

    two, three = need("workers=2").ram_terms, need("workers=3").ram_terms
    assert three["workers"] - two["workers"] == workers.WORKER + workers.LIBRARIES
    assert three["models of workers"] == pytest.approx(1.5 * two["models of workers"])
    assert "workers" not in need().ram_terms


@pytest.mark.full
def test_an_error_of_a_worker_names_the_file_as_without(tiny_mixtral: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    broken.mkdir()
    for path in tiny_mixtral.iterdir():
        (broken / path.name).write_bytes(path.read_bytes())
    tensors = load_file(broken / "model.safetensors")
    key = next(name for name in tensors if "layers.1" in name and "experts" in name)
    tensors[key] = torch.full_like(tensors[key], float("nan"))
    save_file(tensors, broken / "model.safetensors", {"format": "pt"})
    for more in ((), ("workers=2",)):
        with pytest.raises(NotFiniteError, match="weights are not finite") as caught:
            pipeline.run(context(str(broken), tmp_path / f"run{len(more)}", *more), ("profile",))
        assert str(caught.value.where).startswith(f"{broken / 'model.safetensors'}: {key}")
