"""Groups of tasks stand for their members, examples are given task by task, and items may be turns of a chat."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from guesses import GuessingLM

from moeq.errors import RecipeError
from moeq.evaluation.comparison import table
from moeq.evaluation.harness import evaluate_tasks, headline, open_tasks, task_scores
from moeq.recipe import load_recipe


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A group of two tasks of 4 and 8 items, and a task of its own that allows no examples."""
    for name, count in (("big", 8), ("small", 4), ("alone", 4)):
        rows = [{"q": f"{name} {n}", "choices": ["yes", "no"], "gold": n % 2} for n in range(count)]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        (tmp_path / f"{name}.yaml").write_text(
            f"task: {name}\ndataset_path: json\noutput_type: multiple_choice\nvalidation_split: validation\n"
            f"fewshot_split: validation\n"
            f"dataset_kwargs: {{data_files: {{validation: {tmp_path / name}.jsonl}}}}\n"
            "doc_to_text: q\ndoc_to_choice: choices\ndoc_to_target: gold\n"
            "metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]\n"
            + ("num_fewshot: 0\n" if name == "alone" else "")
        )
    (tmp_path / "both.yaml").write_text(
        "group: both\ntask: [big, small]\naggregate_metric_list: [{metric: acc, weight_by_size: true}]\n"
    )
    return tmp_path


class Asked(GuessingLM):  # type: ignore[misc]
    """Keeps what it was asked; as sure of "yes" as its seed says."""

    def __init__(self, sure: float = 0.5) -> None:
        super().__init__()
        self.contexts: list[str] = []
        self.sure = sure

    def loglikelihood(self, requests: list[Any]) -> list[tuple[float, bool]]:
        self.contexts += [request.args[0] for request in requests]
        return [(float(self._random.random() < self.sure), False) for _ in requests]


def test_a_group_stands_for_its_members(folder: Path) -> None:
    manager = open_tasks(["both", "alone"], str(folder))
    rows = [
        {"name": name, "lm_eval": evaluate_tasks(Asked(sure), ["both", "alone"], manager)}
        for name, sure in (("a", 0.2), ("b", 0.8))
    ]
    found: dict[str, Any] = rows[1]["lm_eval"]  # type: ignore[assignment]
    scores = task_scores(found)
    assert set(scores) == {"both", "alone"}
    big, small = (found["results"][name]["acc,none"] for name in ("big", "small"))
    assert scores["both"]["acc"] == pytest.approx((8 * big + 4 * small) / 12)
    assert headline(scores)[0] == pytest.approx((scores["both"]["acc"] + scores["alone"]["acc"]) / 2)
    first, second = table(rows)
    assert set(second["cells"]) == {"average", "both", "alone"}
    change = second["cells"]["both"].change
    assert change.items == 12
    assert change.difference == pytest.approx(second["cells"]["both"].value - first["cells"]["both"].value)


def test_examples_are_given_task_by_task(folder: Path) -> None:
    names = ["both", "alone"]
    manager = open_tasks(names, str(folder))

    def examples(number: int | dict[str, int] | None) -> dict[str, int]:
        lm = Asked()
        evaluate_tasks(lm, names, manager, num_fewshot=number)
        return {name: max(one.count(name) for one in lm.contexts) - 1 for name in ("big", "small", "alone")}

    assert examples({"both": 2}) == {"big": 2, "small": 2, "alone": 0}
    assert examples({"alone": 2}) == {"big": 0, "small": 0, "alone": 0}, "it allows none"
    assert examples(1) == {"big": 1, "small": 1, "alone": 0}
    assert evaluate_tasks(GuessingLM(), names, manager, num_fewshot={"both": 3})["n-shot"]["big"] == 3


def test_items_may_be_turns_of_a_chat(folder: Path) -> None:
    class Chatting(Asked):
        def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
            return "".join(f"<{turn['role']}>{turn['content']}" for turn in chat_history)

    lm = Chatting()
    evaluate_tasks(lm, ["small"], open_tasks(["small"], str(folder)), chat_template=True)
    assert lm.contexts[0] == "<user>small 0"


def test_examples_of_a_task_that_is_not_asked() -> None:
    with pytest.raises(RecipeError, match="num_fewshot: mmlu is not among tasks"):
        load_recipe(None, ["eval.tasks=[piqa]", "eval.num_fewshot={mmlu: 5}"])
    assert load_recipe(None, ["eval.tasks=[mmlu]", "eval.num_fewshot={mmlu: 5}"]).eval.num_fewshot == {"mmlu": 5}
