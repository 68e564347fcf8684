"""A model for lm-eval that answers at random."""

from __future__ import annotations

from random import Random
from typing import Any

from lm_eval.api.model import LM


class GuessingLM(LM):
    """The same answers every time, to texts, images and conversations."""

    MULTIMODAL = True
    tokenizer_name = "guesses"

    def __init__(self) -> None:
        super().__init__()
        self._random = Random(0)

    def loglikelihood(self, requests: list[Any]) -> list[tuple[float, bool]]:
        return [(-100 * self._random.random(), False) for _ in requests]

    def loglikelihood_rolling(self, requests: list[Any]) -> list[float]:
        return [-1000 * self._random.random() for _ in requests]

    def generate_until(self, requests: list[Any]) -> list[str]:
        return ["a guess" for _ in requests]

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        return "\n".join(turn["content"] for turn in chat_history)
