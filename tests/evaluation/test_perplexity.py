"""Perplexity against a plain computation, pads left out; lm-eval on a local task YAML."""

import json
import math
from pathlib import Path

import pytest
import torch
from counted_bars import Bars

from moeq.errors import EvaluationError
from moeq.evaluation.harness import evaluate_tasks, headline, open_tasks, task_scores
from moeq.evaluation.harness_models import StaticLM
from moeq.evaluation.perplexity import perplexity
from moeq.models import loading
from moeq.models.corpus import Sequences
from moeq.models.source import open_source

CPU = torch.device("cpu")


def test_perplexity_is_token_weighted_and_ignores_pads(tiny_mixtral: Path) -> None:
    model = loading.load_model(open_source(str(tiny_mixtral)), torch.float32, CPU)
    ids = torch.randint(3, 2048, (3, 12), generator=torch.Generator().manual_seed(0))
    lengths = [12, 7, 3]
    mask = torch.arange(12) < torch.tensor(lengths)[:, None]
    rows = Sequences(ids=ids, mask=mask, domains=("a", "b", "b"))
    found = perplexity(model, rows, 2, CPU, lambda: None)
    sums = []
    for row, length in enumerate(lengths):
        with torch.no_grad():
            logits = model(input_ids=ids[row : row + 1, :length]).logits[0]
        sums.append(-sum(float(logits[i].log_softmax(-1)[ids[row, i + 1]]) for i in range(length - 1)))
    assert found["tokens"] == 11 + 6 + 2
    assert found["perplexity"] == pytest.approx(math.exp(sum(sums) / 19), rel=1e-4)
    assert found["by_domain"]["b"] == pytest.approx(math.exp((sums[1] + sums[2]) / 8), rel=1e-4)


def write_task(folder: Path) -> None:
    rows = [{"q": f"question {n}", "choices": ["yes", "no", "maybe"], "gold": n % 3} for n in range(6)]
    (folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "own.yaml").write_text(
        "task: own_task\ndataset_path: json\noutput_type: multiple_choice\nvalidation_split: validation\n"
        f"dataset_kwargs: {{data_files: {{validation: {folder / 'data.jsonl'}}}}}\n"
        "doc_to_text: q\ndoc_to_choice: choices\ndoc_to_target: gold\n"
        "metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]\n"
    )


def test_a_local_task_runs(tiny_mixtral: Path, tmp_path: Path) -> None:
    write_task(tmp_path)
    source = open_source(str(tiny_mixtral))
    model, tokenizer = loading.load_model(source, torch.float32, CPU), loading.load_tokenizer(source)
    manager = open_tasks(["own_task"], str(tmp_path))
    lm, bars = StaticLM(model, tokenizer, batch_size=4), Bars()
    found = evaluate_tasks(lm, ["own_task"], manager, bar=bars)
    scores = task_scores(found)
    assert bars.found == {"loglikelihood": (18, 18)}, "what there is to answer is counted"
    assert evaluate_tasks(lm, ["own_task"], manager) == found, "without one, too, on the same model"
    assert scores["own_task"]["acc"] in {n / 6 for n in range(7)}
    mean, error = headline(scores)
    assert mean == scores["own_task"]["acc"]
    assert error == scores["own_task"]["acc_stderr"]


def test_a_task_whose_data_is_missing_is_one_line(tmp_path: Path) -> None:
    write_task(tmp_path)
    (tmp_path / "data.jsonl").unlink()
    with pytest.raises(EvaluationError, match="own_task: lm-eval failed") as caught:
        open_tasks(["own_task"], str(tmp_path))
    assert "\n" not in str(caught.value)


def test_headline_is_the_mean_over_tasks_that_have_an_accuracy() -> None:
    scores = {"a": {"acc": 0.5, "acc_stderr": 0.03}, "b": {"acc_norm": 0.7, "acc_norm_stderr": 0.04}, "c": {"f1": 1.0}}
    mean, error = headline(scores)
    assert mean == pytest.approx(0.6)
    assert error == pytest.approx(0.025)
    assert headline({"c": {"f1": 1.0}}) == (None, None)
