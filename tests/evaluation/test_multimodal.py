"""Tasks with images on a tiny Qwen3-VL-MoE: original, dequantized in place and packed; bad input in one line."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from counted_bars import Bars
from tiny_vision import save_image, vision_model, vision_processor

from moeq import pipeline
from moeq.comparison.eval_options import EvalOptions
from moeq.comparison.side_by_side import compare
from moeq.errors import EvaluationError, MoeqError
from moeq.evaluation.comparison import table
from moeq.evaluation.harness import evaluate_tasks, open_tasks, task_scores
from moeq.evaluation.multimodal import VisionLM, check_images, image_tasks, static_lm
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


def run_tasks(
    model: Any, processor: Any, names: list[str], manager: Any, batch_size: int
) -> dict[str, dict[str, float]]:
    lm, bars = static_lm(model, None, processor, batch_size=batch_size), Bars()
    scores = task_scores(evaluate_tasks(lm, names, manager, bar=bars))
    assert all(total == counted > 0 for total, counted in bars.found.values())
    assert ("generate_until" in bars.found) == ("said" in names)
    return scores


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
    found = run_tasks(model, processor, ["seen"], manager, 2)
    right = 0
    for number in range(len(COLOURS)):
        question = "What colour is this?" + " Look again." * (number % 2)
        scores = [plain_score(model, processor, folder / f"{number}.png", question, choice) for choice in CHOICES]
        right += scores.index(max(scores)) == number % 3
    assert found["seen"]["acc"] == right / len(COLOURS)


def test_answers_do_not_depend_on_batches_or_what_else_is_asked(model: Any, processor: Any, folder: Path) -> None:
    """Text and images, choices and generation, in one call: as each alone, whatever the batch size."""
    names = ["seen", "read", "said"]
    manager = open_tasks(names, str(folder))

    def scores(some: list[str], batch_size: int) -> dict[str, dict[str, float]]:
        return run_tasks(model, processor, some, manager, batch_size)

    together = scores(names, 4)
    assert together["seen"] == scores(["seen"], 1)["seen"]
    assert together["said"] == scores(["said"], 2)["said"]
    text = static_lm(model, processor.tokenizer, None, batch_size=2)
    plain = task_scores(evaluate_tasks(text, ["read"], manager, limit=10**30))  # more than Python counts
    assert plain["read"] == together["read"]


def test_images_inside_of_a_dataset(model: Any, processor: Any, folder: Path, tmp_path: Path) -> None:
    """As on the hub: the same answers as with files, and the same results every time, so that models can be paired."""
    from datasets import Dataset, Image

    rows = [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()]
    Dataset.from_list(rows).cast_column("image", Image()).to_parquet(tmp_path / "rows.parquet")
    write_tasks(tmp_path, rows)
    text = (tmp_path / "seen.yaml").read_text().replace("dataset_path: json", "dataset_path: parquet")
    (tmp_path / "seen.yaml").write_text(text.replace("rows.jsonl", "rows.parquet"))

    def results(where: Path) -> dict[str, Any]:
        manager = open_tasks(["seen"], str(where))
        check_images(image_tasks(manager, ["seen"], with_images=True), None)
        return evaluate_tasks(static_lm(model, None, processor, batch_size=2), ["seen"], manager)

    (tmp_path / "rows.jsonl").unlink()
    found, again = results(tmp_path), results(tmp_path)
    assert found == again
    assert found["results"] == results(folder)["results"]
    _, second = table([{"name": name, "lm_eval": one} for name, one in (("a", found), ("b", again))])
    assert second["cells"]["seen"].change.difference == 0


@pytest.mark.parametrize(
    "settings", [{}, {"return_dict_in_generate": True}, {"stop_strings": ["zzz"]}, {"max_new_tokens": 1}]
)
def test_generation_is_the_models_own(
    model: Any, processor: Any, folder: Path, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any]
) -> None:
    """Whatever its generation_config.json says of what comes back."""
    from lm_eval.api.instance import Instance
    from PIL import Image

    options = {"max_gen_toks": 5, "do_sample": False, "until": []}
    names = [str(folder / f"{number}.png") for number in (0, 1)]
    requests = [
        Instance("generate_until", {}, ("<image>Say: ", options, {"visual": names[:1]}), 0, ("t", 0, 1)),
        Instance("generate_until", {}, ("Say: ", options, {"visual": []}), 0, ("t", 1, 1)),
        Instance("generate_until", {}, ("<image> or <image>? Say: ", options, {"visual": names}), 0, ("t", 2, 1)),
    ]
    with monkeypatch.context() as patch:
        for name, value in settings.items():
            patch.setattr(model.generation_config, name, value)
        found = VisionLM(model, processor, batch_size=3).generate_until(requests)
    token = processor.image_token
    for answer, text, images in zip(
        found, (f"{token}Say: ", "Say: ", f"{token} or {token}? Say: "), (names[:1], [], names), strict=True
    ):
        pixels = [Image.open(name).convert("RGB") for name in images]
        inputs = processor(text=[text], images=[pixels] if pixels else None, return_tensors="pt")
        with torch.no_grad():
            whole = model.generate(**inputs, max_new_tokens=5, do_sample=False, pad_token_id=2)
        assert answer == processor.tokenizer.decode(whole[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory, model: Any, processor: Any) -> Path:
    folder = tmp_path_factory.mktemp("models") / "vision"
    model.save_pretrained(folder)
    processor.tokenizer.save_pretrained(folder)
    processor.image_processor.save_pretrained(folder)
    return folder


def context(model: Path, out: Path, *options: str) -> Context:
    common = ("corpus.sequences=12", "corpus.sequence_length=48", "losses.group_size=8", "losses.per_projection=false",
              "assign.code_bits=2",
              "eval.perplexity=null")  # fmt: skip
    recipe = load_recipe(None, [*common, *options])
    return Context(recipe=recipe, model_name=str(model), out=out, reporter=Reporter(quiet=True))


@pytest.fixture(scope="module")
def finished(saved: Path, processor: Any, folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Context:
    """The processor is given, since the family's own needs torchvision for videos."""
    one = context(
        saved, tmp_path_factory.mktemp("runs") / "run", "eval.tasks=[seen, read]", f"eval.include_path={folder}",
        "losses.bits=[1, 2, 3, 4]", "losses.methods=[rtn]", "export.verify=false",
        "quantize.replicas=all", "assign={method: uniform, bits: 1, quantizer: rtn}",
        "eval.compare=[{name: in-place, method: uniform, bits: 1, quantizer: rtn}]",
    )  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(corpus, "load_processor", lambda *_: processor)
        pipeline.run(one, ("profile", "losses", "assign", "quantize", "export", "eval"))
    return one


