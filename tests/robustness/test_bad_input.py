"""Every wrong input ends in one line that says what, where and what to do, and leaves nothing half-written."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import yaml
from fork_server import Finished, ForkServer
from robustness.runs import can_mount, mounted, partials, remount, restamp, snapshot, tiny_recipe, write_recipe
from safetensors.torch import load_file, save_file

from moeq.artifacts.run import DIRECTORIES
from moeq.folders import bytes_in
from moeq.models.source import INDEX
from moeq.tables import human_size

RECIPE, MODEL, CORPUS, QUANTIZATION, ASSIGNMENT, ARTIFACT, STORAGE, EVALUATION, ESTIMATE, PLAN, FORMAT, MISSING = range(
    2, 14
)
NOT_THERE = "no such file or directory"
EXPERT = "model.layers.{}.block_sparse_moe.experts.{}.w1.weight"


def assert_refused(finished: Finished, code: int, *parts: str) -> None:
    """The exit code, and one line on standard error that holds every part and some advice."""
    assert finished.code == code, finished.stderr
    assert "Traceback" not in finished.stderr
    lines = finished.stderr.splitlines()
    assert [line for line in lines if line.startswith("moeq: ")] == lines, "nothing but one line"
    assert len(lines) == 1, lines
    what, semicolon, advice = lines[0].rpartition("; ")
    assert semicolon
    assert len(what) > len("moeq: ")
    assert advice
    for part in parts:
        assert part in lines[0], lines[0]


def assert_nothing_left(out: Path) -> None:
    assert partials(out) == []
    assert not (out / "checkpoint").exists()


class Models:
    """Broken copies of the tiny model."""

    def __init__(self, whole: Path, folder: Path) -> None:
        self.whole, self.folder = whole, folder

    def copy(self) -> Path:
        return Path(shutil.copytree(self.whole, self.folder / "model"))

    def empty(self) -> Path:
        path = self.folder / "model"
        path.mkdir()
        return path

    def shard(self, model: Path, tensor: str) -> Path:
        return model / json.loads((model / INDEX).read_text("utf-8"))["weight_map"][tensor]

    def edited(self, tensor: str, edit: Callable[[torch.Tensor], torch.Tensor | None]) -> Path:
        """A copy in which one tensor was replaced (None: taken out of its shard)."""
        model = self.copy()
        shard = self.shard(model, tensor)
        tensors = load_file(shard)
        new = edit(tensors.pop(tensor))
        save_file(tensors if new is None else tensors | {tensor: new}, shard, {"format": "pt"})
        return model


@pytest.fixture
def models(tiny_model: Path, tmp_path: Path) -> Models:
    return Models(tiny_model, tmp_path)


# --- models


def _file(models: Models) -> Path:
    path = models.folder / "model"
    path.write_text("hello")
    return path


def _nowhere(models: Models) -> Path:
    return models.folder / "model"


def _config(text: str) -> Callable[[Models], Path]:
    def make(models: Models) -> Path:
        model = models.copy()
        (model / "config.json").write_text(text)
        return model

    return make


def _changed_config(**changes: Any) -> Callable[[Models], Path]:
    def make(models: Models) -> Path:
        model = models.copy()
        path = model / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text("utf-8")) | changes))
        return model

    return make


def _dense(models: Models) -> Path:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=2048, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
    )
    model = models.copy()
    for path in model.glob("model*"):
        path.unlink()
    LlamaForCausalLM(config).save_pretrained(model)
    return model


def _doge(models: Models) -> Path:
    from transformers import DogeConfig

    model = models.copy()
    for path in model.glob("model*"):
        path.unlink()
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    DogeConfig(is_moe=True, num_experts=4, **sizes).save_pretrained(model)
    save_file({"lm_head.weight": torch.zeros(4, 4)}, model / "model.safetensors", {"format": "pt"})
    return model


def _cut(size: Callable[[int], int]) -> Callable[[Models], Path]:
    def make(models: Models) -> Path:
        model = models.copy()
        path = sorted(model.glob("*.safetensors"))[0]
        data = path.read_bytes()
        path.write_bytes(data[: size(len(data))])
        return model

    return make


def _header(text: str) -> Callable[[Models], Path]:
    """A first shard whose header is this JSON."""

    def make(models: Models) -> Path:
        model = models.copy()
        path = sorted(model.glob("*.safetensors"))[0]
        path.write_bytes(len(text).to_bytes(8, "little") + text.encode())
        return model

    return make


def _wrong_shape(models: Models) -> Path:
    return models.edited("model.norm.weight", lambda tensor: tensor[:-1].clone())


def _wrong_expert_shape(models: Models) -> Path:
    return models.edited(EXPERT.format(1, 2), lambda tensor: tensor[:, :-1].clone())


def _swapped_expert_shape(models: Models) -> Path:
    """As many weights as it should have, but transposed."""
    return models.edited(EXPERT.format(1, 2), lambda tensor: tensor.T.contiguous())


def _lacking_tensor(models: Models) -> Path:
    return models.edited("model.norm.weight", lambda tensor: None)


def _missing_shard(models: Models) -> Path:
    model = models.copy()
    models.shard(model, EXPERT.format(1, 2)).unlink()
    return model


def _missing_weights(models: Models) -> Path:
    model = models.copy()
    for path in model.glob("model*"):
        path.unlink()
    return model


def _gguf(models: Models) -> Path:
    model = _missing_weights(models)
    (model / "model.gguf").touch()
    return model


def _another_name(models: Models) -> Path:
    """Weights in one file, as AutoGPTQ called it."""
    model = _missing_weights(models)
    save_file({"model.norm.weight": torch.ones(4)}, model / "gptq_model-4bit-128g.safetensors", {"format": "pt"})
    return model


def _bad_index(models: Models) -> Path:
    model = models.copy()
    (model / INDEX).write_text("[1, 2]")
    return model


def _index_without_an_expert(models: Models) -> Path:
    model = models.copy()
    path = model / INDEX
    index = json.loads(path.read_text("utf-8"))
    shard = models.shard(model, EXPERT.format(0, 0))
    del index["weight_map"][EXPERT.format(0, 0)]
    path.write_text(json.dumps(index))
    tensors = load_file(shard)
    tensors.pop(EXPERT.format(0, 0))
    save_file(tensors, shard, {"format": "pt"})
    return model


def _no_tokenizer(models: Models) -> Path:
    model = models.copy()
    for path in model.glob("tokenizer*"):
        path.unlink()
    return model


def _bad_tokenizer(models: Models) -> Path:
    model = models.copy()
    (model / "tokenizer.json").write_text("{}")
    return model


MODELS: dict[str, tuple[Callable[[Models], Path], str]] = {
    "empty directory": (Models.empty, "not a model directory: no config.json"),
    "a file": (_file, "not a directory"),
    "nowhere": (_nowhere, NOT_THERE),
    "config.json is no JSON": (_config("{"), "config.json: not valid JSON"),
    "config.json is a list": (_config("[]"), "config.json: no model_type"),
    "no model_type": (_config("{}"), "config.json: no model_type"),
    "unknown model_type": (_changed_config(model_type="mixtrail"), "mixtrail"),
    "configuration of wrong types": (_changed_config(hidden_size="many"), "hidden_size"),
    "fewer experts than the weights": (_changed_config(num_local_experts=4), "expert tensors hold"),
    "more layers than the weights": (_changed_config(num_hidden_layers=4), "expert tensors hold"),
    "another hidden size": (_changed_config(hidden_size=48), "expert tensors hold"),
    "already quantized": (
        _changed_config(quantization_config={"quant_method": "gptq", "bits": 4}),
        "already quantized",
    ),
    "dense": (_dense, "not a Mixture-of-Experts model"),
    "unsupported family": (_doge, "are not supported: its experts are single rows"),
    "cut in the data": (_cut(lambda size: size - 100), "truncated"),
    "cut in the header": (_cut(lambda size: 60), "truncated"),
    "cut in the first number": (_cut(lambda size: 4), "truncated"),
    "empty shard": (_cut(lambda size: 0), "truncated"),
    "header is no JSON": (_header("{"), "not a safetensors file"),
    "header is a list": (_header("[]"), "not a safetensors file"),
    "header without offsets": (_header('{"a": {"dtype": "F32", "shape": [1]}}'), "not a safetensors file"),
    "wrong shape": (_wrong_shape, "model.norm.weight"),
    "wrong shape of an expert": (_wrong_expert_shape, "weight"),
    "transposed expert": (_swapped_expert_shape, "experts"),
    "missing shard": (_missing_shard, "shard is missing"),
    "shard lacks a tensor": (_lacking_tensor, "tensor model.norm.weight is not in the shard"),
    "no weights": (_missing_weights, "neither model.safetensors nor model.safetensors.index.json; download"),
    "weights of llama.cpp's": (_gguf, "no safetensors weights, but model.gguf; run it with llama.cpp; `moeq convert"),
    "weights by another name": (_another_name, "gptq_model-4bit-128g.safetensors; if it holds all weights, call it"),
    "index of no use": (_bad_index, "not a weight index"),
    "one expert missing": (_index_without_an_expert, "expert tensors hold"),
    "no tokenizer": (_no_tokenizer, "no tokenizer"),
    "broken tokenizer": (_bad_tokenizer, "tokenizer cannot be loaded"),
}


@pytest.mark.cases(1)
@pytest.mark.parametrize("case", MODELS)
def test_model(moeq: ForkServer, recipe: Path, models: Models, tmp_path: Path, case: str) -> None:
    make, message = MODELS[case]
    model, out = make(models), tmp_path / "out"
    finished = moeq.run("run", recipe, "--model", model, "--out", out, "--quiet")
    code = MISSING if message in {NOT_THERE, "shard is missing"} else MODEL
    assert_refused(finished, code, str(model) if case not in {"dense", "unsupported family"} else "", message)
    assert_nothing_left(out)


@pytest.mark.cases(2)
@pytest.mark.parametrize("name", ["bundled:tiny-mixtrail", "no-such-org/no-such-model", "not a name"])
def test_model_name(moeq: ForkServer, recipe: Path, tmp_path: Path, name: str) -> None:
    out = tmp_path / "out"
    finished = moeq.run("run", recipe, "--model", name, "--out", out, "--quiet", env={"HF_HUB_OFFLINE": "1"})
    assert_refused(finished, MODEL, name)
    assert not out.exists()


@pytest.mark.cases(1)
@pytest.mark.parametrize("layer", [0, 1, 2])
def test_weights_that_are_not_numbers(
    moeq: ForkServer, recipe: Path, models: Models, tmp_path: Path, layer: int
) -> None:
    """Wherever the NaN is (the last layer's reaches no other expert), a layer that it reaches is named."""
    model = models.edited(EXPERT.format(layer, 2), lambda tensor: tensor.index_fill(0, torch.tensor([3]), torch.nan))
    out = tmp_path / "out"
    finished = moeq.run("run", recipe, "--model", model, "--out", out, "--quiet")
    assert finished.code in {MODEL, QUANTIZATION}, finished.stderr
    assert_refused(finished, finished.code, "model.layers.", "finite")
    assert_nothing_left(out)


def test_no_model(moeq: ForkServer, recipe: Path, tmp_path: Path) -> None:
    bare = yaml.safe_load(recipe.read_text("utf-8"))
    del bare["model"]
    finished = moeq.run("run", write_recipe(tmp_path / "r.yaml", bare), "--out", tmp_path / "out", "--quiet")
    assert_refused(finished, RECIPE, "no model", "r.yaml", "give --model")


# --- corpus

GOOD = json.dumps({"text": "some words " * 400, "domain": "a"})
TEXTS: dict[str, tuple[str, bytes | None, list[str]]] = {
    "missing": ("none.jsonl", None, [NOT_THERE]),
    "unknown kind": ("text.csv", b"a,b", ["not a text file", ".jsonl"]),
    "empty txt": ("text.txt", b"", ["no text"]),
    "empty jsonl": ("text.jsonl", b"", ["no text"]),
    "only blanks": ("text.jsonl", b'{"text": "  "}\n\n', ["no text"]),
    "too short": ("text.txt", b"only a few words", ["too short"]),
    "bad row": ("text.jsonl", f"{GOOD}\n\n{{oops\n{GOOD}\n".encode(), ["row 3", "not JSON lines"]),
    "no field": ("text.jsonl", f'{GOOD}\n{{"txt": "a"}}\n'.encode(), ["row 2", "no text field 'text'", "txt"]),
    "no field after a blank line": ("text.jsonl", f'{GOOD}\n\n{{"txt": "a"}}\n'.encode(), ["row 3", "no text field"]),
    "field of another type": ("text.jsonl", b'{"text": 5}\n', ["row 1", "field 'text' is int, no text"]),
    "row is a list": ("text.jsonl", b"[1]\n", ["row 1"]),
    "rows within rows": ("text.jsonl", b'{"a":' * 200_000, ["row 1", "nested too deeply"]),
    "more values than a row has": ("text.jsonl", b'{"a": [' + b"0," * 1_100_000 + b"0]}", ["row 1", "parts"]),
    "a number of 5,000 digits": ("text.jsonl", b'{"a": ' + b"9" * 5000 + b"}", ["row 1", "digits"]),
    "a text of null": ("text.jsonl", b'{"text": null}\n', ["row 1", "field 'text' is null, no text", "drop the row"]),
    "half of a surrogate pair": ("text.jsonl", b'{"text": "\\ud800"}\n', ["row 1", "surrogate"]),
    "not UTF-8": ("text.txt", b"\xff\xfe\x00", ["UTF-8"]),
    "not Parquet": ("text.parquet", b"PAR1 or not", ["not a Parquet file"]),
}


@pytest.mark.cases(3)
@pytest.mark.parametrize("case", TEXTS)
def test_corpus(moeq: ForkServer, recipe: Path, tmp_path: Path, case: str) -> None:
    name, data, messages = TEXTS[case]
    text, out = tmp_path / name, tmp_path / "out"
    if data is not None:
        text.write_bytes(data)
    finished = moeq.run("run", recipe, "--out", out, "--set", f"corpus.source={text}", "--quiet")
    assert_refused(finished, MISSING if data is None else CORPUS, str(text), *messages)
    assert not out.exists(), "found before the first write"


@pytest.mark.cases(3)
@pytest.mark.parametrize("case", TEXTS)
def test_evaluation_text(moeq: ForkServer, recipe: Path, tmp_path: Path, case: str) -> None:
    """The text of the last long stage is looked at before the first one begins."""
    name, data, messages = TEXTS[case]
    text, out = tmp_path / name, tmp_path / "out"
    if data is not None:
        text.write_bytes(data)
    finished = moeq.run("run", recipe, "--out", out, "--set", f"eval.perplexity.source={text}", "--quiet")
    assert_refused(finished, MISSING if data is None else CORPUS, str(text), *messages)
    assert not out.exists(), "found before the first write"


def test_directory_as_corpus(moeq: ForkServer, recipe: Path, tmp_path: Path) -> None:
    finished = moeq.run("run", recipe, "--out", tmp_path / "out", "--set", f"corpus.source={tmp_path}", "--quiet")
    assert_refused(finished, CORPUS, str(tmp_path))


# --- recipes

RECIPES: dict[str, tuple[str, list[str]]] = {
    "unknown key": ("assing:\n  code_bits: 2\n", ["line 1", "assing", "did you mean 'assign'?"]),
    "unknown nested key": ("assign:\n  code_bit: 2\n", ["line 2", "code_bit", "did you mean 'code_bits'?"]),
    "unknown key in a list": (
        "eval:\n  compare:\n    - {name: a, method: uniform, bits: 4}\n    - {name: b, metod: uniform, bits: 3}\n",
        ["line 4", "metod", "did you mean 'method'?"],
    ),
    "wrong type": ("name: a\ncorpus:\n  sequences: many\n", ["line 3", "corpus.sequences", "'many'"]),
    "section is a number": ("name: a\ncorpus: 3\n", ["line 2", "corpus"]),
    "empty section": ("name: a\ncorpus:\n", ["line 2", "corpus"]),
    "average above 4": ("assign: {method: prefix-split, code_bits: 7}\n", ["line 1", "code_bits", "between 1 and 4"]),
    "average not a number": ("assign: {code_bits: 5/0}\n", ["line 1", "code_bits"]),
    "uniform without bits": ("assign: {method: uniform}\n", ["line 1", "needs bits"]),
    "bits without a replica": (
        "losses: {bits: [1, 2, 3, 4]}\nassign: {method: uniform, bits: 8}\n",
        ["8 bits is not among losses.bits"],
    ),
    "unknown width": ("losses: {bits: [2, 5]}\n", ["line 1", "losses.bits"]),
    "no widths": ("losses: {bits: []}\neval: {compare: []}\n", ["losses", "bits"]),
    "width twice": ("losses: {bits: [1, 1, 2, 3, 4]}\n", ["losses", "bits"]),
    "unknown method": ("assign: {method: magic, code_bits: 2}\n", ["line 1", "assign.method", "magic"]),
    "group of none": ("losses: {group_size: 0}\n", ["line 1", "group_size"]),
    "group of two": ("losses: {group_size: 2}\n", ["line 1", "group_size"]),
    "no sequences": ("corpus: {sequences: 0}\n", ["line 1", "corpus.sequences"]),
    "unknown unit": ("export: {max_shard: 5 parsecs}\n", ["line 1", "export.max_shard", "GiB"]),
    "size without digits": ("export: {max_shard: .GB}\n", ["line 1", "export.max_shard"]),
    "another version": ("recipe_version: 2\n", ["line 1", "recipe_version"]),
    "two of a name": ("name: a\neval: {compare: [{name: a, method: uniform, bits: 2}]}\n", ["eval.compare"]),
    "bad device": ("device: tpu\n", ["line 1", "device"]),
    "key twice": ("seed: 1\nseed: 2\ncorpus: {sequences: 1000000}\n", ["line 2", "seed"]),
    "no YAML": ("a: [1,\nb: 2\n", ["line 3", "not valid YAML"]),
    "tab": ("corpus:\n\tsequences: 3\n", ["line 2", "not valid YAML"]),
    "two documents": ("seed: 1\n---\nseed: 2\n", ["not valid YAML"]),
    "a list": ("- 1\n", ["mapping"]),
    "a sentence": ("quantize my model", ["mapping"]),
    "a Python object": ("name: !!python/object:os.system {}\n", ["line 1", "not valid YAML"]),
    "key that is no text": ("1: 2\n", ["line 1", "1"]),
    "binary": ("\x00\x01", ["YAML"]),
}


@pytest.mark.cases(4)
@pytest.mark.parametrize("case", RECIPES)
def test_recipe(moeq: ForkServer, tiny_model: Path, tmp_path: Path, case: str) -> None:
    text, messages = RECIPES[case]
    path, out = tmp_path / "r.yaml", tmp_path / "out"
    path.write_text(text)
    finished = moeq.run("run", path, "--model", tiny_model, "--out", out, "--quiet")
    assert_refused(finished, RECIPE, str(path), *messages)
    assert not out.exists()


@pytest.mark.cases(4)
@pytest.mark.parametrize(
    ("override", "messages"),
    [
        ("assign.code_bits", ["key=value", "--set"]),
        ("=3", ["key=value"]),
        ("assign.code_bits=17", ["--set: assign.code_bits", "code_bits", "between 1 and 16"]),
        ("assign.code_bit=2", ["--set", "did you mean 'code_bits'?"]),
        ("assign..x=2", ["--set"]),
        ("seed.x=2", ["--set", "seed"]),
        ("seed=[", ["--set", "YAML"]),
        ("seed=soon", ["--set: seed", "'soon'"]),
    ],
)
def test_override(moeq: ForkServer, recipe: Path, tmp_path: Path, override: str, messages: list[str]) -> None:
    finished = moeq.run("run", recipe, "--out", tmp_path / "out", "--set", override, "--quiet")
    assert_refused(finished, RECIPE, *messages)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("name", "code"), [("none.yaml", MISSING), (".", MODEL)])
