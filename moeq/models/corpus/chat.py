"""Conversations: turns as rows write them, and the chat template that makes text of them."""

from __future__ import annotations

from typing import Any

from moeq.errors import CorpusError, first_line

ROLES = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system"}

Message = dict[str, Any]


def rendered(speaker: Any, messages: list[Message], where: str) -> str:
    """A conversation as the chat template of a tokenizer or processor writes it.

    CorpusError when there is none or it refuses the conversation.
    """
    if not getattr(speaker, "chat_template", None):
        raise CorpusError(
            "a conversation, but the tokenizer has no chat template",
            where=where,
            do="give rows with text, or put chat_template.jinja into the model's directory",
        )
    try:
        text: str = speaker.apply_chat_template(messages, tokenize=False)
        return text
    except Exception as error:  # jinja's own errors, and whatever a template raises
        what = f"the chat template does not take this conversation ({first_line(error)})"
        raise CorpusError(what, where=where, do="check its roles") from error


def conversation(row: dict[str, Any], messages: str, pair: tuple[str, str], where: str) -> list[Message] | None:
    """The turns in a row's field `messages`, or made of its prompt and response; None when it has neither."""
    turns = row.get(messages)
    if isinstance(turns, list) and turns:
        return [_message(turn, where) for turn in turns]
    prompt, response = (row.get(field) for field in pair)
    if isinstance(prompt, str) and isinstance(response, str):
        return [{"role": "user", "content": prompt}, {"role": "assistant", "content": response}]
    return None


def _message(turn: Any, where: str) -> Message:
    """A turn with role and content; ShareGPT's from and value are renamed."""
    if isinstance(turn, dict):
        kept = {key: value for key, value in turn.items() if value is not None}
        if isinstance(kept.get("role"), str) and ("content" in kept or "tool_calls" in kept):
            return kept
        if isinstance(kept.get("from"), str) and isinstance(kept.get("value"), str):
            return {"role": ROLES.get(kept["from"], kept["from"]), "content": kept["value"]}
    keys = ", ".join(turn) if isinstance(turn, dict) else type(turn).__name__
    what = f"a turn without role and content (there are: {keys})"
    raise CorpusError(what, where=where, do="set messages_field, or correct the row")
