"""Tasks with images on a tiny Qwen3-VL-MoE: original, dequantized in place and packed; bad input in one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_vision import save_image, vision_model, vision_processor

from moeq import pipeline
from moeq.errors import CorpusError, EvaluationError, MoeqError
from moeq.evaluation.harness import open_tasks, run_tasks
from moeq.evaluation.multimodal import check_images, image_tasks
from moeq.models import corpus
from moeq.progress import Reporter
from moeq.recipe import load_recipe
from moeq.stages import evaluate
from moeq.stages.context import Context

CHOICES = ["red", "a green one", "blue"]
COLOURS = [(40, 24), (24, 40), (32, 32), (40, 40), (24, 24)]


@pytest.fixture(scope="module")
def processor() -> Any:
    return vision_processor()


@pytest.fixture(scope="module")
def model() -> Any:
    return vision_model()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three tasks on five images of five sizes: choices, an answer to be written, and choices of text alone."""
    folder = tmp_path_factory.mktemp("tasks")
    rows = []
    for number, size in enumerate(COLOURS):
        image = save_image(folder / f"{number}.png", number, size)
        question = "What colour is this?" + " Look again." * (number % 2)
        rows.append({"image": str(image), "question": question, "choices": CHOICES, "gold": number % 3})
    write_tasks(folder, rows)
    return folder


def write_tasks(folder: Path, rows: list[dict[str, Any]], image: str = "doc_to_image: image\n") -> None:
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = (
        f"dataset_path: json\nvalidation_split: validation\ndataset_kwargs: {{data_files: {{validation: "
        f"{folder / 'rows.jsonl'}}}}}\n"
    )
    asked = image + 'doc_to_text: "<image>{{question}} Answer:"\n'
    choose = "output_type: multiple_choice\ndoc_to_choice: choices\ndoc_to_target: gold\n"
    accuracy = "metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]\n"
    (folder / "seen.yaml").write_text(f"task: seen\n{data}{asked}{choose}{accuracy}")
    (folder / "read.yaml").write_text(f'task: read\n{data}doc_to_text: "{{{{question}}}} Answer:"\n{choose}{accuracy}')
    (folder / "said.yaml").write_text(
        f"task: said\n{data}{asked}output_type: generate_until\ndoc_to_target: '{{{{choices[gold]}}}}'\n"
        "generation_kwargs: {max_gen_toks: 4, do_sample: false, until: []}\n"
        "metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]\n"
    )


def plain_score(model: Any, processor: Any, image: Path, question: str, choice: str) -> float:
    """Log-likelihood of a choice after an image and a question, written out."""
    from PIL import Image

    prompt = f"<|image_pad|>{question} Answer:"
    with Image.open(image) as opened:
        pixels = opened.convert("RGB")
    inputs = processor(text=[f"{prompt} {choice}"], images=[pixels], return_tensors="pt")
    given = processor(text=[prompt], images=[pixels], return_tensors="pt")["input_ids"].shape[1]
    ids = inputs["input_ids"][0]
    with torch.no_grad():
        logprobs = model(**inputs).logits[0].log_softmax(-1)
    return sum(float(logprobs[place - 1, ids[place]]) for place in range(given, len(ids)))


def test_choices_are_scored_as_the_model_sees_them(model: Any, processor: Any, folder: Path) -> None:
    manager = open_tasks(["seen"], str(folder))
    found = run_tasks(
        model, processor.tokenizer, ["seen"], manager, batch_size=2, limit=None, processor=processor
    )
    right = 0
    for number in range(len(COLOURS)):
        question = "What colour is this?" + " Look again." * (number % 2)
        scores = [plain_score(model, processor, folder / f"{number}.png", question, choice) for choice in CHOICES]
        right += scores.index(max(scores)) == number % 3
    assert found["seen"]["acc"] == right / len(COLOURS)
