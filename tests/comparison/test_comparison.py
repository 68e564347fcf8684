"""`moeq eval` of models, checkpoints, runs and assignments side by side, and lm-eval's own command line."""

from __future__ import annotations

import json
import random
import shutil
import weakref
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import family_models
import numpy as np
import pytest
import torch
import yaml
from safetensors.torch import save_file
from typer.testing import CliRunner

from moeq.artifacts.assignment import EDITED
from moeq.cli import app
from moeq.comparison import loaded
from moeq.comparison.eval_options import EvalOptions
from moeq.comparison.refusals import needs_a_run
from moeq.comparison.side_by_side import compare
from moeq.comparison.subjects import Subject, open_subjects
from moeq.errors import ArtifactError, EvaluationError, ModelError, MoeqError, RecipeError
from moeq.evaluation import reference_logits, task_files
from moeq.evaluation import result_file as document
from moeq.evaluation.harness import evaluate_tasks, open_tasks
from moeq.evaluation.strided import read_text
from moeq.evaluation.strided import windows as cut
from moeq.lm_eval import make_model, register
from moeq.models.source import open_source
from moeq.runtime.checkpoint import load_checkpoint
from moeq.stages import evaluate
from moeq.stages.checkpoint_size import original_bytes
from moeq.tables import human_size
from moeq.terminal import print_comparison

TASKS = "made_choice,made_text,made_generate"


def asked(words: list[Any], **more: Any) -> EvalOptions:
    given = {"quiet": True, "batch_size": "4"} | more
    return EvalOptions(recipe=[str(word) for word in words], **given)


def values(found: dict[str, Any]) -> dict[str, dict[str, float]]:
    return {row["name"]: {name: cell["value"] for name, cell in row["cells"].items()} for row in found["table"]}


