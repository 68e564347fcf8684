"""What follows from sizes and the recipe is refused before a text is read, and `plan` refuses what a run refuses."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from moeq import pipeline
from moeq.errors import MoeqError
from moeq.models import corpus
from moeq.models.corpus import places
from moeq.planning.plan import make_plan
from moeq.progress import Reporter
from moeq.recipe import load_recipe
from moeq.stages.context import Context

SMALL = (
    "corpus.sequences=8", "corpus.sequence_length=32", "losses.group_size=16", "eval.perplexity.sequences=4",
    "eval.perplexity.sequence_length=32", "eval.compare=[]", "estimate.grid.inputs=[128]",
)  # fmt: skip
CHEAP = {
    "gpu experts": (["assign.gpu_experts=99"], "gpu_experts is 99, the layer has 5 experts"),
    "gpu experts of a target": (
        ["assign={method: optimal, bits_per_weight: 5.5, target: vllm-cuda, gpu_experts: 2}", "losses.symmetric=true"],
        "target vllm-cuda: gpu_experts is 2, which mixes 16 bits with others; it takes one width for all experts of a",
    ),
    "all on the GPU": (
        ["assign={method: optimal, gpu_experts: 5, target: transformers}", "losses.symmetric=true"],
        "target transformers: gpu_experts is 5, which leaves them in 16 bits; transformers loads 2, .*gpu_experts: 0",
    ),
    "all on the GPU, exported": (
        ["assign={method: optimal, gpu_experts: 5}", "export.formats=[transformers]", "losses.symmetric=true"],
        "export.formats: transformers: .*: 16 bits; transformers loads 2, 3",
    ),
    "a width of a target": (
        ["assign={method: mopeq, widths: [16], target: transformers}", "losses.symmetric=true"],
        "target transformers: .*: 16 bits; transformers loads 2, 3",
    ),
    "grid of a target": (
        ["assign={method: mopeq, target: vllm}", "losses.symmetric=false"],
        "target vllm: vllm reads symmetric grids only; set losses.symmetric: true$",
    ),
    "nothing kept": (
        ["assign={method: optimal, bits_per_weight: 0, drop: true}"],
        "every expert would be dropped; raise the budget$",
    ),
    "shares of layers": (
        ["assign={method: budget, expert_bytes: 100000, transient_bytes: 99000}"],
        "5 cold experts take .* its share of the budget is",
    ),
    "hardware": (["estimate.hardware=/nowhere.yaml"], "/nowhere.yaml"),
    "bytes": (["assign={method: optimal, size: 1000}"], "1000 bytes .* cannot be met; the least possible is"),
    "expert bytes": (["assign={method: frequency, expert_bytes: 10}"], "10 bytes .* cannot be met"),
    "bits": (
        ["assign={method: optimal, code_bits: 1.5}", "losses.bits=[2, 3]"],
        r"an average of 1.5 code bits cannot be met with \[2, 3\] bits",
    ),
    "bytes of what is compared": (
        ["eval.compare=[{name: other, method: frequency, bits_per_weight: 1}]"],
        r"^eval\.compare other, bits_per_weight: 1 bits a weight cannot be met",
    ),
    "format": (
        ["assign={method: uniform, bits: 1}", "export.formats=[auto-round]"],
        "export.formats: auto-round: .*; ",
    ),
    "rows of experts": (
        ["export.formats=[gptqmodel]"],
        r"export.formats: gptqmodel: model\.layers\.0.*: \d+ rows; gptqmodel packs multiples of 32",
    ),
    "rows before grids": (["export.formats=[vllm]"], r"export.formats: vllm: .*: 56 rows; vllm packs multiples of 32"),
    "rows of others": (
        ["export.formats=[auto-round]", "others.attention=4", "others.group_size=-1"],
        r"for auto-round: model\.layers\.0\.self_attn\.\w+: \d+ (rows|inputs); auto-round packs multiples of 32",
    ),
    "embeddings": (
        ["export.formats=[gptqmodel]", "others.embeddings=8"],
        r"for gptqmodel: model\.embed_tokens: packed embeddings and heads are not loaded",
    ),
    "head": (
        ["export.formats=[auto-round]", "others.head=8"],
        "for auto-round: lm_head: packed embeddings and heads are not loaded",
    ),
    "others": (
        ["export.formats=[vllm]", "others.attention=4"],
        r"for vllm: model\.layers\.0\..*: modules outside of the experts are loaded in full precision only",
    ),
    "evaluation text": (["eval.perplexity.source=/nowhere.txt"], "/nowhere.txt: no such file"),
    "positions": (["eval.perplexity.sequence_length=129"], "129 tokens are more than the model's 128 positions"),
}  # fmt: skip


def context_of(model: Path, tmp_path: Path, *overrides: str) -> Context:
    recipe = load_recipe(None, [*SMALL, *overrides])
    return Context(recipe=recipe, model_name=str(model), out=tmp_path / "run", reporter=Reporter(quiet=True))


def refusals(model: Path, tmp_path: Path, *overrides: str) -> tuple[str, str]:
    """What run and plan say."""
    with pytest.raises(MoeqError) as run:
        pipeline.run(context_of(model, tmp_path, *overrides))
    assert not (tmp_path / "run").exists(), "before the first write"
    with pytest.raises(MoeqError) as plan:
        make_plan(context_of(model, tmp_path, *overrides), probe=False)
    assert type(run.value) is type(plan.value)
    return str(run.value), str(plan.value)


@pytest.mark.parametrize("case", CHEAP)
def test_a_text_is_not_read_for_what_is_refused_anyway(
    case: str, tiny_mixtral: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read(*_: Any, **__: Any) -> None:
        raise AssertionError("the text was read")

    for name in ("open_text", "sources_digest", "documents_of", "images_digest"):
        monkeypatch.setattr(corpus, name, read)
    overrides, message = CHEAP[case]
    run, plan = refusals(tiny_mixtral, tmp_path, *overrides)
    assert run == plan
    assert re.search(message, run), run


@pytest.mark.cases(5)
@pytest.mark.parametrize("part", ["corpus", "eval.perplexity"])
@pytest.mark.parametrize("kind", ["short", "large and short", "row", "encoding"])
def test_a_plan_refuses_the_text_that_a_run_refuses(
    kind: str, part: str, tiny_mixtral: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "text.jsonl"
    rows = [json.dumps({"text": f"row {number} of a text"}) for number in range(200)]
    more = []
    if kind == "short":
        rows, message = rows[:2], "too short: "
    elif kind == "large and short":
        monkeypatch.setattr(places, "WHOLE_BYTES", 1 << 10)
        more, message = [f"{part}.sequences=9999"], r"too short: \d+ sequences of 32 tokens, 9999 are wanted"
    elif kind == "row":
        rows[150], message = '{"body": "words"}', "row 151: no text field 'text'"
    else:
        message = "cannot be read as UTF-8"
    path.write_text("\n".join(rows))
    if kind == "encoding":
        path.write_bytes(path.read_bytes() + b"\n\xff\xfe")
    run, plan = refusals(tiny_mixtral, tmp_path, f"{part}.source={path}", *more)
    assert run == plan
    assert re.search(message, run), run
