"""Checkpoints whose numbers are odd: damaged weights are named by file and tensor, odd activations are left out."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch
import yaml
from fork_server import ForkServer
from robustness.runs import write_recipe
from robustness.test_bad_input import CORPUS, EXPERT, MODEL, QUANTIZATION, Models, assert_refused, models
from safetensors.torch import load_file, save_file

from moeq.exporters.native_reader import NativeReader
from moeq.models.source import INDEX
from moeq_kernels.packed import PackedWeight

__all__ = ["models"]  # the fixture


@pytest.mark.cases(1)
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("layer", [0, 1, 2])
def test_a_damaged_expert_is_named(
    moeq: ForkServer, recipe: Path, models: Models, tmp_path: Path, layer: int, value: float
) -> None:
    key = EXPERT.format(layer, 2)
    model = models.edited(key, lambda tensor: tensor.index_fill(0, torch.tensor([3]), value))
    finished = moeq.run("losses", recipe, "--model", model, "--out", tmp_path / "out", "--quiet")
    where = f"{models.shard(model, key)}: {key}: weights are not finite"
    assert_refused(finished, QUANTIZATION, where, f"model.layers.{layer}.mlp.experts, expert 2, gate_proj")


@pytest.mark.parametrize("key", ["model.embed_tokens.weight", "model.layers.1.self_attn.o_proj.weight"])
def test_a_damaged_weight_outside_the_experts_is_named(
    moeq: ForkServer, recipe: Path, models: Models, tmp_path: Path, key: str
) -> None:
    model = models.edited(key, lambda tensor: torch.full_like(tensor, torch.nan))
    finished = moeq.run("profile", recipe, "--model", model, "--out", tmp_path / "out", "--quiet")
    assert_refused(finished, QUANTIZATION, f"{models.shard(model, key)}: {key}: weights are not finite")


@pytest.mark.cases(1)
@pytest.mark.parametrize("value", [torch.nan, -torch.inf])
def test_tokens_that_are_not_finite_are_left_out_and_counted(
    moeq: ForkServer, recipe: Path, models: Models, tmp_path: Path, value: float
) -> None:
    """One word of the vocabulary is damaged: what comes after it in a sequence is lost, the rest goes on."""
    from tokenizers import Tokenizer

    word = Tokenizer.from_file(str(models.whole / "tokenizer.json")).encode(" the").ids[-1]
    model = models.edited("model.embed_tokens.weight", lambda tensor: tensor.index_fill(0, torch.tensor([word]), value))
    out = tmp_path / "out"
    finished = moeq.run("losses", recipe, "--model", model, "--out", out)
    assert finished.code == 0, finished.stderr
    printed = " ".join(finished.stderr.split())
    said = re.findall(r"model\.layers\.(\d)\.mlp\.experts: (\d+) of 768 tokens left out", printed)
    assert [int(layer) for layer, _ in said] == [0, 1, 2], finished.stderr
    assert all(0 < int(lost) < 768 for _, lost in said)
    assert re.search(r"fallbacks of 15 experts: .*left_out_tokens 15", printed)
    summary = json.loads((out / "losses" / "stage.json").read_text("utf-8"))["summary"]
    assert summary["fallbacks"]["left_out_tokens"] == summary["experts"] == 15
    rows = pq.read_table(out / "losses" / "losses.parquet").to_pylist()
    assert all("left_out_tokens" in row["fallback"] for row in rows if row["method"] == "gptq")
    assert all(row["loss"] < float("inf") for row in rows)


@pytest.mark.full
def test_a_whole_run_with_experts_of_zeros_and_equal_rows(
    moeq: ForkServer, recipe: Path, models: Models, tmp_path: Path
) -> None:
    for expert, change in {0: torch.zeros_like, 3: lambda tensor: tensor[:1].expand_as(tensor).contiguous()}.items():
        for name in ("w1", "w2", "w3"):
            key = EXPERT.format(1, expert).replace("w1", name)
            model = models.edited(key, change)
            models.whole = model.rename(models.folder / f"changed-{expert}-{name}")
    settings = yaml.safe_load(recipe.read_text("utf-8"))
    settings["losses"] |= {"clip": "mse", "methods": ["gptq", "rtn"]}
    out = tmp_path / "out"
    changed = write_recipe(tmp_path / "r.yaml", settings)
    finished = moeq.run("run", changed, "--model", models.whole, "--out", out, "--quiet")
    assert (finished.code, finished.stderr) == (0, "")
    rows = pq.read_table(out / "losses" / "losses.parquet").to_pylist()
    zero = [row for row in rows if (row["layer"], row["expert"]) == (1, 0)]
    assert zero
    assert all((row["loss"], row["relative_loss"]) == (0, 0) for row in zero)
    assert all(row["loss"] < float("inf") for row in rows)


def changed(models: Models, change: Callable[[str, torch.Tensor], torch.Tensor]) -> Path:
    """A copy in which every tensor is what `change` makes of it."""
    model = models.copy()
    for shard in model.glob("*.safetensors"):
        tensors = {key: change(key, tensor).contiguous() for key, tensor in load_file(shard).items()}
        save_file(tensors, shard, {"format": "pt"})
    return model


def times(ends: str, factor: float) -> Callable[[str, torch.Tensor], torch.Tensor]:
    return lambda key, tensor: tensor * factor if re.search(ends, key) else tensor


@pytest.mark.cases(2)
@pytest.mark.parametrize(
    ("found_in", "ends", "factor"),
    [
        ("model.layers.1.mlp.experts", r"layers\.1\.post_attention_layernorm\.weight$", 3e38),
        ("model.layers.1.mlp.experts, expert 2, gate_proj", r"layers\.1\.\S*experts\.2\.", 1e30),
        ("model.layers.2.mlp.experts, expert 0, down_proj", r"layers\.2\.\S*experts\.\d\.w2", 1e37),
        ("model.layers.2.mlp.experts, expert 3, gate_proj", r"layers\.2\.\S*experts\.3\.", 1e10),
        ("the model's output", r"^model\.norm\.weight$", 1e30),
        ("the model's output", r"^lm_head\.weight$", 1e38),
    ],
)
def test_weights_that_overflow_are_named_at_profile(
    moeq: ForkServer, recipe: Path, models: Models, tmp_path: Path, found_in: str, ends: str, factor: float
) -> None:
    """Before the first artifact, with the tensor at fault; also where only what follows the last router overflows."""
    model = changed(models, times(ends, factor))
    out = tmp_path / "out"
    finished = moeq.run("run", recipe, "--model", model, "--out", out, "--quiet")
    assert_refused(finished, QUANTIZATION, str(model), "weights of up to ", f"as seen in {found_in}")
    named = re.search(r"safetensors: (\S+): weights of up to", finished.stderr)
    assert named is not None
    assert re.search(ends, named[1])
    assert not any((out / stage).exists() for stage in ("profile", "losses", "checkpoint"))


@pytest.mark.parametrize(
    ("ends", "factor", "code"),
    [
        (r"^model\.norm\.weight$", 1e36, QUANTIZATION),
        (r"^model\.norm\.weight$", math.nan, QUANTIZATION),
        ("nothing", 1.0, 0),
    ],
)
def test_a_norm_that_overflows_is_named_in_a_streamed_model_too(
    moeq: ForkServer, recipe: Path, models: Models, tmp_path: Path, ends: str, factor: float, code: int
) -> None:
    model = changed(models, times(ends, factor))
    options = ["--model", model, "--out", tmp_path / "out", "--quiet", "--set", "stream=always"]
    finished = moeq.run("profile", recipe, *options)
    assert finished.code == code, finished.stderr
    if code:
        why = "weights are not finite" if math.isnan(factor) else "weights of up to 1e+36"
        assert_refused(finished, code, f"model.norm.weight: {why}", "as seen in the model's output")


def test_a_model_of_zeros_is_named_at_profile(moeq: ForkServer, recipe: Path, models: Models, tmp_path: Path) -> None:
    model = changed(models, lambda _, tensor: torch.zeros_like(tensor))
    out = tmp_path / "out"
    finished = moeq.run("run", recipe, "--model", model, "--out", out, "--quiet")
    where = f"{models.shard(model, 'lm_head.weight')}: lm_head.weight: every weight is 0"
    assert_refused(finished, QUANTIZATION, where, "as seen in model.layers.0.mlp.experts")
    assert not any((out / stage).exists() for stage in ("profile", "losses", "checkpoint"))


@pytest.mark.full
def test_a_head_of_zeros_is_no_bug(moeq: ForkServer, recipe: Path, models: Models, tmp_path: Path) -> None:
    """Logits that are all 0 are equal to the checkpoint's: 0/0 is no difference."""
    model = changed(models, times(r"^lm_head\.weight$", 0))
    out = tmp_path / "out"
    finished = moeq.run("run", recipe, "--model", model, "--out", out, "--quiet")
    assert (finished.code, finished.stderr) == (0, "")


