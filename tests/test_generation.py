"""`moeq generate` gives a model the tokens that transformers' own snippet gives it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import family_models
import pytest
import torch
from transformers import AutoTokenizer
from typer.testing import CliRunner

import moeq
from moeq import pipeline
from moeq.bundled import bundled_path
from moeq.cli import app
from moeq.errors import EvaluationError, ModelError
from moeq.generation import QUIET, generate, prompt_ids
from moeq.recipe import load_recipe
from moeq.stages.context import Context

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
REFUSING = "{{ raise_exception('only with a system turn') }}"


def tokenizer(folder: Path, *, bos: bool, template: str | None = None) -> Any:
    """The bundled tokenizer, with a first token of its own and a chat template where they are asked for."""
    made = AutoTokenizer.from_pretrained(bundled_path("tiny-mixtral"))
    if bos:
        from tokenizers.processors import TemplateProcessing

        single = f"{made.bos_token} $A"
        special = [(made.bos_token, made.bos_token_id)]
        made.backend_tokenizer.post_processor = TemplateProcessing(single=single, special_tokens=special)
    made.chat_template = template
    made.save_pretrained(folder)
    return AutoTokenizer.from_pretrained(folder)


@pytest.mark.parametrize("bos", [False, True])
def test_a_prompt_has_the_tokens_of_the_snippet(bos: bool, tmp_path: Path) -> None:
    """With BOS where the tokenizer adds it, and without where it does not."""
    made = tokenizer(tmp_path, bos=bos)
    for prompt in ("def main", " a  b\n", "Ünï"):
        ids = prompt_ids(made, prompt, chat=False)
        assert ids == made(prompt, return_tensors="pt")["input_ids"][0].tolist()
        assert (ids[0] == made.bos_token_id) == bos


@pytest.mark.parametrize("bos", [False, True])
def test_a_chat_has_the_tokens_of_the_template(bos: bool, tmp_path: Path) -> None:
    """One BOS, the template's own, and the turn of the answer begun."""
    made = tokenizer(tmp_path, bos=bos, template=TEMPLATE)
    turns = [{"role": "user", "content": "hello"}]
    snippet = made.apply_chat_template(turns, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    ids = prompt_ids(made, "hello", chat=True)
    assert ids == snippet["input_ids"][0].tolist()
    assert ids.count(made.bos_token_id) == 1
    assert made.decode(ids).endswith("[user]hello[assistant]")


def test_the_pipeline_gives_the_same_tokens(tmp_path: Path, tiny_mixtral: Path) -> None:
    """transformers' text-generation pipeline, of text and of a conversation."""
    from transformers import AutoModelForCausalLM, pipeline

    made = tokenizer(tmp_path, bos=True, template=TEMPLATE)
    pipe = pipeline("text-generation", model=AutoModelForCausalLM.from_pretrained(tiny_mixtral), tokenizer=made)
    assert pipe.preprocess("hello")["input_ids"][0].tolist() == prompt_ids(made, "hello", chat=False)
    from transformers.pipelines.text_generation import Chat

    chat = Chat([{"role": "user", "content": "hello"}])
    assert pipe.preprocess(chat)["input_ids"][0].tolist() == prompt_ids(made, "hello", chat=True)


def test_prompts_that_cannot_be_are_refused(tmp_path: Path) -> None:
    plain = tokenizer(tmp_path / "plain", bos=False)
    assert prompt_ids(plain, "", chat=False) == [plain.bos_token_id]
    plain.bos_token = None
    with pytest.raises(EvaluationError, match="no tokens"):
        prompt_ids(plain, "", chat=False)
    with pytest.raises(EvaluationError, match="has no chat template; leave --chat out"):
        prompt_ids(plain, "hello", chat=True)
    with pytest.raises(EvaluationError, match="only with a system turn"):
        prompt_ids(tokenizer(tmp_path / "strict", bos=False, template=REFUSING), "hello", chat=True)


SMALL = (
    "corpus.sequences=4", "corpus.sequence_length=32", "losses.group_size=16", "losses.bits=[4]",
    "losses.methods=[rtn]", "assign={method: uniform, bits: 4, quantizer: rtn}", "eval.compare=[]",
)  # fmt: skip


CHOOSING = {"return_dict_in_generate": True, "stop_strings": ["e", "a"], "repetition_penalty": 9.0, "top_p": 0.1}


def test_several_prompts_are_continued_as_each_alone(tiny_mixtral: Path, tmp_path: Path) -> None:
    """Those that end early reach no expert any more: the end token is one that not every answer has.

    How generation_config.json would choose tokens changes nothing.
    """
    context = Context(recipe=load_recipe(None, SMALL), model_name=str(tiny_mixtral), out=tmp_path, reporter=QUIET)
    pipeline.run(context, ("profile", "losses", "assign", "quantize", "export"))
    checkpoint = context.directory("export")
    prompts = ["def main", "hello", " a  b c d"]
    options: dict[str, Any] = {"max_new_tokens": 8, "temperature": 0.0, "seed": 0, "device": "cpu"}
    model: Any = moeq.load(checkpoint)
    made = AutoTokenizer.from_pretrained(checkpoint)
    ids = [torch.tensor([prompt_ids(made, prompt, chat=False)]) for prompt in prompts]
    new = [model.generate(row, max_new_tokens=8, do_sample=False)[0, row.shape[1] :].tolist() for row in ids]
    end = next(token for token in new[0][1:4] if token not in new[1] or token not in new[2])
    settings = json.loads((checkpoint / "generation_config.json").read_text())
    (checkpoint / "generation_config.json").write_text(json.dumps(settings | {"eos_token_id": end} | CHOOSING))
    (checkpoint / "SHA256SUMS").unlink()
    keys = ("text", "continuation", "prompt_tokens", "new_tokens")
    for beams in (1, 2):
        alone = [generate(checkpoint, prompt, beams=beams, **options) for prompt in prompts]
        together = generate(checkpoint, prompts, beams=beams, **options)
        assert [{key: one[key] for key in keys} for one in alone] == together["answers"]
        assert together["expert_rows"] > together["expert_rows_left_out"]
        if beams == 1:
            for row, one in zip(new, alone, strict=True):
                wanted = row[: row.index(end) + 1] if end in row else row
                assert one["continuation"] == made.decode(wanted, skip_special_tokens=True)
            assert len({one["new_tokens"] for one in alone}) > 1
            assert together["expert_rows_left_out"] > 0
    words = ["generate", str(checkpoint), *prompts, "--max-new-tokens", "8", "--device", "cpu", "--quiet", "--json"]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.exception
    assert [one["new_tokens"] for one in json.loads(done.stdout)["answers"]] == [
        generate(checkpoint, prompt, **options)["new_tokens"] for prompt in prompts
    ]
    made.add_special_tokens({"pad_token": "[beyond the embeddings]"})
    made.save_pretrained(checkpoint)
    assert made.pad_token_id >= model.config.vocab_size
    assert [one["new_tokens"] for one in generate(checkpoint, prompts, **options)["answers"]] == [
        generate(checkpoint, prompt, **options)["new_tokens"] for prompt in prompts
    ]
    coldest = generate(checkpoint, prompts[0], **options | {"temperature": 1e-42})  # by which float32 cannot divide
    assert coldest["text"] == generate(checkpoint, prompts[0], **options)["text"]


def test_a_classifier_of_tokens_is_refused(tmp_path: Path) -> None:
    family_models.save("openai_privacy_filter", tmp_path / "model")
    more = ["losses.methods=[rtn]", "assign.quantizer=rtn", "others={}", "export.verify=false"]
    context = Context(
        recipe=load_recipe(None, [*SMALL, *more]),
        model_name=str(tmp_path / "model"),
        out=tmp_path / "run",
        reporter=QUIET,
    )
    pipeline.run(context, ("profile", "losses", "assign", "quantize", "export"))
    with pytest.raises(ModelError, match="OpenAIPrivacyFilterForTokenClassification continues no text"):
        generate(context.directory("export"), "hello", max_new_tokens=2, temperature=0.0, seed=0, device="cpu")


@pytest.mark.full
def test_an_encoder_decoder_answers_several_prompts(tmp_path: Path) -> None:
    """Its text is the answer alone; pads stand behind what its encoder reads."""
    family_models.save("switch_transformers", tmp_path / "model")
    context = Context(
        recipe=load_recipe(None, SMALL), model_name=str(tmp_path / "model"), out=tmp_path / "run", reporter=QUIET
    )
    pipeline.run(context, ("profile", "losses", "assign", "quantize", "export"))
    options: dict[str, Any] = {"max_new_tokens": 6, "temperature": 0.0, "seed": 0, "device": "cpu"}
    prompts = ["def main", "hello"]
    together = generate(context.directory("export"), prompts, **options)
    for prompt, answer in zip(prompts, together["answers"], strict=True):
        alone = generate(context.directory("export"), prompt, **options)
        assert answer == {key: alone[key] for key in answer}
        assert answer["text"] == answer["continuation"] != ""
        assert 1 <= answer["new_tokens"] <= 6
