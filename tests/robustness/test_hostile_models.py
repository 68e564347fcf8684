"""Nonsense in a model's own files is answered with the file and the key, and never called a bug in moeq."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from fork_server import ForkServer
from robustness.runs import copy_tokenizer
from robustness.test_bad_input import ARTIFACT, CORPUS, MODEL, STORAGE, assert_refused

from moeq.errors import ModelError
from moeq.models import loading
from moeq.models.configuration import TOP_K, check_config, check_top_k
from moeq.models.forward import check_tokens
from moeq.models.source import open_source
from moeq.runtime.packed_modules import PackedEmbedding
from moeq_kernels.widths import Encoding

VALUES: list[Any] = [None, True, 0, -1, 10**30, 1.5, "many", [1, 2], {"a": 1}]
MORE_KEYS = (
    "auto_map", "quantization_config", "compression_config", "text_config", "vision_config", "head_dim", "num_experts",
    "layer_types", "rope_scaling", "torch_dtype", "attn_implementation", "moe_intermediate_size",
)  # fmt: skip
SMALL = ("corpus.sequences=3", "corpus.sequence_length=32", "eval.perplexity=null", "eval.compare=[]")


def edited(model: Path, folder: Path, name: str, change: Callable[[Any], Any]) -> Path:
    """A copy of a model, links to its files but for one of JSON that is changed."""
    copy = folder / "model"
    shutil.rmtree(copy, ignore_errors=True)
    copy.mkdir()
    for path in model.iterdir():
        if path.name != name:
            (copy / path.name).hardlink_to(path)
    found = json.loads((model / name).read_text("utf-8")) if (model / name).is_file() else {}
    (copy / name).write_text(json.dumps(change(found)))
    return copy


def _set(**changes: Any) -> Callable[[Any], Any]:
    return lambda found: found | changes


def _refusal(model: Path) -> ModelError | None:
    """Why no skeleton can be made of a model, None where one can."""
    try:
        _, layers = loading.describe(open_source(str(model)))
    except ModelError as error:
        return error
    assert layers
    return None


@pytest.mark.full
def test_every_key_of_a_configuration(tiny_model: Path, tmp_path: Path) -> None:
    """The skeleton is built, or the file is named; the sweep meets both, and every key that moeq reads itself."""
    keys = (*json.loads((tiny_model / "config.json").read_text("utf-8")), *MORE_KEYS)
    built, refused, named = 0, 0, set()
    for key in keys:
        for value in VALUES:
            model = edited(tiny_model, tmp_path, "config.json", _set(**{key: value}))
            error = _refusal(model)
            if error is None:
                built += 1
                continue
            refused += 1
            assert error.do
            assert error.where
            assert len(str(error)) < 800
            assert str(model / "config.json") in error.where or "Mixture-of-Experts" in str(error), (key, value)
            named |= {key} if f"config.json: {key}" in error.where else set()
    assert built > 80
    assert refused > 100
    assert named >= {"architectures", "auto_map", "quantization_config", "text_config", "vocab_size", "hidden_size"}
    assert "num_experts_per_tok" in named


CONFIG, TOKENIZER = "config.json", "tokenizer_config.json"
CASES: dict[str, tuple[str, Callable[[Any], Any], list[str]]] = {  # file, change, what the line says
    "quantization_config is a number": (
        CONFIG,
        _set(quantization_config=4),
        ["config.json: quantization_config"],
    ),
    "quantization_config is a name": (
        CONFIG,
        _set(quantization_config="gptq"),
        ["quantization_config", "mapping"],
    ),
    "quantization_config is a list": (CONFIG, _set(quantization_config=[1]), ["quantization_config", "mapping"]),
    "quant_method is a list": (
        CONFIG,
        _set(quantization_config={"quant_method": []}),
        ["config.json: quantization_config.quant_method"],
    ),
    "quantization of text": (
        CONFIG,
        _set(text_config={"quantization_config": 3}),
        ["config.json: text_config.quantization_config"],
    ),
    "fp8 without sense": (
        CONFIG,
        _set(quantization_config={"quant_method": "fp8", "weight_block_size": "many"}),
        ["config.json"],
    ),
    "text_config is a list": (CONFIG, _set(text_config=[1]), ["config.json: text_config", "mapping"]),
    "auto_map is a name": (CONFIG, _set(auto_map="x"), ["config.json: auto_map", "mapping"]),
    "architectures is a number": (
        CONFIG,
        _set(architectures=7),
        ["config.json: architectures", "list of names"],
    ),
    "architectures of numbers": (CONFIG, _set(architectures=[7]), ["config.json: architectures"]),
    "no expert a token": (CONFIG, _set(num_experts_per_tok=0), ["config.json: num_experts_per_tok", "0 of 5"]),
    "a negative number of experts": (CONFIG, _set(num_experts_per_tok=-1), ["num_experts_per_tok", "-1 of 5"]),
    "more experts than there are": (CONFIG, _set(num_experts_per_tok=6), ["num_experts_per_tok", "6 of 5"]),
    "no positions": (CONFIG, _set(max_position_embeddings=-1), ["config.json: max_position_embeddings", "-1"]),
    "a vocabulary of none": (CONFIG, _set(vocab_size=0), ["config.json: vocab_size"]),
    "a dropout of words": (CONFIG, _set(attention_dropout="x"), [CONFIG, "attention_dropout", "float"]),
    "tokenizer_config.json is a number": (TOKENIZER, lambda found: 7, ["tokenizer_config.json"]),
    "a token that is a number": (
        TOKENIZER,
        _set(bos_token=7),
        ["tokenizer cannot be loaded", "bos_token"],
    ),
    "a length that is a name": (TOKENIZER, _set(model_max_length="many"), ["tokenizer cannot be loaded", "'str'"]),
    "a token of its own": (
        TOKENIZER,
        _set(bos_token="<new>"),
        ["tokenizer.json", "token 2048 is beyond the model's vocabulary of 2048"],
    ),
}


@pytest.mark.cases(6)
@pytest.mark.parametrize("case", CASES)
def test_profile(moeq: ForkServer, tiny_model: Path, short_corpus: Path, tmp_path: Path, case: str) -> None:
    name, change, messages = CASES[case]
    model, out = edited(tiny_model, tmp_path, name, change), tmp_path / "out"
    options = [word for one in (*SMALL, f"corpus.source={short_corpus}") for word in ("--set", one)]
    finished = moeq.run("profile", "--model", model, "--out", out, "--quiet", *options)
    assert_refused(finished, MODEL, str(model), *messages)
    assert not (out / "profile" / "profile.json").exists()


def test_the_same_at_a_look(moeq: ForkServer, tiny_model: Path, tmp_path: Path) -> None:
    for name in ("quantization_config is a number", "architectures is a number", "more experts than there are"):
        file, change, messages = CASES[name]
        model = edited(tiny_model, tmp_path, file, change)
        assert_refused(moeq.run("inspect", model), MODEL, str(model), *messages)


def test_a_tokenizer_of_a_larger_model(moeq: ForkServer, short_corpus: Path, tmp_path: Path) -> None:
    """Its ids are named before the embedding raises an IndexError."""
    from transformers import MixtralConfig, MixtralForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = MixtralConfig(
        vocab_size=300, num_key_value_heads=2, num_local_experts=4, bos_token_id=0, eos_token_id=1, **sizes
    )
    MixtralForCausalLM(config).save_pretrained(tmp_path / "model")
    copy_tokenizer(tmp_path / "model")
    options = [word for one in (*SMALL, f"corpus.source={short_corpus}") for word in ("--set", one)]
    command = ["profile", "--model", tmp_path / "model", "--out", tmp_path / "out", "--quiet", *options]
    for more in ([], ["--set", "stream=always"]):
        finished = moeq.run(*command, *more)
        assert_refused(finished, MODEL, str(tmp_path / "model" / "tokenizer.json"), "vocabulary of 300")


def test_tokens_of_packed_embeddings() -> None:
    """Their own weight is a guard of one number."""
    model = torch.nn.Module()
    model.config = None
    packed = PackedEmbedding(torch.nn.Embedding(10, 16), 4, Encoding(group_size=16, symmetric=False))
    model.get_input_embeddings = lambda: packed
    check_tokens(model, torch.tensor([[0, 9]]))
    check_tokens(model, torch.tensor([], dtype=torch.long))
    with pytest.raises(ModelError, match="token 10 is beyond the model's vocabulary of 10"):
        check_tokens(model, torch.tensor([[0, 10]]))


def test_names_that_are_no_models(moeq: ForkServer, tmp_path: Path) -> None:
    for name in ("n" * 5000, "/" + "n" * 5000, f"{tmp_path}/{'n' * 300}"):
        finished = moeq.run("inspect" if "/" in name else "profile", *([name] if "/" in name else ["--model", name]))
        assert finished.code in {MODEL, ARTIFACT, STORAGE}, finished.stderr
        assert_refused(finished, finished.code, name[:60])
        assert len(finished.stderr) < 1000


@pytest.mark.cases(4)
@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("image_mean", "grey"), ("image_mean", [[1, 2], [3]]), ("image_std", [1, 2, 3, 4, 5]), ("image_std", {"a": 1}),
        ("rescale_factor", "none"),
    ],
)  # fmt: skip
def test_preprocessor(moeq: ForkServer, tmp_path: Path, key: str, value: Any) -> None:
    """Of an image classifier: how pixels are made of images."""
    from moeq.bundled import bundled_path

    change = _set(do_normalize=True, do_rescale=True, **{key: value})
    model = edited(bundled_path("tiny-moe-vit"), tmp_path, "preprocessor_config.json", change)
    options = ["--out", tmp_path / "out", "--set", "corpus.source=digits", "--quiet"]
    finished = moeq.run("profile", "--model", model, *options)
    assert_refused(finished, CORPUS, str(model / "preprocessor_config.json"), key)


def test_what_configurations_may_hold(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    check_config({"auto_map": None, "quantization_config": {}, "text_config": {"vocab_size": 1}, "x": [1]}, file)
    check_config({"num_attention_heads": [1, 2], "max_position_embeddings": 1200.0}, file)
    check_config({"architectures": None, "vocab_size": None, "ffn_config": {"moe_top_k": 2}}, file)
    check_top_k({"top_k": 50, "num_experts_per_tok": None, "text_config": {"moe_topk": [1, 4]}}, 4, file)
    for key in TOP_K:
        for value in (0, 5, -1, True, "2", 1.0, [2, 5]):
            with pytest.raises(ModelError, match=f"config.json: text_config.{key}"):
                check_top_k({"text_config": {key: value}}, 4, file)