@pytest.mark.full
def test_a_run_measures_original_dequantized_and_packed(finished: Context, processor: Any, folder: Path) -> None:
    original, packed, in_place = evaluate.load(finished).rows
    assert (packed.exported, in_place.exported) == (True, False)
    assert packed.tasks == in_place.tasks
    assert set(original.tasks) == {"seen", "read"}
    assert original.tasks["seen"]["acc_stderr"] > 0
    manager = open_tasks(["seen"], str(folder))
    alone = run_tasks(finished.model.module, processor, ["seen"], manager, 2)
    assert alone["seen"] == original.tasks["seen"]


@pytest.mark.full
def test_models_and_checkpoints_side_by_side(
    finished: Context, saved: Path, processor: Any, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The original by its folder, the packed checkpoint and the run: the same numbers as in the run's own stage."""
    monkeypatch.setattr(corpus, "load_processor", lambda *_: processor)
    words = [str(saved), str(finished.out / "checkpoint"), str(finished.out)]
    found = compare(EvalOptions(recipe=words, tasks="seen,read", include_path=folder, quiet=True))
    original, packed, _ = evaluate.load(finished).rows
    values = [{name: row["cells"][name]["value"] for name in ("seen", "read")} for row in found["table"]]
    assert values == [{name: row.tasks[name]["acc"] for name in ("seen", "read")} for row in (original, packed, packed)]


@pytest.mark.full
def test_precision_follows_a_context_of_text_only(finished: Context, folder: Path) -> None:
    def asked(tasks: str) -> EvalOptions:
        options = ["gpu_experts=3,code_bits=2,selector=false", "gpu_experts=7"]
        words = [f"{finished.out}:original"]
        return EvalOptions(recipe=words, tasks=tasks, include_path=folder, context_aware=options, quiet=True)

    with pytest.raises(EvaluationError, match="task seen: has images, for which precision does not follow the context"):
        compare(asked("read,seen"))
    original, mixed, exact = compare(asked("read"))["rows"]
    scores = [[one["resps"] for one in row["lm_eval"]["samples"]["read"]] for row in (original, mixed, exact)]
    assert [len(one) for one in scores] == [5, 5, 5]
    flat = [[float(answer[0][0]) for item in one for answer in item] for one in scores]
    assert flat[2] == pytest.approx(flat[0], abs=1e-3), "all experts exact: the model itself"
    assert flat[1] != pytest.approx(flat[0], abs=1e-2), "two bits are not"


def test_a_task_with_images_on_a_model_of_text(tiny_mixtral: Path, folder: Path, tmp_path: Path) -> None:
    one = context(tiny_mixtral, tmp_path / "run", "eval.tasks=[seen]", f"eval.include_path={folder}")
    with pytest.raises(EvaluationError, match=r"task seen: has images, but the model takes text only .*; leave it out"):
        pipeline.run(one, ("profile", "losses", "assign", "quantize", "export", "eval"))
    assert not (tmp_path / "run" / "profile").exists(), "found before anything is made"


@pytest.mark.parametrize(
    ("image", "message"),
    [
        ("nowhere.png", r"task seen, item 1: no such image: nowhere\.png; give paths that are absolute"),
        ("{rows}", r"task seen, item 1: the image .*rows\.jsonl cannot be read"),
    ],
)
def test_images_that_are_missing_or_none(
    model: Any, processor: Any, folder: Path, tmp_path: Path, image: str, message: str
) -> None:
    given = [str(folder / "0.png"), image.format(rows=tmp_path / "rows.jsonl")]
    rows = [{"image": one, "question": "Which?", "choices": CHOICES, "gold": 0} for one in given]
    write_tasks(tmp_path, rows)
    manager = open_tasks(["seen"], str(tmp_path))
    with pytest.raises(MoeqError, match=message) as caught:  # noqa: PT012
        check_images(image_tasks(manager, ["seen"], with_images=True), None)
        run_tasks(model, processor, ["seen"], manager, 2)
    assert "\n" not in str(caught.value)


def test_a_limit_leaves_later_images_alone(folder: Path, tmp_path: Path) -> None:
    rows = [{"image": one, "question": "?", "choices": CHOICES, "gold": 0} for one in (str(folder / "0.png"), "none")]
    write_tasks(tmp_path, rows)
    tasks = image_tasks(open_tasks(["seen"], str(tmp_path)), ["seen"], with_images=True)
    check_images(tasks, 1)
    with pytest.raises(EvaluationError, match="item 1: no such image"):
        check_images(tasks, 2)


def test_items_without_images_do_not_end_the_search(folder: Path) -> None:
    first, absent = str(folder / "0.png"), str(folder / "none.png")
    items = [None, [], first, None, absent]
    tasks = {"seen": SimpleNamespace(eval_docs=items, doc_to_image=lambda item: item)}
    with pytest.raises(EvaluationError, match="task seen, item 4: no such image"):
        check_images(tasks, None)


def test_contexts_are_never_cut(model: Any, processor: Any, folder: Path, tmp_path: Path) -> None:
    rows = [{"image": str(folder / "0.png"), "question": "word " * 300, "choices": CHOICES, "gold": 0}]
    write_tasks(tmp_path, rows)
    for name in ("seen", "said"):
        manager = open_tasks([name], str(tmp_path))
        with pytest.raises(EvaluationError, match=r"a context of \d+ tokens with its images, the model has room for 2"):
            run_tasks(model, processor, [name], manager, 1)


def test_sound_is_refused(tmp_path: Path) -> None:
    write_tasks(tmp_path, [{"image": "a.png", "question": "?", "choices": CHOICES, "gold": 0}], "doc_to_audio: image\n")
    with pytest.raises(EvaluationError, match="task seen: has audio, which moeq does not evaluate"):
        image_tasks(open_tasks(["seen"], str(tmp_path)), ["seen"], with_images=True)
