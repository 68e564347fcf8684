"""Conversations go through the tokenizer's own template, once; what does not fit it is said in one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from corpora import make_sequences, read_documents

from moeq.errors import CorpusError
from moeq.models import corpus
from moeq.models.loading import load_tokenizer
from moeq.models.source import open_source

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{% if m.role not in ['user', 'assistant', 'system'] %}"
    "{{ raise_exception('unknown role ' + m.role) }}{% endif %}[{{ m.role }}] {{ m.content }}{{ eos_token }}"
    "{% endfor %}"
)
TURNS = [{"role": "user", "content": "What is 2 + 2?"}, {"role": "assistant", "content": "It is 4."}]
SHAREGPT = [{"from": "human", "value": "What is 2 + 2?"}, {"from": "gpt", "value": "It is 4."}]
AUTO = corpus.Fields(chat="auto")


@pytest.fixture(scope="module")
def plain() -> Any:
    return load_tokenizer(open_source("bundled:tiny-mixtral"))


@pytest.fixture(scope="module")
def chatty() -> Any:
    tokenizer = load_tokenizer(open_source("bundled:tiny-mixtral"))
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def read(path: Path, rows: list[dict[str, Any]], fields: corpus.Fields, tokenizer: Any) -> list[corpus.Document]:
    file = path / "chat.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return read_documents(corpus.open_sources(str(file), "calibration"), fields, tokenizer)


@pytest.mark.parametrize(
    ("row", "fields"),
    [
        ({"messages": TURNS}, AUTO),
        ({"conversations": SHAREGPT}, corpus.Fields(chat="auto", messages="conversations")),
        ({"prompt": "What is 2 + 2?", "response": "It is 4."}, AUTO),
        ({"q": "What is 2 + 2?", "a": "It is 4."}, corpus.Fields(chat="auto", prompt="q", response="a")),
        ({"messages": TURNS, "text": "not this"}, corpus.Fields(chat=True)),
    ],
)
def test_conversations_are_rendered_once(
    tmp_path: Path, chatty: Any, row: dict[str, Any], fields: corpus.Fields
) -> None:
    (document,) = read(tmp_path, [row], fields, chatty)
    bos, eos = chatty.bos_token, chatty.eos_token
    assert document.text == f"{bos}[user] What is 2 + 2?{eos}[assistant] It is 4.{eos}"
    found = make_sequences([document], chatty, length=64, count=None, packed=False)
    wanted = chatty.apply_chat_template(TURNS, tokenize=True)
    assert found.ids[0].tolist() == list(wanted["input_ids"] if not isinstance(wanted, list) else wanted)


def test_text_wins_in_auto_and_conversations_pack_with_text(tmp_path: Path, chatty: Any) -> None:
    rows = [{"messages": TURNS, "text": "this"}, {"messages": TURNS}]
    first, second = read(tmp_path, rows, AUTO, chatty)
    assert (first.text, first.rendered, second.rendered) == ("this", False, True)
    stream = make_sequences([first, second], chatty, length=8, count=None)
    ids = stream.ids.flatten().tolist()
    assert ids[0] == chatty.bos_token_id
    assert ids[ids.index(chatty.eos_token_id) + 1] == chatty.bos_token_id


def test_parquet_holds_conversations(tmp_path: Path, chatty: Any) -> None:
    pq.write_table(pa.table({"messages": [TURNS, TURNS]}), tmp_path / "c.parquet")
    found = read_documents(corpus.open_sources(str(tmp_path / "c.parquet"), "calibration"), AUTO, chatty)
    assert [document.text.count("[user]") for document in found] == [1, 1]


@pytest.mark.parametrize(
    ("row", "fields", "message"),
    [
        (
            {"messages": [{"role": "wizard", "content": "x"}]},
            AUTO,
            "does not take this conversation .unknown role wizard",
        ),
        (
            {"messages": [{"speaker": "me", "said": "x"}]},
            AUTO,
            r"a turn without role and content \(there are: speaker, said",
        ),
        ({"messages": ["hello"]}, AUTO, r"a turn without role and content \(there are: str\)"),
        (
            {"body": "x"},
            AUTO,
            r"no text field 'text', no conversation in 'messages', no 'prompt' with 'response' .*body",
        ),
        (
            {"text": "x"},
            corpus.Fields(chat=True),
            r"no conversation in 'messages', .*; set messages_field, or chat_templ",
        ),
        ({"messages": TURNS}, corpus.Fields(), r"no text field 'text' \(there are: messages\); set text_field"),
        ({"prompt": "x"}, AUTO, "no 'prompt' with 'response'"),
    ],
)
def test_rows_that_do_not_fit(
    tmp_path: Path, chatty: Any, row: dict[str, Any], fields: corpus.Fields, message: str
) -> None:
    with pytest.raises(CorpusError, match=rf"chat\.jsonl, row 2: .*{message}"):
        read(tmp_path, [{"text": "a", "messages": TURNS}, row], fields, chatty)


def test_a_tokenizer_without_a_template(tmp_path: Path, plain: Any) -> None:
    with pytest.raises(
        CorpusError, match=r"row 1: a conversation, but the tokenizer has no chat template; give rows with"
    ):
        read(tmp_path, [{"messages": TURNS}], AUTO, plain)