@pytest.mark.cases(4)
@pytest.mark.parametrize("layers", [r"layers\.1\.\S*experts", "experts", "o_proj"])
@pytest.mark.parametrize("scales", [False, True])
def test_integer_codes_without_scales_are_named(
    moeq: ForkServer, recipe: Path, models: Models, tmp_path: Path, layers: str, scales: bool
) -> None:
    """int8 that nothing says the scales of was taken for the weights themselves: perplexity 2,407, and no word."""

    def codes(key: str, tensor: torch.Tensor) -> torch.Tensor:
        return (tensor * 100).round().to(torch.int8) if re.search(layers, key) else tensor

    model = changed(models, codes)
    if scales:
        for shard in model.glob("*.safetensors"):
            tensors = load_file(shard)
            more = {f"{key}_scale_inv": torch.ones(1, 1) for key, one in tensors.items() if one.dtype == torch.int8}
            save_file(tensors | more, shard, {"format": "pt"})
        path = model / INDEX
        index = json.loads(path.read_text("utf-8"))
        index["weight_map"] |= {f"{k}_scale_inv": v for k, v in index["weight_map"].items() if re.search(layers, k)}
        path.write_text(json.dumps(index))
    out = tmp_path / "out"
    finished = moeq.run("run", recipe, "--model", model, "--out", out, "--quiet")
    assert_refused(finished, MODEL, str(model), ".safetensors: model.layers.", "has no scales", "only I8 codes")
    assert not out.exists()