def test_neither_a_recipe_nor_a_model(moeq: ForkServer, tmp_path: Path, name: str, code: int) -> None:
    finished = moeq.run("run", tmp_path / name, "--out", tmp_path / "out", "--quiet")
    assert_refused(finished, code, str(tmp_path))


# --- assignment, evaluation, estimate


def test_prefix_split_without_a_width(moeq: ForkServer, recipe: Path, tmp_path: Path) -> None:
    """Said before any replica is made."""
    out, options = tmp_path / "out", ["--set", "losses.bits=[2, 4]", "--set", "eval.compare=[]", "--quiet"]
    options += ["--set", "assign.method=prefix-split"]
    finished = moeq.run("run", recipe, "--out", out, *options)
    assert finished.code in {RECIPE, ASSIGNMENT}
    assert_refused(finished, finished.code, "losses.bits", "[1, 3]")
    assert not (out / "losses").exists()


def test_more_gpu_experts_than_experts(moeq: ForkServer, recipe: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    finished = moeq.run("run", recipe, "--out", out, "--set", "assign.gpu_experts=6", "--quiet")
    assert_refused(finished, ASSIGNMENT, "gpu_experts is 6", "5 experts")
    assert_nothing_left(out)


HARDWARE = yaml.safe_load((Path(__file__).parents[2] / "moeq/estimator/hardware/paper-ctxmoe.yaml").read_text("utf-8"))


def _hardware(path: Path, section: str, key: str, constant: Any) -> Path:
    tree = json.loads(json.dumps(HARDWARE))
    if constant is None:
        del tree[section][key]
    else:
        tree[section][key] = constant
    path.write_text(yaml.safe_dump(tree))
    return path


@pytest.mark.full
@pytest.mark.parametrize(
    ("section", "key", "constant", "message"),
    [
        ("gpu", "memory_bandwidth", {"value": 3.35, "source": "x"}, "no unit"),
        ("gpu", "memory_bandwidth", {"value": "3.35 GHz", "source": "x"}, "wrong dimension"),
        ("gpu", "memory_bandwidth", {"value": "fast", "source": "x"}, "not a number"),
        ("gpu", "memory_bandwidth", {"value": "3 TB/s"}, "no source"),
        ("gpu", "memory_bandwidth", None, "missing key 'gpu.memory_bandwidth'"),
        ("link", "bandwith", {"value": "3 TB/s", "source": "x"}, "did you mean 'link.bandwidth'?"),
        ("ndp", "memory_efficiency", {"value": 1.5, "source": "x"}, "ndp.memory_efficiency"),
    ],
)
def test_hardware_file(
    moeq: ForkServer, run_copy: Path, tmp_path: Path, section: str, key: str, constant: Any, message: str
) -> None:
    path = _hardware(tmp_path / "hw.yaml", section, key, constant)
    finished = moeq.run("estimate", "--out", run_copy, "--set", f"estimate.hardware={path}", "--quiet")
    assert_refused(finished, ESTIMATE, str(path), message)
    assert partials(run_copy) == []


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("key", "value", "messages"),
    [
        ("hardware", "paper-ctxmo", ["unknown hardware", "did you mean 'paper-ctxmoe'?"]),
        ("hardware", "none.yaml", [NOT_THERE, "none.yaml"]),
        ("geometry", "mixtral-8x7b", ["8 experts", "5"]),
        ("geometry", "mixtral-8x7", ["mixtral-8x7"]),
    ],
)
@pytest.mark.parametrize("command", ["estimate", "run"])
def test_estimate(
    moeq: ForkServer, recipe: Path, run_copy: Path, tmp_path: Path, command: str, key: str, value: str, messages: list
) -> None:
    """`run` says so before it spends hours on the other stages."""
    option, code = ["--set", f"estimate.{key}={value}", "--quiet"], MISSING if NOT_THERE in messages else ESTIMATE
    if command == "estimate":
        assert_refused(moeq.run("estimate", "--out", run_copy, *option), code, *messages)
    else:
        assert_refused(moeq.run("run", recipe, "--out", tmp_path / "out", *option), code, *messages)
        assert not (tmp_path / "out" / "losses").exists()


