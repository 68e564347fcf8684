"""Whether a model is one that works, from config.json and the record; the list of dense types is transformers' own."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES, model_type_to_module_name

from moeq import suitability
from moeq.exporters.gguf_families import FAMILIES
from moeq.models import support
from moeq.models.support import DENSE, answer, dense_types, families, is_packed_apart
from moeq.registry import EXPORTERS
from moeq.runtimes import runtimes

MODELS = Path(transformers.__file__).parent / "models"


@pytest.mark.parametrize(
    ("config", "verdict", "words"),
    [
        ({"model_type": "mixtral", "num_local_experts": 8}, "works", "it works: MixtralForCausalLM streams from disk"),
        (
            {"model_type": "llama"},
            "dense",
            "it is dense (llama), not a Mixture-of-Experts model: moeq has nothing to do",
        ),
        ({"model_type": "jamba", "num_experts": 1}, "dense", "it is dense (jamba, as its config.json has it)"),
        ({"model_type": "gemma4", "text_config": {"enable_moe_block": False}}, "dense", "as its config.json has it"),
        (
            {"model_type": "doge", "is_moe": True},
            "refused",
            "experts of DogeForCausalLM are not supported: its experts",
        ),
        ({"model_type": "llava", "text_config": {"model_type": "mixtral"}}, "untried", "its part mixtral works"),
        ({"model_type": "llava", "text_config": {"model_type": "llama"}}, "dense", "it is dense (llava)"),
        ({"model_type": "llama", "num_experts": 8}, "unknown", "not known: llama is dense in transformers, but"),
        ({"model_type": "mine", "auto_map": {"AutoConfig": "a.B"}}, "unknown", "brings its own Python code"),
        ({"model_type": "mine"}, "unknown", "not known: mine is no family of the record"),
        (
            {"model_type": "olmoe", "quantization_config": {"quant_method": "gptq"}},
            "quantized",
            "already quantized (gptq)",
        ),
        ({"model_type": "olmoe", "quantization_config": {"quant_method": "fp8"}}, "works", "it works"),
    ],
)
def test_answers(config: dict[str, Any], verdict: str, words: str) -> None:
    found = answer(config)
    assert found.verdict == verdict
    assert words in found.line
    assert (found.do is None) == (verdict == "works")


def test_numbers_are_those_of_the_language_model() -> None:
    text = {"model_type": "qwen3_moe", "num_hidden_layers": 4, "num_experts": 60, "num_experts_per_tok": 6}
    found = answer({"model_type": "llava", "num_hidden_layers": 2, "text_config": text})
    assert (found.layers, found.experts, found.experts_a_token) == (4, 60, 6)


@pytest.mark.parametrize("here", ["5.23.0", "5.24.0.dev0", "5.30.1", "6.0.0"])
def test_a_family_of_a_newer_transformers_says_so(here: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(support, "version", lambda _: here)
    found = answer({"model_type": "lara_mini", "num_hidden_layers": 3, "num_experts": 6})
    assert found.family is not None
    assert found.family.told == "transformers 5.24 or later"
    if here == "5.23.0":
        assert (found.verdict, found.refused) == ("refused", True)
        assert found.line == "LaraMiniForCausalLM is of transformers 5.24, here is 5.23.0"
    else:
        assert found.verdict == "works"


def test_runtimes_of_families() -> None:
    rows = {row.model_type: row for row in families()}
    assert suitability.runtimes_of(None) == suitability.runtimes_of(rows["doge"]) == []
    assert suitability.runtimes_of(rows["mixtral"]) == list(runtimes())
    others = {"llama.cpp", "llama.cpp-refit", "mlx", "exl3"}
    assert set(suitability.runtimes_of(rows["phimoe"])) == set(runtimes()) - others
    assert set(suitability.runtimes_of(rows["glm4_moe"])) == set(runtimes())
    biased = ["native", "dequantized", "llama.cpp", "llama.cpp-refit", "mlx"]
    assert suitability.runtimes_of(rows["gpt_oss"]) == biased
    assert next(set(exporter.families) for exporter in EXPORTERS if exporter.name == "gguf") == set(FAMILIES)


@pytest.mark.parametrize("name", ["org/model", "./here", "~/here", "bundled:tiny-mixtral", "config.json", str(MODELS)])
def test_words_that_name_a_model(name: str) -> None:
    assert suitability.is_model(name)


@pytest.mark.parametrize("name", ["qwen3", "MixtralForCausalLM", "n" * 5000, "gpt-oss"])
def test_words_that_name_a_family(name: str) -> None:
    assert not suitability.is_model(name)


def test_the_dense_types_are_those_without_a_word_of_experts() -> None:
    """Of the installed transformers; MOEQ_RECORD=1 adds what it has to the list, which holds those of others too."""
    known = {row.model_type for row in families()}
    dense = []
    for name in sorted(set(CONFIG_MAPPING_NAMES) - known):
        files = list((MODELS / model_type_to_module_name(name)).glob("modeling_*.py"))
        if files and not any(re.search("expert", file.read_text("utf-8"), re.IGNORECASE) for file in files):
            dense.append(name)
    if os.environ.get("MOEQ_RECORD") == "1":
        DENSE.write_text(json.dumps(sorted({*dense, *dense_types()}), indent=0) + "\n", "utf-8")
    assert dense_types() & set(CONFIG_MAPPING_NAMES) == set(dense)


@pytest.mark.parametrize(
    ("family", "matrix", "apart"),
    [
        ("mixtral", "w1", False),
        ("mixtral", "gate_proj", True),
        ("minimax_m2", "gate_proj", True),
        ("lfm2_moe", "w2", False),
        ("qwen3_moe", "gate_proj", False),
        ("qwen3_moe", "w1", True),
        ("mistral4", "gate_proj", True),
        ("llama4_text", "gate_proj", False),
    ],
)
def test_experts_by_other_names_than_the_familys_are_packed_apart(family: str, matrix: str, apart: bool) -> None:
    """transformers misses each of those keys."""
    config = {"model_type": family, "quantization_config": {"quant_method": "compressed-tensors"}}
    key = f"model.layers.0.mlp.experts.3.{matrix}.weight_packed"
    source = SimpleNamespace(config=config, tensors=[key, "model.layers.0.mlp.shared_experts.gate_proj.weight"])
    assert is_packed_apart(source) == apart  # type: ignore[arg-type]
