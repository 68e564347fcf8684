"""vLLM's server with the OpenAI API, as docs/serve.md starts it: `make peers`."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import peers
import pytest
import torch
from served_checkpoints import RECIPES, export
from transformers import AutoModelForCausalLM, AutoTokenizer

from moeq.bundled import bundled_path
from moeq_kernels.choice import choosing

SECONDS = 240  # until it answers: vLLM compiles the model
PROMPT, TOKENS = "Once upon a time", 12
SETTINGS = {
    "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}  # fmt: skip
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
def server(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Its address; nothing is said but the checkpoint, and float32, so that words can be compared."""
    folder = tmp_path_factory.mktemp("server")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [peers.interpreter("vllm-cpu"), "-m", "vllm.entrypoints.openai.api_server", "--model", str(checkpoint),
               "--port", str(port), "--host", "127.0.0.1", "--dtype", "float32"]  # fmt: skip
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            command, stdout=log, stderr=log, env=peers.environment() | SETTINGS, cwd=folder, start_new_session=True
        )
    address = f"http://127.0.0.1:{port}"
    try:
        wait(address, process, folder / "log")
        yield address
    finally:
        os.killpg(process.pid, 15)
        process.wait(60)
        shutil.rmtree(folder, ignore_errors=True)


def wait(address: str, process: subprocess.Popen[bytes], log: Path) -> None:
    """Until the server is well; fails when it has ended, or takes too long."""
    for _ in range(SECONDS):
        assert process.poll() is None, log.read_text("utf-8")[-3000:]
        try:
            with urllib.request.urlopen(f"{address}/health", timeout=5):
                return
        except OSError:
            time.sleep(1)
    pytest.fail(log.read_text("utf-8")[-3000:])


def ask(address: str, **wanted: Any) -> Any:
    """What the server answers to a completion."""
    request = urllib.request.Request(
        f"{address}/v1/completions", json.dumps(wanted).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=120) as answer:
        return json.load(answer)


def test_the_server_says_what_transformers_says(server: str, checkpoint: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    with choosing("reference"):
        model: Any = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    given = tokenizer(PROMPT, return_tensors="pt")
    tokens = model.generate(**given, do_sample=False, max_new_tokens=TOKENS)[0, given["input_ids"].shape[1] :]
    wanted = tokenizer.decode(tokens)
    found = ask(server, model=str(checkpoint), prompt=PROMPT, max_tokens=TOKENS, temperature=0)
    assert found["choices"][0]["text"].strip() == wanted.strip()
    client = [peers.interpreter("vllm-cpu"), "-c", CLIENT, f"{server}/v1", PROMPT, str(TOKENS)]
    said = subprocess.run(
        client, capture_output=True, text=True, check=True, env=peers.environment(), timeout=120
    ).stdout
    assert said.strip() == wanted.strip()


def test_requests_side_by_side_are_all_answered(server: str, checkpoint: Path) -> None:
    def one(number: int) -> str:
        found = ask(server, model=str(checkpoint), prompt=[3 + number, 70, 500], max_tokens=8, temperature=0)
        return str(found["choices"][0]["finish_reason"])

    with ThreadPoolExecutor(16) as several:
        assert set(several.map(one, range(64))) <= {"length", "stop"}