@pytest.mark.full
def test_unknown_task(moeq: ForkServer, recipe: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    finished = moeq.run("run", recipe, "--out", out, "--set", "eval.tasks=[moeq_continuatio]", "--quiet")
    assert_refused(finished, EVALUATION, "moeq_continuatio", "did you mean 'moeq_continuation'")
    assert not (out / "losses").exists()


@pytest.mark.full
def test_broken_task_file(moeq: ForkServer, run_copy: Path, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "mine.yaml").write_text(
        "task: mine\ndataset_path: no-such-data\noutput_type: multiple_choice\n"
    )
    options = ["--set", f"eval.include_path={tmp_path / 'mine'}", "--set", "eval.tasks=[mine]", "--quiet"]
    assert_refused(moeq.run("eval", "--out", run_copy, *options), EVALUATION, "mine")
    (tmp_path / "mine" / "mine.yaml").write_text("task: [\n")
    assert_refused(moeq.run("eval", "--out", run_copy, *options), EVALUATION, "mine")
    os.mkfifo(tmp_path / "mine" / "pipe.yaml")
    assert_refused(moeq.run("eval", "--out", run_copy, *options), EVALUATION, "pipe.yaml", "not a regular file")
    none = ["--set", "eval.include_path=/none", "--set", "eval.tasks=[mine]", "--quiet"]
    assert_refused(moeq.run("eval", "--out", run_copy, *none), MISSING, "/none")


# --- artifacts


@pytest.mark.cases(1)
@pytest.mark.parametrize("stage", ["assign", "quantize", "export", "eval", "estimate", "report"])
def test_stage_before_its_inputs(moeq: ForkServer, recipe: Path, tmp_path: Path, stage: str) -> None:
    out = tmp_path / "out"
    finished = moeq.run(stage, recipe, "--out", out, "--quiet")
    assert_refused(finished, ARTIFACT, str(out), "has not been run", "moeq run")
    assert_nothing_left(out)


def test_stage_on_another_model(moeq: ForkServer, models: Models, run_copy: Path) -> None:
    other = models.edited("model.norm.weight", lambda tensor: tensor + 1)
    finished = moeq.run("assign", "--out", run_copy, "--model", other, "--quiet")
    assert_refused(finished, ARTIFACT, "another model", "choose another --out")


def _json_version(name: str) -> Callable[[Path], None]:
    def edit(run: Path) -> None:
        path = run / name
        path.write_text(json.dumps(json.loads(path.read_text("utf-8")) | {"schema_version": 99}))

    return edit


def _parquet_version(run: Path) -> None:
    path = run / "losses" / "losses.parquet"
    table = pq.read_table(path)
    pq.write_table(table.replace_schema_metadata({"moeq_schema_version": "99"}), path)


def _replica_version(run: Path) -> None:
    for path in (run / "store").rglob("*.safetensors"):
        save_file(load_file(path), path, {"moeq_schema_version": "99", "entries": "{}"})


VERSIONS: dict[str, tuple[Callable[[Path], None], str, str]] = {
    "stage.json": (_json_version("profile/stage.json"), "assign", "profile/stage.json"),
    "profile.json": (_json_version("profile/profile.json"), "assign", "profile.json"),
    "losses.parquet": (_parquet_version, "assign", "losses.parquet"),
    "replicas.json": (_json_version("losses/replicas.json"), "quantize", "replicas.json"),
    "quantizers.json": (_json_version("quantize/quantizers.json"), "export", "quantizers.json"),
    "replicas": (_replica_version, "quantize", "layer-000.safetensors"),
    "assignment.json": (_json_version("assign/assignment.json"), "quantize", "assignment.json"),
    "eval.json": (_json_version("eval/eval.json"), "report", "eval.json"),
    "estimate.json": (_json_version("estimate/estimate.json"), "report", "estimate.json"),
}


@pytest.mark.cases(1)
@pytest.mark.parametrize("case", VERSIONS)
def test_another_schema_version(moeq: ForkServer, run_copy: Path, case: str) -> None:
    edit, stage, name = VERSIONS[case]
    edit(run_copy)
    restamp(run_copy)
    shutil.rmtree(run_copy / DIRECTORIES.get(stage, stage))
    finished = moeq.run(stage, "--out", run_copy, "--quiet")
    assert_refused(finished, ARTIFACT, name, "99")
    assert partials(run_copy) == []


def test_another_manifest_version(moeq: ForkServer, run_copy: Path) -> None:
    _json_version("checkpoint/placement.json")(run_copy)
    assert_refused(moeq.run("inspect", run_copy / "checkpoint"), ARTIFACT, "placement.json", "99")


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("profile/profile.json", "[]"),
        ("profile/profile.json", "{}"),
        ("profile/profile.json", '{"schema_version": 1}'),
        ("profile/profile.json", '{"schema_version": 1, "layers": [{"name": "a"}]}'),
        ("profile/profile.json", "not JSON"),
        ("profile/stage.json", "[]"),
        ("profile/stage.json", '{"schema_version": 1}'),
        ("profile/profile.safetensors", ""),
        ("losses/losses.parquet", "not Parquet"),
    ],
)
def test_damaged_artifact(moeq: ForkServer, run_copy: Path, name: str, content: str) -> None:
    (run_copy / name).write_text(content)
    shutil.rmtree(run_copy / "assign")
    assert_refused(moeq.run("assign", "--out", run_copy, "--quiet"), ARTIFACT, str(run_copy / name))


