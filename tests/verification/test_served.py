"""verify with runtimes that give logarithms of probabilities alone: what they are asked for, and what is made of it."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from exporters import handmade
from torch import Tensor

from moeq.exporters.exporter import loaders
from moeq.models.loading import load_model
from moeq.models.source import open_source
from moeq.progress import Reporter
from moeq.verification import launch, probe
from moeq.verification.launch import NotInstalledError
from moeq.verification.verify import Options, Verdict, as_logits, verify


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return handmade.model(tmp_path_factory.mktemp("plain") / "model", "qwen3_moe")


def distributions(checkpoint: str, rows: list[list[int]], factor: float = 1.0) -> Tensor:
    """Logarithms of the next token's probabilities [B, S, V]; factor: of the head's weights."""
    model: Any = load_model(open_source(checkpoint), torch.float32, torch.device("cpu"))
    with torch.no_grad():
        model.lm_head.weight.mul_(factor)
        found: Tensor = model(input_ids=torch.tensor(rows)).logits.log_softmax(-1)
    return found


@dataclass(frozen=True)
class Logprob:
    logprob: float


def as_served(places: Tensor) -> list[Any]:
    """What vLLM gives of positions [S, V]: of every token but the first, and of the one that comes next."""
    each = [{token: Logprob(value) for token, value in enumerate(place.tolist())} for place in places]
    return [None, *each]


def fake_vllm(factor: float = 1.0, seen: dict[str, Any] | None = None) -> ModuleType:
    """As much of vLLM as is asked, over transformers."""

    class LLM:
        def __init__(self, **settings: Any) -> None:
            (seen if seen is not None else {}).update(settings)
            self.settings = settings

        def generate(self, prompts: list[Any], asked: Any, use_tqdm: bool) -> list[Any]:
            assert (asked.temperature, asked.max_tokens, asked.logprobs, asked.prompt_logprobs) == (0, 1, -1, -1)
            rows = [prompt["prompt_token_ids"] for prompt in prompts]
            outputs = []
            for places in distributions(self.settings["model"], rows, factor):
                *prompt, last = as_served(places)
                outputs.append(SimpleNamespace(prompt_logprobs=prompt, outputs=[SimpleNamespace(logprobs=[last])]))
            return outputs

    module = ModuleType("vllm")
    module.__version__ = "0.0"  # type: ignore[attr-defined]
    module.LLM, module.SamplingParams = LLM, SimpleNamespace  # type: ignore[attr-defined]
    return module


def fake_sglang() -> ModuleType:
    class Engine:
        def __init__(self, **settings: Any) -> None:
            self.model = settings["model_path"]

        def generate(self, input_ids: list[list[int]], **asked: Any) -> list[Any]:
            assert asked["return_logprob"]
            assert asked["logprob_start_len"] == 0
            outputs = []
            for places in distributions(self.model, input_ids):
                said = [[(value, token, None) for token, value in enumerate(place.tolist())] for place in places]
                assert asked["top_logprobs_num"] == len(said[0])
                found = {"input_top_logprobs": [None, *said[:-1]], "output_top_logprobs": [said[-1]]}
                outputs.append({"meta_info": found})
            return outputs

        def shutdown(self) -> None:
            pass

    module = ModuleType("sglang")
    module.Engine = Engine  # type: ignore[attr-defined]
    return module


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The probe runs in this process, where the runtimes are what the test says."""

    @contextmanager
    def started(wanted: launch.Request, python: str | None) -> Iterator[Any]:
        launch.write_request(tmp_path, wanted)
        probe.main(tmp_path)
        yield SimpleNamespace(args=["python", "probe.py", str(tmp_path)], wait=lambda timeout: 0)

    monkeypatch.setattr(launch, "started", started)


def check(path: Path, target: str, **options: Any) -> Verdict:
    return verify(path, Options(target=target, **options), Reporter(quiet=True))


@pytest.mark.usefixtures("here")
def test_vllm_is_asked_for_whole_distributions(plain: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, Any] = {}
    monkeypatch.setitem(sys.modules, "vllm", fake_vllm(seen=seen))
    verdict = check(plain, "vllm", against=str(plain))
    assert verdict.problems == ()
    assert (verdict.target, verdict.versions, verdict.loading) == ("vllm", {"vllm": "0.0"}, None)
    assert verdict.logits_error < 1e-5
    assert verdict.distance is not None
    assert verdict.distance.logits_error < 1e-5
    assert verdict.distance.kl == pytest.approx(0, abs=1e-6)
    assert (seen["dtype"], seen["enforce_eager"], seen["max_logprobs"]) == ("float32", True, -1)
    assert seen["max_model_len"] == 25  # the rows, and the token that comes next


@pytest.mark.usefixtures("here")
def test_what_vllm_computes_otherwise_is_wrong(plain: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", fake_vllm(factor=1.05))
    (problem,) = check(plain, "vllm").problems
    assert problem.startswith("logits are off")


@pytest.mark.usefixtures("here")
def test_sglang(plain: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By its documented interface: nobody here has run it."""
    monkeypatch.setitem(sys.modules, "sglang", fake_sglang())
    verdict = check(plain, "sglang")
    assert verdict.problems == ()
    assert verdict.logits_error < 1e-5


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("target", ["vllm", "sglang"])
def test_who_is_not_installed_is_said(target: str, plain: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, target, None)
    with pytest.raises(NotInstalledError, match=rf"target {target}, .*{target} cannot be imported there .*pip install"):
        check(plain, target)


def test_a_position_without_some_tokens_is_an_error() -> None:
    assert probe.whole_distributions([[{0: -1.0, 1: -2.0}]]).tolist() == [[[-1.0, -2.0]]]
    with pytest.raises(ValueError, match="1 tokens have a probability at a position, 2 at the first one"):
        probe.whole_distributions([[{0: -1.0, 1: -2.0}, {1: -1.0}]])


def test_logarithms_of_probabilities_as_logits() -> None:
    wanted = torch.randn(2, 3, 7, generator=torch.Generator().manual_seed(1)) + 5
    assert torch.allclose(as_logits(wanted.log_softmax(-1), wanted), wanted, atol=1e-5)
    assert not math.isfinite(float(as_logits(torch.full((1, 2), -math.inf), wanted[0, :1, :2]).sum()))


def test_its_process_has_the_variables(plain: Path, tmp_path: Path) -> None:
    """An interpreter that writes down what it is given."""
    script = tmp_path / "python"
    script.write_text('#!/bin/sh\nenv > "$2/env"\n')
    script.chmod(0o755)
    loader = loaders()["vllm"]
    request = launch.Request(
        checkpoint=plain, target="vllm", packages={}, load="vllm_logits", environment=loader.environment,
        logits_only=True, loading={}, method="", architecture="", dtype="float32", stored="float32", inputs={},
        layers={}, hidden={}, rows=0, trust_remote_code=False,
    )  # fmt: skip
    with launch.started(request, str(script)) as process:
        process.wait()
        lines = (Path(str(process.args[-1])) / "env").read_text().splitlines()  # type: ignore[index]
    assert {f"{name}={value}" for name, value in loader.environment.items()} <= set(lines)
    assert "VLLM_CPU_KVCACHE_SPACE" not in os.environ
