"""SGLang's own models with moeq-sglang: experts and linears compute what transformers' do; what is not served is said.

In an environment with sglang, on the CPU, where its kernels are not: its layers and loaders run, not its attention.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import peers
import pytest
import torch
from made_sources import save_model
from packed_layers import matrix_of
from safetensors.torch import load_file, save_file
from served_checkpoints import RECIPES, export
from torch import Tensor
from transformers import AutoModelForCausalLM

from moeq_kernels.choice import choosing, prepared_linear
from moeq_kernels.widths import Encoding

PROBE = Path(__file__).parent / "peer_sglang.py"
TOKENS, CLOSE = 5, 2e-5
CASES = [("mixtral", "packed attention"), ("qwen3_moe", "a width for every matrix"), ("qwen3_moe", "nested"),
         ("qwen3_moe", "packed attention"), ("mixtral", "packed embeddings"), ("qwen3_moe", "packed embeddings"),
         ("olmoe", "packed embeddings"), ("gpt_oss", "a width for every matrix"), ("gpt_oss", "trellis codes"),
         ("gpt_oss", "nested"), ("gpt_oss", "packed embeddings")]  # fmt: skip
OWN = {"olmoe": {"num_key_value_heads": 4}}  # as many as heads, which SGLang's model takes for granted
TIED, ALPHA = "tied embeddings", "another alpha"
REFUSED = {
    ("qwen3_moe", TIED): r"moeq: lm_head is the packed embeddings, but not in SGLang's model; export without",
    ("qwen3_moe", "fewer experts"): r"moeq: .*5 widths for 6 experts; .*export the checkpoint again",
    ("gpt_oss", "packed attention"): r"moeq: SGLang's model does not take \S+k_proj and 7 more packed; quantize with",
    ("gpt_oss", ALPHA): r"moeq: SGLang's model has 1.702 for swiglu_alpha, config.json 1.5",
}
Answers = dict[tuple[str, str], tuple[Path, dict[str, Tensor], dict[str, Tensor] | str]]


def given(checkpoint: Path, path: Path) -> dict[str, Tensor]:
    """Hidden states, their routing, tokens, and what an attention's output projection takes."""
    config = json.loads((checkpoint / "config.json").read_text("utf-8"))
    generator = torch.Generator().manual_seed(1)
    experts = config.get("num_local_experts") or config["num_experts"]
    made = {
        "hidden": torch.randn(TOKENS, config["hidden_size"], generator=generator),
        "weights": torch.rand(TOKENS, 2, generator=generator),
        "tokens": torch.randint(config["vocab_size"], (TOKENS,), generator=generator),
        "ids": torch.stack([torch.randperm(experts, generator=generator)[:2] for _ in range(TOKENS)]).int(),
        "wide": torch.randn(TOKENS, config["num_attention_heads"] * config["head_dim"], generator=generator),
    }
    save_file(made, path)
    return made


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> Answers:
    """What was given, and what SGLang's layers computed of it or the error, all in one process."""
    peers.interpreter("sglang")
    folder = tmp_path_factory.mktemp("sglang")
    models = {
        family: save_model(folder / family, family, shared_expert_intermediate_size=0, **OWN.get(family, {}))
        for family, _ in CASES
    }
    tied = save_model(folder / TIED, "qwen3_moe", shared_expert_intermediate_size=0, tie_word_embeddings=True)
    jobs, made = [], {}
    for number, (family, name) in enumerate([*CASES, *REFUSED]):
        if name in RECIPES:
            checkpoint = export(folder / f"run-{number}", tied if name == TIED else models[family], RECIPES[name])
        else:
            change = other_alpha if name == ALPHA else fewer
            checkpoint = changed(made[family, "nested"][0], change)
        out = folder / f"{number}.out"
        made[family, name] = (checkpoint, given(checkpoint, folder / f"{number}.given"), out)
        jobs.append({"checkpoint": str(checkpoint), "given": str(folder / f"{number}.given"), "out": str(out)})
    (folder / "jobs.json").write_text(json.dumps(jobs))
    peers.run("sglang", PROBE, folder / "jobs.json")
    return {case: (path, some, answer(out)) for case, (path, some, out) in made.items()}


def changed(checkpoint: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    """A copy with another config.json."""
    copy = checkpoint.with_name(change.__name__)
    copy.mkdir()
    for file in checkpoint.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    config = json.loads((copy / "config.json").read_text("utf-8"))
    change(config)
    (copy / "config.json").write_text(json.dumps(config))
    return copy


def fewer(config: dict[str, Any]) -> None:
    next(iter(config["quantization_config"]["experts"].values())).pop()


def other_alpha(config: dict[str, Any]) -> None:
    config["swiglu_alpha"] = 1.5


def close(found: Tensor, wanted: Tensor, what: object) -> None:
    assert (found - wanted).abs().max() / wanted.abs().max() < CLOSE, what


def answer(out: Path) -> dict[str, Tensor] | str:
    return load_file(out) if out.exists() else Path(f"{out}.error").read_text("utf-8")


@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_sglangs_layers_compute_what_transformers_do(case: tuple[str, str], answers: Answers) -> None:
    checkpoint, some, found = answers[case]
    assert isinstance(found, dict), found
    with choosing("reference"):
        model: Any = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    with torch.no_grad():
        for number, layer in enumerate(model.model.layers):
            attention = layer.self_attn
            heads = [attention.q_proj, attention.k_proj, attention.v_proj]
            wanted = {
                "experts": layer.mlp.experts(some["hidden"], some["ids"].long(), some["weights"]),
                "qkv": torch.cat([one(some["hidden"]) for one in heads], -1),
                "o": attention.o_proj(some["wide"]),
            }
            for name, value in wanted.items():
                close(found[f"{number}.{name}"], value, (number, name))
        close(found["embeddings"], model.get_input_embeddings()(some["tokens"]), "embeddings")
        close(found["logits"], model.get_output_embeddings()(some["hidden"]), "logits")
    assert int(found["bytes"]) > 0


@pytest.mark.parametrize("shape", [(0,), (3, 0), (2, 3)])
def test_a_linear_of_no_rows_gives_none(shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """Without SGLang, whose base class stands empty here."""
    parts = ["sglang", "srt", "layers", "quantization", "base_config"]
    for number in range(len(parts)):
        monkeypatch.setitem(sys.modules, ".".join(parts[: number + 1]), ModuleType(parts[number]))
    sys.modules[".".join(parts)].LinearMethodBase = object  # type: ignore[attr-defined]
    monkeypatch.syspath_prepend(PROBE.parents[2] / "moeq-sglang")
    monkeypatch.delitem(sys.modules, "moeq_sglang.linear", raising=False)
    linear = import_module("moeq_sglang.linear")
    del sys.modules["moeq_sglang.linear"]
    method = linear.MoeqLinear(Encoding(group_size=32, symmetric=False), {"q": 3, "k": 16}, "attention.qk")
    given = matrix_of(24, 64, 3), matrix_of(8, 64, 16, dtype=torch.float32)
    method.prepared = tuple(prepared_linear(one, None, torch.device("cpu"), "reference")[0] for one in given)
    found = method.apply(None, torch.ones(*shape, 64), torch.ones(32))
    assert found.shape == (*shape, 32)


@pytest.mark.parametrize("case", REFUSED, ids="-".join)
def test_what_is_not_served_is_said(case: tuple[str, str], answers: Answers) -> None:
    found = answers[case][2]
    assert isinstance(found, str)
    assert re.search(REFUSED[case], found), found[-500:]