def test_loss_table_without_its_columns(moeq: ForkServer, run_copy: Path) -> None:
    path = run_copy / "losses" / "losses.parquet"
    pq.write_table(pa.table({"a": [1]}).replace_schema_metadata({"moeq_schema_version": "1"}), path)
    shutil.rmtree(run_copy / "assign")
    assert_refused(moeq.run("assign", "--out", run_copy, "--quiet"), ARTIFACT, "losses.parquet")


def _edit_assignment(run: Path, **changes: Any) -> None:
    path = run / "assign" / "assignment.json"
    assignment = json.loads(path.read_text("utf-8"))
    assignment["layers"][1]["experts"][2] |= changes
    path.write_text(json.dumps(assignment))


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("changes", "message"),
    [({"bits": 5}, "bits must be one of"), ({"tier": "moon"}, "tier"), ({"importance": -1}, "importance")],
)
@pytest.mark.parametrize("quantized", [False, True])
def test_hand_edited_assignment(
    moeq: ForkServer, run_copy: Path, changes: dict[str, Any], message: str, quantized: bool
) -> None:
    """Noticed whether or not the stage after it has been run before."""
    _edit_assignment(run_copy, **changes)
    if not quantized:
        shutil.rmtree(run_copy / "quantize")
    finished = moeq.run("quantize", "--out", run_copy, "--quiet")
    assert_refused(finished, ARTIFACT, "assignment.json", "layers.1.experts.2", message)


