"""The server with the OpenAI API that transformers has, as docs/serve.md starts it: `make peers`."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import peers
import pytest
import torch
from made_sources import save_model
from served import Server, by_transformers
from served_checkpoints import RECIPES, export
from transformers import AutoModelForCausalLM, AutoTokenizer

from moeq.bundled import bundled_path
from moeq_kernels.choice import choosing

PROMPTS = ("Once upon a time", "The", "In the season of the game he was", "A station on the line , and", "Its first")
TOKENS, AT_ONCE = 12, 24
OPTIONS, BATCHED = ("--device", "cpu", "--dtype", "float32"), ("--continuous-batching",)


def settings() -> dict[str, str]:
    return peers.environment() | {"OMP_NUM_THREADS": "1"}


def made(folder: Path, family: str) -> Path:
    """A checkpoint of the bundled model, or of a random one of a family."""
    layers = {"num_hidden_layers": 3} if family == "qwen3_next" else {}
    model = bundled_path(family) if family == "tiny-mixtral" else save_model(folder / "model", family, **layers)
    return export(folder / "run", model, RECIPES["a width for every matrix"])


def wanted(checkpoint: Path) -> dict[str, str]:
    """What transformers says to every prompt, by the plain path."""
    with choosing("reference"):
        model: Any = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
        tokenizer, said = AutoTokenizer.from_pretrained(checkpoint), {}
        for prompt in PROMPTS:
            given = tokenizer(prompt, return_tensors="pt")
            made = model.generate(**given, do_sample=False, max_new_tokens=TOKENS)
            said[prompt] = tokenizer.decode(made[0, given["input_ids"].shape[1] :])
    return said


@pytest.mark.parametrize(
    ("family", "options"),
    [
        *[(family, BATCHED) for family in ("tiny-mixtral", "gpt_oss", "glm4_moe")],
        *[(family, ()) for family in ("tiny-mixtral", "deepseek_v3", "qwen3_next")],  # whose caches are not paged
    ],
)
def test_the_server_says_what_transformers_says(family: str, options: tuple[str, ...], tmp_path: Path) -> None:
    """Also to many that ask at once."""
    python = peers.interpreter("transformers-serving")
    checkpoint = made(tmp_path, family)
    said = wanted(checkpoint)

    def ask(number: int) -> tuple[str, str]:
        prompt = PROMPTS[number % len(PROMPTS)]
        return prompt, server.ask(prompt=prompt, max_tokens=TOKENS, temperature=0)["choices"][0]["text"]

    start: dict[str, Any] = {"environment": settings(), "start": by_transformers}
    with Server(python, checkpoint, tmp_path, *OPTIONS, *options, **start) as server, ThreadPoolExecutor(8) as several:
        found = list(several.map(ask, range(AT_ONCE)))
    assert {text.strip() for _, text in found} == {text.strip() for text in said.values()}
    assert all(text.strip() == said[prompt].strip() for prompt, text in found)