@pytest.mark.parametrize(("sequences", "fraction", "least"), [(2, 0.25, 4), (3, 0.25, 4), (6, 0.1, 10)])
def test_too_few_sequences_are_said_before_the_first_stage(
    moeq: ForkServer, recipe: Path, tmp_path: Path, sequences: int, fraction: float, least: int
) -> None:
    out = tmp_path / "out"
    settings = [f"corpus.sequences={sequences}", f"losses.heldout_fraction={fraction}"]
    options = [option for setting in settings for option in ("--set", setting)]
    finished = moeq.run("run", recipe, "--out", out, *options, "--quiet")
    assert_refused(finished, CORPUS, "corpus.sequences", "held out", f"use at least {least}")
    assert not out.exists()


@pytest.mark.full
@pytest.mark.parametrize(("size", "says"), [(1e-6, "scale_underflow"), (1e5, "scale_overflow")])
def test_experts_at_the_ends_of_float16_reach_the_checkpoint(
    moeq: ForkServer, recipe: Path, models: Models, tmp_path: Path, size: float, says: str
) -> None:
    """fp16 scales of 8-bit weights of 1e-6 were rounded to 0, and of 2-bit ones of 1e5 cut off, without a word."""
    generator = torch.Generator().manual_seed(1)

    def drawn(key: str, tensor: torch.Tensor) -> torch.Tensor:
        return size * torch.randn(tensor.shape, generator=generator) if "experts" in key else tensor

    model = changed(models, drawn)
    settings = yaml.safe_load(recipe.read_text("utf-8"))
    settings["losses"] |= {"bits": [2, 4, 8], "methods": ["gptq", "rtn"]}
    settings["eval"] = {"perplexity": None, "compare": []}
    relative = {}
    for bits in (2, 4, 8):
        settings["assign"] = {"method": "uniform", "bits": bits}
        out = tmp_path / "out"
        changed_recipe = write_recipe(tmp_path / "r.yaml", settings)
        for stage in ("profile", "losses", "assign", "quantize", "export"):
            finished = moeq.run(stage, changed_recipe, "--model", model, "--out", out)
            assert finished.code == 0, finished.stderr
            if stage == "losses" and bits == 2:
                assert f"{says}: 15 of 15 experts" in " ".join(finished.stderr.split())
        reader = NativeReader(out / "checkpoint")
        matrices = reader.expert(reader.layers[1], 2)[0]
        stored = matrices["gate_proj"]
        assert isinstance(stored, PackedWeight)
        exact = load_file(models.shard(model, EXPERT.format(1, 2)))[EXPERT.format(1, 2)]
        values = stored.dequantize()
        assert values.any(1).all(), "no row of zeros"
        assert torch.isfinite(values).all()
        relative[bits] = float((values - exact).norm() / exact.norm())
    assert relative[8] < 0.05
    assert relative[4] < 0.3
    assert relative[2] < 0.9
    rows = pq.read_table(out / "losses" / "losses.parquet").to_pylist()
    flagged = {row["bits"] for row in rows if says in row["fallback"]}
    assert flagged == ({2, 4, 8} if says == "scale_underflow" else {2})