def test_hand_edited_width_that_was_not_made(moeq: ForkServer, run_copy: Path) -> None:
    _edit_assignment(run_copy, bits=3)
    recipe = run_copy / "recipe.yaml"
    widths = yaml.safe_load(recipe.read_text("utf-8"))
    widths["losses"]["bits"] = [2, 4, 8]
    widths["assign"] = {"method": "uniform", "bits": 2}
    widths["eval"]["compare"] = []
    recipe.write_text(yaml.safe_dump(widths))
    shutil.rmtree(run_copy / "quantize")
    finished = moeq.run("quantize", "--out", run_copy, "--quiet")
    assert_refused(finished, ASSIGNMENT, "assignment.json", ", expert ", "bits is not among losses.bits")


def test_edited_assignment_is_used(moeq: ForkServer, run_copy: Path) -> None:
    """What FORMATS promises: an assignment can be edited, and the stages after it follow."""
    path = run_copy / "assign" / "assignment.json"
    bits = json.loads(path.read_text("utf-8"))["layers"][1]["experts"][2]["bits"]
    _edit_assignment(run_copy, bits=8 if bits != 8 else 4)
    for stage in ("quantize", "export"):
        finished = moeq.run(stage, "--out", run_copy, "--quiet")
        assert finished.code == 0, finished.stderr
    manifest = json.loads((run_copy / "checkpoint" / "placement.json").read_text("utf-8"))
    assert manifest["layers"][1]["experts"][2]["bits"] == 8


