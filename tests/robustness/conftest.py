"""Shared pieces of the robustness tests: a tiny random model, a short corpus."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from fork_server import ForkServer
from robustness.runs import VOCABULARY, copy_tokenizer, tiny_recipe, write_recipe

from moeq.bundled import bundled_path


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Mixtral with awkward sizes, random weights, the bundled tokenizer and two shards."""
    import torch
    from transformers import MixtralConfig, MixtralForCausalLM

    directory = tmp_path_factory.mktemp("model") / "tiny"
    torch.manual_seed(0)
    config = MixtralConfig(
        vocab_size=VOCABULARY,
        hidden_size=40,
        intermediate_size=56,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=5,
        num_experts_per_tok=2,
        max_position_embeddings=128,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=2,
    )
    MixtralForCausalLM(config).save_pretrained(directory, max_shard_size="600KB")
    copy_tokenizer(directory)
    return directory


@pytest.fixture(scope="session")
def short_corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A few of the bundled calibration documents of every domain."""
    rows = [json.loads(line) for line in bundled_path("corpus/calibration.jsonl").read_text("utf-8").splitlines()]
    chosen: dict[str, list[str]] = {}
    for row in rows:
        mine = chosen.setdefault(row["domain"], [])
        if sum(map(len, mine)) < 3000:
            mine.append(json.dumps(row | {"text": row["text"][:3000]}))
    path = tmp_path_factory.mktemp("corpus") / "short.jsonl"
    path.write_text("\n".join(line for lines in chosen.values() for line in lines) + "\n", "utf-8")
    return path


@pytest.fixture(scope="session")
def recipe(tiny_model: Path, short_corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_recipe(tmp_path_factory.mktemp("recipe") / "tiny.yaml", tiny_recipe(tiny_model, short_corpus))


@pytest.fixture(scope="session")
def finished_run(moeq: ForkServer, recipe: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A complete run; copy it before changing anything."""
    out = tmp_path_factory.mktemp("finished") / "run"
    finished = moeq.run("run", recipe, "--out", out, "--quiet")
    assert (finished.code, finished.stderr) == (0, "")
    return out


@pytest.fixture
def run_copy(finished_run: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(finished_run, tmp_path / "run"))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    for report in terminalreporter.getreports("passed") + terminalreporter.getreports("failed"):
        for name, value in report.user_properties:
            if name == "refusals":
                terminalreporter.write_line(f"refusals walked: {value}")