@pytest.fixture(scope="module")
def compared(run: Path, tiny_mixtral: Path, tasks: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The original, all assignments of a run, its checkpoint, and rows by context, some with all experts exact."""
    out = tmp_path_factory.mktemp("results") / "found.json"
    bases: list[weakref.ref[Any]] = []

    def load(*given: Any, before: Any = loaded.load) -> Any:
        assert all(one() is None for one in bases), "two models in memory"
        found = before(*given)
        bases.append(weakref.ref(found.model))
        return found

    words = [tiny_mixtral, f"{run}:*", run / "checkpoint"]
    contexts = ["gpu_experts=5", "gpu_experts=1,code_bits=2", "gpu_experts=1,code_bits=2,selector=false"]
    more = {"tasks": TASKS, "include_path": tasks, "text": str(text_of(out.parent)), "window": 24, "stride": 12}
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(loaded, "load", load)
        compare(asked(words, context_aware=contexts, out=out, **more))
    assert len(bases) == 2
    found: dict[str, Any] = json.loads(out.read_text("utf-8"))
    return found | {"out": str(out)}


def text_of(folder: Path) -> Path:
    path = folder / "text.jsonl"
    lines = [
        {"text": f"number {n}: " + " ".join(f"word {n * k}" for k in range(12)), "domain": "ab"[n % 2]}
        for n in range(4)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.mark.full
def test_all_that_is_exact_is_the_original(compared: dict[str, Any]) -> None:
    found = values(compared)
    original = found["mixtral"]
    assert set(original) == {"average", "made_choice", "made_text", "made_generate", "perplexity"}
    for name in ("made:original", "made K=5 full", "made/checkpoint K=5 full"):
        divergence = {measure: found[name].pop(measure) for measure in ("KL", "equal top-1")}
        assert found[name] == pytest.approx(original, rel=1e-4), name
        assert divergence["KL"] == pytest.approx(0, abs=1e-9)
        assert divergence["equal top-1"] == 1
    changed = compared["table"][1]["cells"]["perplexity"]["change"]
    assert (changed["difference"], changed["items"]) == (0, len(windows(compared)))


@pytest.mark.full
def test_assignments_of_a_run_are_called_as_people_do(
    compared: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    named = {row["name"]: row["of"].get("label") for row in compared["rows"]}
    assert named["mixtral"] is None
    assert named["made:original"] == "as trained"
    assert named["made:uniform-2"] == "uniform 2-bit"
    print_comparison(compared)
    shown = capsys.readouterr().out
    assert "made:run: 1 expert in FP32 + prefix-split, 2.5 code bits" in " ".join(shown.split())


def test_an_assignment_that_was_edited_is_not_called_what_its_method_found(run: Path, tmp_path: Path) -> None:
    """As the final table of a run says it."""
    copy = shutil.copytree(run, tmp_path / "made")
    own, saved = copy / "assign" / "assignment.json", copy / "saved.json"
    called = lambda word: open_subjects([str(word)], [], trust=False)[-1].described()["label"]  # noqa: E731
    decided = shutil.copy(own, saved)
    own.write_text(own.read_text("utf-8") + "\n", "utf-8")
    label = "1 expert in FP32 + prefix-split, 2.5 code bits"
    assert called(saved) == label
    assert [called(word) for word in (copy, f"{copy}:run", own)] == [f"{label}, edited {EDITED}"] * 3
    assert called(f"{copy}:uniform-2") == "uniform 2-bit"
    assert called(shutil.copy(own, decided)) == f"{label}, edited {EDITED}"


def test_what_is_called_alike_is_told_apart_by_the_folders_above(
    run: Path, tiny_mixtral: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As runs that lie in folders of their own are called, and one that a command stands in."""
    other = shutil.copytree(run, tmp_path / "b" / "made")
    (tmp_path / "a").symlink_to(run.parent)
    here = tmp_path / "a" / "made"

    def names(*words: str | Path) -> list[str]:
        return [row.name for row in open_subjects([*map(str, words)], [], False) if isinstance(row, Subject)]

    assert names(here, f"{other}:original", other) == ["a/made", "b/made:original", "b/made"]
    assert names(here, other / "assign" / "assignment.json") == ["a/made", "b/made:run"]
    assert names(here / "checkpoint", other / "checkpoint") == ["a/made/checkpoint", "b/made/checkpoint"]
    models = [shutil.copytree(tiny_mixtral, tmp_path / folder / "model") for folder in ("c", "d")]
    assert names(*models, here) == ["c/model", "d/model", "made"]
    monkeypatch.chdir(other)
    assert names(".", ".:original", "checkpoint") == ["made", "made:original", "made/checkpoint"]
    with pytest.raises(EvaluationError, match="made: is there twice"):
        names(".", "../made")


def test_sizes_stand_beside_what_they_cost(
    compared: dict[str, Any],
    run: Path,
    tiny_mixtral: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    sizes = {row["name"]: row["bytes"] for row in compared["rows"]}
    written = sum(path.stat().st_size for path in (run / "checkpoint").iterdir())
    assert sizes["made/checkpoint"] == written
    assert written <= sizes["made:run"] <= 1.5 * written  # never less than it comes to
    assert sizes["mixtral"] == sizes["made:original"] == original_bytes(open_source(str(tiny_mixtral)))
    assert sizes["made K=5 full"] is None
    print_comparison(compared)
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split() == ["whole", "checkpoint"]
    shown = next(line.split() for line in lines if line.split()[:1] == ["made/checkpoint"])
    assert shown[1:] == [*human_size(written).split(), f"{written / sizes['mixtral'] - 1:+.1%}"]
    earlier = compared | {"rows": [{key: row[key] for key in row if key != "bytes"} for row in compared["rows"][:1]]}
    print_comparison(earlier)
    told = capsys.readouterr().out
    assert "whole checkpoint" not in told
    assert "differences from" not in told, "one row has none"
    print_comparison(compared | {key: compared[key][:1] for key in ("rows", "table")})
    head, *_, note = capsys.readouterr().out.rstrip().splitlines()
    assert head.split() == ["value"]
    assert note.startswith("perplexity of ")


def test_divergences_are_those_of_plain_forward_passes(
    compared: dict[str, Any], run: Path, tiny_mixtral: Path, tmp_path: Path
) -> None:
    """Of a packed checkpoint and of an assignment, token by token in float64."""
    checkpoint, *_ = open_subjects([str(run / "checkpoint")], [], False)
    original, uniform = (open_subjects([word], [], False)[0] for word in (str(tiny_mixtral), f"{run}:uniform-2"))
    settings = loaded.Settings(device="cpu")
    rows = {row["name"]: row for row in compared["rows"]}
    text, logits = read_text(str(text_of(tmp_path)), loaded.load(original, settings).tokenizer, 24, 12), []
    for subject in (original, uniform, checkpoint):
        lm = loaded.lm_of(loaded.load(subject, settings), subject, settings)
        of_model = []
        for tokens in text.documents:
            for fed, targets in cut(tokens, 24, 12):
                with torch.no_grad():
                    part = lm.model(torch.tensor([fed])).logits[0, -len(targets) :]
                of_model.append((part.double().log_softmax(-1), torch.tensor(targets)))
        logits.append(of_model)
    for name, of_model in (("made:uniform-2", logits[1]), ("made/checkpoint", logits[2])):
        kls, same, overlap, change = [], [], [], []
        for (first, targets), (second, _) in zip(logits[0], of_model, strict=True):
            kls += (first.exp() * (first - second)).sum(1).tolist()
            same += (first.argmax(1) == second.argmax(1)).tolist()
            tops = zip(first.topk(5).indices.tolist(), second.topk(5).indices.tolist(), strict=True)
            overlap += [len(set(one) & set(other)) / 5 for one, other in tops]
            change += [float(q[t].exp() - p[t].exp()) for p, q, t in zip(first, second, targets, strict=True)]
        found = rows[name]["divergence"]
        assert (found["base"], found["tokens"]) == ("mixtral", len(kls))
        assert found["kl"] == pytest.approx(np.mean(kls), rel=1e-4)
        for percentile in ("50", "99", "99.9", "100"):
            assert found["kl_percentiles"][percentile] == pytest.approx(np.percentile(kls, float(percentile)), rel=1e-4)
        assert found["same_top"] == pytest.approx(np.mean(same), abs=1e-9)
        assert found["top5_overlap"] == pytest.approx(np.mean(overlap), abs=1e-9)
        assert found["rms_change"] == pytest.approx(np.sqrt(np.mean(np.square(change))), rel=1e-4)
        assert sum(found["items"]["kl"]) == pytest.approx(sum(kls), rel=1e-4)
        assert 0 < found["kl_stderr"] < found["kl"]


def test_a_large_vocabulary_is_compared_within_bounds(
    compared: dict[str, Any], run: Path, tiny_mixtral: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if all logits of the text were too many: the tables say how far the truth may be."""
    monkeypatch.setattr(reference_logits, "MOST_BYTES", 1)
    monkeypatch.setenv("COLUMNS", "200")
    more = ["--text", str(text_of(tmp_path)), "--window", "24", "--stride", "12", "--batch-size", "4"]
    words = ["eval", str(tiny_mixtral), f"{run}:uniform-2", "--out", str(tmp_path / "found.json"), *more]
    shown = CliRunner().invoke(app, words, catch_exceptions=False)
    found = json.loads((tmp_path / "found.json").read_text("utf-8"))["rows"][1]["divergence"]
    true = next(row for row in compared["rows"] if row["name"] == "made:uniform-2")["divergence"]
    assert (found["kept"], true["kept"]) == (reference_logits.LEAST_KEPT, None)
    assert found["kl"] < true["kl"] < found["kl_most"]
    for name, value in true["kl_percentiles"].items():
        assert found["kl_percentiles"][name] < value < found["kl_percentiles_most"][name]
    for name in ("same_top", "top5_overlap", "rms_change"):
        assert found[name] == pytest.approx(true[name], rel=1e-6)
    assert f"at most {found['kl_most']:.4g}: 256 logits of each token were kept" in " ".join(shown.output.split())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["found.json", "text.jsonl"]


def test_rows_by_context_have_a_divergence_too(compared: dict[str, Any]) -> None:
    found = {row["name"]: row["divergence"] for row in compared["rows"]}
    assert found["mixtral"] is None
    assert found["made K=1 2 code bits"]["kl"] == pytest.approx(
        found["made/checkpoint K=1 2 code bits"]["kl"], rel=1e-3
    )
    assert 0 < found["made K=1 2 code bits"]["kl"] < found["made:uniform-2"]["kl"]


def windows(compared: dict[str, Any]) -> list[Any]:
    return list(compared["rows"][0]["perplexity"]["items"]["tokens"])


def test_a_run_by_context_and_its_checkpoint_agree(compared: dict[str, Any]) -> None:
    found = values(compared)
    for options in ("K=1 2 code bits", "K=1 2 code bits no selector"):
        assert found[f"made {options}"] == pytest.approx(found[f"made/checkpoint {options}"], rel=1e-4)
    assert found["made K=1 2 code bits"]["perplexity"] != pytest.approx(
        found["made K=1 2 code bits no selector"]["perplexity"]
    )


def test_a_run_and_its_checkpoint_agree(compared: dict[str, Any]) -> None:
    found = values(compared)
    assert found["made:run"] == pytest.approx(found["made/checkpoint"], rel=1e-3)
    assert found["made:uniform-2"]["perplexity"] != pytest.approx(found["made:run"]["perplexity"], rel=1e-3)


def test_results_are_in_lm_evals_own_form(compared: dict[str, Any]) -> None:
    results = compared["rows"][0]["lm_eval"]
    assert {"results", "configs", "versions", "n-shot", "higher_is_better", "n-samples", "samples"} <= set(results)
    assert str(Path.cwd()) not in json.dumps(results["configs"]["made_choice"]["metadata"])
    assert results["configs"]["made_choice"]["metadata"]["config_source"] == "choice.yaml"
    assert results["n-shot"] == dict.fromkeys(TASKS.split(","), 0)
    assert len(results["samples"]["made_choice"]) == 5
    rolling = next(row for row in compared["rows"] if row["name"] == "made K=1 2 code bits")["perplexity"]
    assert "of which the first half is the prefill" in rolling["counted"]
    assert (rolling["window"], rolling["stride"]) == (24, 12)
    of_context = next(row for row in compared["rows"] if row["name"] == "made K=1 2 code bits")["lm_eval"]["config"]
    assert "first half of a text's first window is the prefill" in of_context["rolling"]
    assert of_context["context_aware"]["code_bits"] == "2"
    assert of_context["context_aware"]["statistics"] == "context"


def test_earlier_rows_by_context_say_what_they_counted(compared: dict[str, Any], tmp_path: Path) -> None:
    """Before it was an option the last token of a context was left out."""
    earlier = json.loads(Path(compared["out"]).read_text("utf-8"))
    for row in earlier["rows"]:
        row["of"].get("context_aware", {}).pop("statistics", None)
    document.write(tmp_path / "earlier.json", earlier)
    names = {row["name"] for row in document.read_rows(tmp_path / "earlier.json")}
    assert {"mixtral", "made K=1 2 code bits last token not counted"} <= names
    assert "made K=1 2 code bits" not in names


def test_earlier_results_are_compared_with_new_ones(compared: dict[str, Any], run: Path, tasks: Path) -> None:
    more = {"tasks": TASKS, "include_path": tasks, "text": str(text_of(tasks)), "window": 24, "stride": 12}
    saved = run / "assign" / "saved.json"
    saved.write_text((run / "assign" / "assignment.json").read_text("utf-8").replace('"name": "run"', '"name": "mine"'))
    random.seed(5)
    drawn, of_tensors = random.getstate(), torch.get_rng_state()
    found = compare(asked([compared["out"], saved], **more))
    assert random.getstate() == drawn, "lm-eval sets seeds of its own"
    assert torch.equal(torch.get_rng_state(), of_tensors)
    assert len(found["table"]) == len(compared["table"]) + 1
    assert found["rows"][-1]["not_compared"] == "of earlier results no logits are kept"
    assert values(found)["made:run"]["KL"] == values(compared)["made:run"]["KL"], "to the first row as before"
    assert "KL" not in values(found)["made:mine"]
    assert found["table"][-1]["name"] == "made:mine"
    before = {name: value for name, value in values(compared)["made:run"].items() if name in values(found)["made:mine"]}
    assert values(found)["made:mine"] == pytest.approx(before, rel=1e-6)
    with pytest.raises(EvaluationError, match="made of other items"):
        compare(asked([compared["out"], saved], **(more | {"stride": 6})))


def test_the_command_prints_measures_and_differences(compared: dict[str, Any]) -> None:
    shown = CliRunner().invoke(app, ["eval", compared["out"]], catch_exceptions=False, env={"COLUMNS": "120"})
    assert shown.exit_code == 0, shown.output
    assert "p: two-sided, after Holm over the rows of a measure" in " ".join(shown.output.split())
    assert "made K=1 2 code bits no selector" in shown.output
    assert "KL, nats a token" in shown.output
    narrow = CliRunner().invoke(app, ["eval", compared["out"]], catch_exceptions=False, env={"COLUMNS": "80"})
    assert all(len(line.rstrip()) <= 80 for line in narrow.output.splitlines())
    assert f"{values(compared)['made:uniform-2']['KL']:.3g}" in narrow.output, "no figure is broken"
    found = json.loads(CliRunner().invoke(app, ["eval", compared["out"], "--json"]).stdout)
    assert found["table"] == compared["table"]
    assert all("samples" not in row["lm_eval"] for row in found["rows"])
    inspected = json.loads(CliRunner().invoke(app, ["inspect", compared["out"], "--json"]).stdout)
    assert inspected["rows"][0] == {"name": "mixtral"} | values(compared)["mixtral"]
    wrong = CliRunner().invoke(app, ["eval", compared["out"], "--num-fewshot", "-1"]).exception
    assert isinstance(wrong, RecipeError)


def test_only_experts_that_differ_are_written(run: Path) -> None:
    subjects = [one for one in open_subjects([f"{run}:*"], [], False) if isinstance(one, Subject)]
    settings = loaded.Settings(device="cpu")
    model = loaded.load(subjects[0], settings)
    own, uniform = subjects[1].assignment, subjects[2].assignment
    written = []
    for subject in (*subjects, subjects[0]):
        loaded.lm_of(model, subject, settings)
        written.append(model.swapped.written)
    pairs = list(zip(*(chain.from_iterable(one.expert_widths()) for one in (own, uniform)), strict=True))
    steps = [later - before for before, later in pairwise(written)]
    assert steps[0] == sum(one != 16 for one, _ in pairs)
    assert steps[1] == sum(one != other for one, other in pairs)
    assert steps[2] == len(pairs)
    fresh = loaded.load(subjects[0], settings).model
    assert all(torch.equal(one, other) for one, other in zip(model.model.parameters(), fresh.parameters(), strict=True))


def test_lm_evals_command_line_knows_moeq(
    run: Path, tasks: Path, compared: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lm_eval.__main__ import cli_evaluate

    register()
    arguments = f"pretrained={run},gpu_experts=1,code_bits=2,alpha=0.5,selector=true"
    line = f"lm-eval --model moeq --model_args {arguments} --tasks made_choice --include_path {tasks} --batch_size 3"
    monkeypatch.setattr("sys.argv", [*line.split(), "--output_path", str(tmp_path)])
    monkeypatch.setattr("lm_eval.tasks.TaskManager.__init__", _without_defaults())
    cli_evaluate()
    written = next(tmp_path.rglob("results*.json"))
    found = json.loads(written.read_text("utf-8"))["results"]["made_choice"]["acc,none"]
    assert found == values(compared)["made K=1 2 code bits"]["made_choice"]


def _without_defaults() -> Any:
    """lm-eval's own fourteen thousand tasks take seconds to index."""
    from lm_eval.tasks import TaskManager

    before = TaskManager.__init__

    def init(self: Any, *arguments: Any, **given: Any) -> None:
        before(self, *arguments, **(given | {"include_defaults": False}))

    return init


def test_a_static_checkpoint_runs_as_moeq_and_through_the_hook(
    run: Path, tasks: Path, compared: dict[str, Any], modules_apart: Path
) -> None:
    from lm_eval.api.registry import get_model

    manager = open_tasks(["made_choice"], str(tasks))
    checkpoint = str(run / "checkpoint")
    plain = get_model("hf").create_from_arg_string(
        f"pretrained={checkpoint},trust_remote_code=True", {"batch_size": 2, "device": "cpu"}
    )
    for lm in (make_model(pretrained=checkpoint, device="cpu"), plain):
        found = evaluate_tasks(lm, ["made_choice"], manager)["results"]["made_choice"]["acc,none"]
        assert found == values(compared)["made/checkpoint"]["made_choice"]


def test_the_stage_takes_shots_and_auto_and_keeps_samples(run: Path, tasks: Path) -> None:
    more = ("--tasks", "made_choice", "--include-path", str(tasks), "--batch-size", "auto", "--num-fewshot", "0")
    sets = ("--set", "eval.perplexity={sequences: 4, sequence_length: 16}")
    result = CliRunner().invoke(app, ["eval", "--out", str(run), *more, *sets, "--json"], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    report = evaluate.read_eval(run / "eval" / evaluate.NAME)
    assert [row.name for row in report.rows] == ["original", "run", "uniform-2"]
    assert set(report.rows[2].changes) == {"made_choice", "perplexity"}
    change = report.rows[2].changes["perplexity"]
    assert change.difference == pytest.approx(report.rows[2].perplexity - report.rows[0].perplexity)
    rows = document.read_rows(run / "eval" / evaluate.SAMPLES)
    assert len(rows[1]["lm_eval"]["samples"]["made_choice"]) == 5


WRONG = {
    "gpu_experts=6": ("gpu_experts is 6, a layer has 5 experts", EvaluationError),
    "gpu_experts=1": ("4 experts a layer have no width", EvaluationError),
    "gpus=1": ("unknown option 'gpus'", RecipeError),
}


@pytest.mark.parametrize("text", list(WRONG))
def test_wrong_options_are_one_line(run: Path, text: str) -> None:
    message, kind = WRONG[text]
    with pytest.raises(kind, match=message) as caught:
        compare(asked([run], context_aware=[text]))
    assert "\n" not in str(caught.value)


def test_what_cannot_be_compared_is_one_line(run: Path, tiny_mixtral: Path, tmp_path: Path) -> None:
    (tmp_path / "odd.json").write_text("{}")
    family_models.save("openai_privacy_filter", tmp_path / "filter")
    (tmp_path / "begun").mkdir()
    (tmp_path / "begun" / "recipe.yaml").write_bytes((run / "recipe.yaml").read_bytes())
    for words, more, message in (
        (
            [tiny_mixtral, tmp_path / "filter"],
            {"text": "bundled"},
            "filter: OpenAIPrivacyFilterForTokenClassification co",
        ),
        ([f"{run}:uniform-3"], {}, "no assignment 'uniform-3'; did you mean 'uniform-2'"),
        ([run, run], {}, "is there twice"),
        ([tmp_path / "begun"], {"text": "bundled"}, "begun/assign: this stage has not been run; run `moeq assign`"),
        ([tmp_path / "odd.json"], {}, "not a result of `moeq eval --out`"),
        ([tiny_mixtral], {"context_aware": ["gpu_experts=5"]}, "--context-aware needs a run"),
        ([tiny_mixtral], {"window": 600}, "a window of 600 tokens is longer than the model's 128 positions"),
        ([tiny_mixtral], {"limit": 2}, "--limit without --tasks"),
        ([tiny_mixtral], {"tasks": "made_choice", "stride": 2}, "--stride without --text"),
        ([tiny_mixtral], {"tasks": "made_choice", "limit": 0}, "--limit 0; give a whole number from 1"),
        ([tiny_mixtral], {"tasks": "made_choice", "limit": 0.5}, "--limit 0.5; give a whole number from 1"),
        ([tiny_mixtral], {"tasks": "made_choice", "num_fewshot": -1}, "--num-fewshot -1; give a whole number from 0"),
        ([tiny_mixtral], {"batch_size": "many"}, "give a number from 1 to 999999999, or auto"),
        ([tiny_mixtral], {"out": tmp_path}, "is no file that can be written"),
    ):
        with pytest.raises(MoeqError, match=message.replace("(", r"\(")) as caught:
            compare(asked(words, **more))
        assert "\n" not in str(caught.value)
    with pytest.raises(RecipeError, match="--stride belongs to models"):
        needs_a_run(asked([], stride=4))
    with pytest.raises(RecipeError, match="--dtype belongs to models"):
        needs_a_run(asked([], dtype="float16"))
    for wrong, message in (
        ({"pretrained": f"{run}:*"}, "no single model"),
        ({"batch_size": "auto:4"}, "auto:4"),
        ({"dtype": "foo"}, "dtype=foo"),
        ({"max_length": "x"}, "max_length x"),
    ):
        with pytest.raises(MoeqError, match=message):
            make_model(**({"pretrained": str(run)} | wrong))
    with pytest.raises(RecipeError, match="--set belongs to a run's stage"):
        needs_a_run(asked([run], set_=["eval.limit=1"]))


RESULTS = '{"kind": "moeq evaluation", "schema_version": 1'
BROKEN = (
    "[]",
    RESULTS + "}",
    RESULTS.replace("1", "2") + "}",
    RESULTS + ', "rows": []}',
    RESULTS + ', "rows": [{"name": "a", "perplexity": {"perplexity": 1}}]}',
    RESULTS + ', "rows": [{"name": "a", "lm_eval": {"results": {"t": []}}}]}',
)


@pytest.mark.parametrize("content", BROKEN)
def test_results_that_are_damaged_are_one_line(tmp_path: Path, content: str) -> None:
    path = tmp_path / "found.json"
    path.write_text(content)
    with pytest.raises(MoeqError, match="not a result of `moeq eval --out`") as caught:
        compare(asked([path]))
    assert "\n" not in str(caught.value)


def test_a_run_of_a_model_that_was_changed_is_refused(run: Path, tiny_mixtral: Path, tmp_path: Path) -> None:
    """Its replicas in another model's layers are nothing that anybody made."""
    model = shutil.copytree(tiny_mixtral, tmp_path / "model")
    copy = shutil.copytree(run, tmp_path / "run")
    recipe = (copy / "recipe.yaml").read_text("utf-8")
    (copy / "recipe.yaml").write_text(recipe.replace(str(tiny_mixtral.resolve()), str(model)), "utf-8")
    weights = next(model.glob("*.safetensors"))
    data = bytearray(weights.read_bytes())
    data[-2] ^= 1
    weights.write_bytes(data)
    for word in (copy, f"{copy}:original", copy / "assign" / "assignment.json"):
        with pytest.raises(ArtifactError, match=r"run: the run in it was made from another model.*; put back what it"):
            compare(asked([word]))


def test_trained_codes_of_another_assignment_than_lies_there_are_refused(run: Path, tmp_path: Path) -> None:
    """Some of an assignment's experts would be as they were trained beside others, at widths of another one."""
    copy = shutil.copytree(run, tmp_path / "run")
    recipe = yaml.safe_load((copy / "recipe.yaml").read_text("utf-8"))
    recipe["quantize"]["refine"] = {"iterations": 1}
    (copy / "recipe.yaml").write_text(yaml.safe_dump(recipe), "utf-8")
    assignment = copy / "assign" / "assignment.json"
    assert len(open_subjects([str(copy)], [], trust=False)) == 1
    assignment.write_text(assignment.read_text("utf-8") + "\n", "utf-8")
    with pytest.raises(ArtifactError, match="quantize: made of another assign/ than lies there now; run `moeq quant"):
        open_subjects([str(copy)], [], trust=False)
    assert len(open_subjects([str(assignment)], [], trust=False)) == 1


def test_a_checkpoint_without_replicas_says_so(run: Path, tmp_path: Path) -> None:
    copy = tmp_path / "checkpoint"
    shutil.copytree(run / "checkpoint", copy)
    manifest = json.loads((copy / "placement.json").read_text("utf-8"))
    for layer in manifest["layers"]:
        for expert in layer["experts"]:
            expert["replicas"] = [one for one in expert["replicas"] if one["placed"]]
    (copy / "placement.json").write_text(json.dumps(manifest))
    (copy / "SHA256SUMS").unlink()
    with pytest.raises(EvaluationError, match="holds no replicas of every expert at 1, 2, 3, 4, 16 bits"):
        compare(asked([copy], context_aware=["gpu_experts=1,code_bits=2"]))
    assert load_checkpoint(copy, torch.float32, torch.device("cpu")) is not None


def test_data_that_would_be_looked_for_everywhere_are_refused(
    tiny_mixtral: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(task_files, "SEARCHED", 3)
    for name in ("a", "b", "c", "d"):
        (tmp_path / name).touch()
    (tmp_path / "all.yaml").write_text(f"task: everywhere\ndataset_path: {tmp_path}/**/nowhere.jsonl\n")
    with pytest.raises(EvaluationError, match=r"\*\* would look through more than 3 files and folders"):
        compare(asked([tiny_mixtral], tasks="everywhere", include_path=tmp_path))


def test_unknown_tasks_name_the_nearest_and_missing_data_its_name(
    tasks: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lm_eval.tasks.TaskManager.__init__", _without_defaults())
    with pytest.raises(EvaluationError, match="no lm-eval task 'made_chois'; did you mean 'made_choice'"):
        open_tasks(["made_chois"], str(tasks))
    with pytest.raises(
        EvaluationError, match="give the `task:` that the file names, and its folder with --include-path"
    ):
        open_tasks([str(tasks / "choice.yaml")], None)
    (tmp_path / "away.yaml").write_text(
        "task: away\ndataset_path: nobody/nothing\noutput_type: multiple_choice\nvalidation_split: validation\n"
        "doc_to_text: q\ndoc_to_choice: [a, b]\ndoc_to_target: gold\nmetric_list: [{metric: acc}]\n"
    )
    with pytest.raises(
        EvaluationError, match=r"away: needs the data set nobody/nothing of the hub.*--include-path"
    ) as caught:
        open_tasks(["away"], str(tmp_path))
    assert "\n" not in str(caught.value)


def test_what_transformers_does_not_load_is_refused_before_anything_is_measured(
    tiny_mixtral: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was refused when its turn came, and what was measured before was lost."""
    config = json.loads((tiny_mixtral / "config.json").read_text("utf-8"))
    packed = tmp_path / "packed"
    packed.mkdir()
    declared = {"quant_method": "compressed-tensors", "format": "pack-quantized"}
    (packed / "config.json").write_text(json.dumps(config | {"quantization_config": declared}), "utf-8")
    save_file({"model.layers.0.mlp.experts.0.gate_proj.weight_packed": torch.zeros(1)}, packed / "model.safetensors")
    monkeypatch.setattr(loaded, "load", lambda *_, **__: pytest.fail("a model was loaded"))
    with pytest.raises(ModelError, match="its experts are packed one by one"):
        compare(asked([tiny_mixtral, packed]))