def test_assignment_of_another_model(moeq: ForkServer, run_copy: Path) -> None:
    path = run_copy / "assign" / "assignment.json"
    assignment = json.loads(path.read_text("utf-8"))
    assignment["layers"].pop()
    path.write_text(json.dumps(assignment))
    shutil.rmtree(run_copy / "quantize")
    finished = moeq.run("quantize", "--out", run_copy, "--quiet")
    assert_refused(finished, ASSIGNMENT, "assignment.json", "layers, the model has")
    assignment = json.loads(path.read_text("utf-8"))
    assignment["layers"][0]["experts"].pop()
    path.write_text(json.dumps(assignment))
    finished = moeq.run("quantize", "--out", run_copy, "--quiet")
    assert_refused(finished, ASSIGNMENT, "assignment.json", assignment["layers"][0]["name"], "experts, in the model")


# --- inspect


def test_inspect_names_a_damaged_file_of_a_store(moeq: ForkServer, run_copy: Path) -> None:
    path = next((run_copy / "store").rglob("layer-002.safetensors"))
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    assert_refused(moeq.run("inspect", run_copy / "store"), ARTIFACT, str(path), "damaged", "moeq losses")


@pytest.mark.full
def test_inspect_accepts_what_is_whole(moeq: ForkServer, finished_run: Path, tiny_model: Path, recipe: Path) -> None:
    for path in [finished_run, *(p for p in finished_run.iterdir() if p.is_dir()), tiny_model, recipe]:
        finished = moeq.run("inspect", path)
        assert (finished.code, finished.stderr) == (0, ""), path


def flip(path: Path, position: int) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 1
    path.unlink()  # the file may be a hard link
    path.write_bytes(data)


@pytest.mark.cases(4)
@pytest.mark.parametrize("where", [0.0, 0.001, 0.5, 0.999])
@pytest.mark.parametrize(
    "name",
    [
        "placement.json",
        "config.json",
        "model.safetensors.index.json",
        "experts-layer-001.safetensors",
        "model-00001-of-00001.safetensors",
        "tokenizer.json",
    ],
)
def test_inspect_notices_a_flipped_bit(moeq: ForkServer, run_copy: Path, name: str, where: float) -> None:
    path = run_copy / "checkpoint" / name
    flip(path, int(where * path.stat().st_size))
    finished = moeq.run("inspect", run_copy / "checkpoint")
    assert finished.code in {MODEL, ARTIFACT}, "a damaged header is a ModelError"
    assert_refused(finished, finished.code, str(run_copy / "checkpoint"))


