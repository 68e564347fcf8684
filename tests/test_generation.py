"""`moeq generate` gives a model the tokens that transformers' own snippet gives it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from moeq.bundled import bundled_path
from moeq.errors import EvaluationError
from moeq.generation import prompt_ids

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
