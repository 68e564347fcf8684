"""A run of a tiny random model with every replica, made once for the tests of this room."""

from __future__ import annotations

from pathlib import Path

import pytest

from moeq import pipeline
from moeq.progress import Reporter
from moeq.recipe import load_recipe
from moeq.stages.context import Context

SMALL = (
    "corpus.sequences=8", "corpus.sequence_length=32", "losses.group_size=16", "losses.bits=[1,2,3,4]",
    "losses.methods=[gptq]", "losses.per_projection=false", "quantize.replicas=all", "export.verify=false",
    "assign={method: prefix-split, code_bits: 5/2, gpu_experts: 1}",
    "eval.compare=[{name: uniform-2, method: uniform, bits: 2}]",
)  # fmt: skip


@pytest.fixture(scope="session")
def run(tiny_mixtral: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("compared") / "made"
    recipe = load_recipe(None, SMALL)
    context = Context(recipe=recipe, model_name=str(tiny_mixtral), out=out, reporter=Reporter(quiet=True))
    pipeline.run(context, ("profile", "losses", "assign", "quantize", "export"))
    return out


@pytest.fixture(scope="session")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a task of each kind: four-way questions, whole texts, generation."""
    import json

    folder = tmp_path_factory.mktemp("tasks")
    words = ["cat", "dog", "lamp", "rain", "green", "walks"]
    line = lambda n, size: " ".join(words[(n * k + k) % 6] for k in range(1, size))  # noqa: E731
    rows = [
        {
            "q": line(n, 6 + 3 * n),
            "choices": [" cat", " dog", " a lamp"],
            "gold": n % 3,
            "text": line(n, 40),
            "a": "cat",
        }
        for n in range(5)
    ]
    (folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    common = (
        f"dataset_path: json\nvalidation_split: validation\nnum_fewshot: 0\n"
        f"dataset_kwargs: {{data_files: {{validation: {folder / 'data.jsonl'}}}}}\n"
    )
    (folder / "choice.yaml").write_text(
        f"task: made_choice\n{common}output_type: multiple_choice\ndoc_to_text: q\ndoc_to_choice: choices\n"
        "doc_to_target: gold\nmetric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]\n"
    )
    (folder / "text.yaml").write_text(
        f'task: made_text\n{common}output_type: loglikelihood_rolling\ndoc_to_text: ""\ndoc_to_target: text\n'
        "metric_list: [{metric: word_perplexity}, {metric: bits_per_byte}]\n"
    )
    (folder / "generate.yaml").write_text(
        f"task: made_generate\n{common}output_type: generate_until\ndoc_to_text: q\ndoc_to_target: a\n"
        'generation_kwargs: {until: ["."], max_gen_toks: 4}\n'
        "metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]\n"
    )
    return folder