@pytest.mark.parametrize("change", ["missing", "truncated"])
def test_inspect_notices_a_broken_file(moeq: ForkServer, run_copy: Path, change: str) -> None:
    path = run_copy / "checkpoint" / "experts-layer-001.safetensors"
    data = path.read_bytes()
    path.unlink()
    if change == "truncated":
        path.write_bytes(data[:-10])
    finished = moeq.run("inspect", run_copy / "checkpoint")
    assert_refused(finished, finished.code, "experts-layer-001.safetensors")
    assert finished.code in {MODEL, ARTIFACT}


def test_inspect_of_anything(moeq: ForkServer, tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text("{}")
    (tmp_path / "b.bin").write_bytes(b"\x00")
    (tmp_path / "c.safetensors").write_bytes(b"\x00")
    (tmp_path / "d.parquet").write_bytes(b"\x00")
    (tmp_path / "e.yaml").write_text("x: 1")
    for path in [tmp_path, tmp_path / "none", *tmp_path.iterdir(), Path("/dev/null")]:
        finished = moeq.run("inspect", path)
        assert finished.code in {RECIPE, MODEL, ARTIFACT, MISSING}, (path, finished.stderr)
        assert_refused(finished, finished.code, str(path))


# --- the disk


@pytest.mark.cases(2)
@pytest.mark.parametrize("out", ["/proc/moeq-out", "/dev/null", "/dev/null/out"])
def test_place_that_cannot_be_written(moeq: ForkServer, recipe: Path, out: str) -> None:
    assert_refused(moeq.run("run", recipe, "--out", out, "--quiet"), STORAGE, out)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_no_permission(moeq: ForkServer, recipe: Path, tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    assert_refused(moeq.run("run", recipe, "--out", tmp_path / "out", "--quiet"), STORAGE, str(tmp_path / "out"))


def test_out_is_a_file(moeq: ForkServer, recipe: Path, tmp_path: Path) -> None:
    (tmp_path / "out").write_text("mine")
    assert_refused(moeq.run("run", recipe, "--out", tmp_path / "out", "--quiet"), STORAGE, str(tmp_path / "out"))
    assert (tmp_path / "out").read_text() == "mine"


@pytest.mark.full
def test_files_of_the_user_are_left_alone(moeq: ForkServer, recipe: Path, finished_run: Path, tmp_path: Path) -> None:
    """--out may be a directory in which other things lie."""
    out = tmp_path / "out"
    (out / "downloads").mkdir(parents=True)
    mine = [out / "film.mkv.partial", out / "downloads" / "other.partial", out / "notes.txt"]
    for path in mine:
        path.write_text("mine")
    finished = moeq.run("run", recipe, "--out", out, "--quiet")
    assert finished.code == 0, finished.stderr
    assert [path for path in mine if not path.exists()] == []


@pytest.mark.full
@pytest.mark.parametrize("limit", [0, 1000, 20_000, 400_000])
def test_files_that_may_not_grow(
    moeq: ForkServer, recipe: Path, finished_run: Path, tmp_path: Path, limit: int
) -> None:
    out = tmp_path / "out"
    finished = moeq.run("run", recipe, "--out", out, "--quiet", file_bytes=limit)
    assert_refused(finished, STORAGE, str(out), "cannot write")
    assert_nothing_left(out)
    assert moeq.run("run", recipe, "--out", out, "--quiet").code == 0, "goes on when there is room"
    assert _digest(out) == _digest(finished_run)


@pytest.mark.cases(1)
@pytest.mark.skipif(not can_mount(), reason="mounting needs root")
@pytest.mark.parametrize("kibibytes", [4, 64, 600, 1000])
def test_full_disk(moeq: ForkServer, recipe: Path, finished_run: Path, tmp_path: Path, kibibytes: int) -> None:
    with mounted(tmp_path / "disk", f"size={kibibytes}k") as disk:
        out = disk / "out"
        finished = moeq.run("run", recipe, "--out", out, "--quiet")
        assert_refused(finished, STORAGE, str(out), "No space left on device", "free some space")
        assert_nothing_left(out)
        remount(disk, "size=64m")
        assert moeq.run("run", recipe, "--out", out, "--quiet").code == 0, "goes on when there is room"
        assert _digest(out) == _digest(finished_run)


@pytest.mark.skipif(not can_mount(), reason="mounting needs root")
def test_a_disk_that_is_only_read(moeq: ForkServer, finished_run: Path, tmp_path: Path) -> None:
    """What would be freed there is told, and whatever needs nothing new is as it is."""
    with mounted(tmp_path / "disk") as disk:
        out = shutil.copytree(finished_run, disk / "out")
        (out / "store" / ("0" * 64)).mkdir()
        (out / "store" / ("0" * 64) / "layer-000.safetensors").write_bytes(b"1" * 100)
        remount(disk, "ro")
        dry = moeq.run("gc", out, "--dry-run", "--json")
        assert dry.code == 0, dry.stderr
        assert json.loads(dry.stdout)["freed_bytes"] == 100
        assert_refused(moeq.run("gc", out), STORAGE, str(out), "Read-only file system")
        again = moeq.run("run", out, "--quiet")
        assert again.code == 0, again.stderr


def _digest(run: Path) -> str:
    return str(json.loads((run / "checkpoint" / "stage.json").read_text("utf-8"))["digest"])


@pytest.mark.parametrize("options", [[], ["--json"]])
def test_standard_output_that_is_full(moeq: ForkServer, finished_run: Path, options: list[str]) -> None:
    """A result that cannot be printed is an error, not a success."""
    finished = moeq.run("inspect", finished_run / "checkpoint", *options, stdout="/dev/full")
    assert_refused(finished, STORAGE, "No space left on device")


def test_standard_error_that_is_full() -> None:
    """The exit code is what is left to say."""
    with open("/dev/full", "w", encoding="utf-8") as full:
        command = [sys.executable, "-m", "moeq", "inspect", "/nowhere/at/all"]
        assert subprocess.run(command, stderr=full, check=False, timeout=300).returncode == MISSING


# --- generate, JSON


def test_generate(moeq: ForkServer, finished_run: Path, tiny_model: Path, tmp_path: Path) -> None:
    checkpoint = finished_run / "checkpoint"
    assert_refused(moeq.run("generate", tmp_path, "a"), MODEL, str(tmp_path))
    assert_refused(moeq.run("generate", tmp_path / "none", "a"), MISSING, str(tmp_path / "none"))
    assert_refused(moeq.run("generate", tiny_model, "a"), ARTIFACT, str(tiny_model), "not exported by moeq")
    long = moeq.run("generate", checkpoint, "a", "--max-new-tokens", "500")
    assert_refused(long, EVALUATION, "500", "128 positions", "--max-new-tokens")
    device = moeq.run("generate", checkpoint, "a", "--device", "gpu")
    assert device.code in {RECIPE, MODEL}, device.stderr
    assert_refused(device, device.code, "gpu", "cuda")
    fine = moeq.run("generate", checkpoint, "", "--max-new-tokens", "3", "--json")
    assert fine.code == 0, fine.stderr
    assert json.loads(fine.stdout)["new_tokens"] <= 3


def test_generate_from_a_damaged_checkpoint(moeq: ForkServer, run_copy: Path) -> None:
    (run_copy / "checkpoint" / "experts-layer-001.safetensors").unlink()
    assert_refused(moeq.run("generate", run_copy / "checkpoint", "a"), MISSING, "experts-layer-001.safetensors")


def test_generate_from_a_changed_checkpoint(moeq: ForkServer, run_copy: Path) -> None:
    """What changed since the export is refused, but for the card, which people write in."""
    checkpoint = run_copy / "checkpoint"
    (checkpoint / "README.md").write_text("mine")
    fine = moeq.run("generate", checkpoint, "a", "--max-new-tokens", "1", "--quiet")
    assert (fine.code, fine.stdout) == (0, "")
    flip(checkpoint / "tokenizer.json", 100)
    assert_refused(moeq.run("generate", checkpoint, "a"), ARTIFACT, "tokenizer.json", "changed since SHA256SUMS")


@pytest.mark.parametrize(
    ("arguments", "code", "kind"),
    [
        (["run", "{recipe}", "--model", "/none", "--out", "{out}"], MISSING, "MissingError"),
        (["run", "{recipe}", "--set", "x", "--out", "{out}"], RECIPE, "RecipeError"),
        (["assign", "{recipe}", "--out", "{out}"], ARTIFACT, "ArtifactError"),
        (["inspect", "/none"], MISSING, "MissingError"),
        (["generate", "/none", "a"], MISSING, "MissingError"),
    ],
)
def test_json_error(moeq: ForkServer, recipe: Path, tmp_path: Path, arguments: list[str], code: int, kind: str) -> None:
    finished = moeq.run(*(a.format(recipe=recipe, out=tmp_path / "out") for a in arguments), "--json")
    assert_refused(finished, code)
    found = json.loads(finished.stdout)
    assert (found["error"], found["exit_code"]) == (kind, code)
    assert finished.stderr == f"moeq: {found['message']}\n"


@pytest.mark.parametrize("columns", ["40", "200"])
def test_paths_are_printed_as_they_are(
    moeq: ForkServer, recipe: Path, finished_run: Path, tmp_path: Path, columns: str
) -> None:
    """Blanks, umlauts and what rich would take for markup."""
    out = Path(shutil.copytree(finished_run, tmp_path / "mön [bold] run"))
    finished = moeq.run("run", recipe, "--out", out.name, cwd=tmp_path, env={"COLUMNS": columns})
    assert finished.code == 0, finished.stderr
    size = human_size(bytes_in(out / "checkpoint"))
    for line in (f"checkpoint mön [bold] run/checkpoint ({size})", "evaluation mön [bold] run/eval/eval.json"):
        assert line in finished.stdout.splitlines()


def test_the_installed_command(recipe: Path, tmp_path: Path) -> None:
    """Once without the fork server: the program that users start."""
    program = Path(sys.executable).with_name("moeq")
    command = [str(program), "run", str(recipe), "--model", "/none", "--out", str(tmp_path / "out"), "--quiet"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert_refused(Finished(done.returncode, done.stdout, done.stderr), MISSING, "/none")


def test_a_failing_run_changes_no_finished_artifact(moeq: ForkServer, recipe: Path, run_copy: Path) -> None:
    """A new setting that turns out wrong leaves the artifacts before it, and the next good run heals the rest."""
    before = snapshot(run_copy)
    finished = moeq.run("run", recipe, "--out", run_copy, "--set", "assign.gpu_experts=6", "--quiet")
    assert finished.code == ASSIGNMENT
    after = snapshot(run_copy)
    assert {
        name for name in before if name.startswith(("profile/", "losses/")) and after[name] != before[name]
    } == set()
    assert moeq.run("run", recipe, "--out", run_copy, "--quiet").code == 0
    healed = snapshot(run_copy)
    volatile = {name for name in healed if name.endswith("stage.json")}
    assert {name for name in before.keys() - volatile if healed[name][1] != before[name][1]} == set()


def test_recipe_that_asks_too_much(moeq: ForkServer, tiny_model: Path, short_corpus: Path, tmp_path: Path) -> None:
    """More sequences than there are, or too few to hold some out."""
    for changes, code, message in [
        ({"sequences": 100_000}, CORPUS, "100000 are wanted"),
        ({"sequences": 2}, CORPUS, "held out"),
        ({"sequence_length": 4096, "sequences": 1}, CORPUS, ""),
    ]:
        recipe = tiny_recipe(tiny_model, short_corpus)
        recipe["corpus"] |= changes
        out = tmp_path / "out"
        finished = moeq.run("run", write_recipe(tmp_path / "r.yaml", recipe), "--out", out, "--quiet")
        assert_refused(finished, code, "corpus", message)
        assert_nothing_left(out)
