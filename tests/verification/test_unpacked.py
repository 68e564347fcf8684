"""A checkpoint whose attention, embeddings and head were packed, written unpacked, beside the model that it was made
of: roundings of their weights, and everything else as it was."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import save_tiny
from verification.tampering import edit_json, edit_tensor, holder, write_digests

from moeq import pipeline
from moeq.conversion import convert
from moeq.exporters.foreign import OTHERS_FILE
from moeq.exporters.readers import open_packed
from moeq.models.source import open_source
from moeq.progress import Reporter
from moeq.recipe import load_recipe
from moeq.stages.context import Context
from moeq.verification.weights import compare_packed, compare_weights

QUIET = Reporter(quiet=True)
RECIPE = (
    "corpus.sequences=8", "corpus.sequence_length=48", "losses={methods: [rtn], group_size: 16, bits: [4]}",
    "assign={method: uniform, bits: 4, quantizer: rtn}", "eval.perplexity=null", "eval.compare=[]",
    "export.verify=false", "others={attention: 4, embeddings: 8, head: 8, group_size: 8}",
)  # fmt: skip
ROUTER, QUERY, HEAD = "model.layers.0.mlp.gate.weight", "model.layers.1.self_attn.q_proj.weight", "lm_head.weight"
NORM = "model.layers.0.input_layernorm.weight"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("model") / "qwen", "qwen3_moe", num_experts=4)


@pytest.fixture(scope="module")
def native(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    context = Context(
        recipe=load_recipe(None, list(RECIPE)),
        model_name=str(model),
        out=tmp_path_factory.mktemp("run"),
        reporter=QUIET,
    )
    pipeline.run(context, ("profile", "losses", "assign", "quantize", "export"))
    return context.finished("export")


@pytest.fixture(scope="module")
def unpacked(native: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("unpacked") / "plain"
    convert(native, "dequantized", out)
    assert {ROUTER, NORM}.isdisjoint(load_file(out / OTHERS_FILE))
    assert {QUERY, HEAD} <= set(load_file(out / OTHERS_FILE))
    return out


def found_against(folder: Path, original: Path) -> list[str]:
    packed = open_packed(folder, as_values=True)
    if (original / "placement.json").is_file():
        found = compare_packed(open_packed(original, as_values=True), packed, QUIET)
    else:
        found = compare_weights(open_source(str(original)), packed, QUIET, False)
    return [*found.problems, *(f"{key} changed" for key in found.changed)]


def test_what_was_packed_is_a_rounding_of_the_models_weights(unpacked: Path, native: Path, model: Path) -> None:
    assert found_against(unpacked, model) == []
    assert found_against(unpacked, native) == []


def negated(tensor: torch.Tensor) -> torch.Tensor:
    return -tensor


def one_row(tensor: torch.Tensor) -> torch.Tensor:
    changed = tensor.clone()
    changed[1] = -changed[1]
    return changed


@pytest.mark.parametrize(
    ("key", "change", "wanted"),
    [
        (QUERY, negated, f"{QUERY}: no rounding of these weights"),
        (HEAD, one_row, f"{HEAD}: no rounding of these weights"),
        (ROUTER, one_row, f"{ROUTER} changed"),
        (NORM, negated, f"{NORM} changed"),
    ],
)
def test_what_is_no_rounding_of_them_is_named(
    unpacked: Path, model: Path, tmp_path: Path, key: str, change: Callable[[torch.Tensor], torch.Tensor], wanted: str
) -> None:
    folder = Path(shutil.copytree(unpacked, tmp_path / "changed"))
    edit_tensor(folder, key, change)
    write_digests(folder)
    found = found_against(folder, model)
    assert len(found) == 1
    assert found[0].startswith(wanted)


@pytest.mark.parametrize("key", [ROUTER, NORM])
def test_what_is_never_packed_stays_as_it_was_in_whichever_file(
    unpacked: Path, model: Path, tmp_path: Path, key: str
) -> None:
    """By the name of a file nobody has a router, slightly changed, taken for a rounding."""
    folder = Path(shutil.copytree(unpacked, tmp_path / "moved"))
    tensors, others = (load_file(file) for file in (holder(folder, key), folder / OTHERS_FILE))
    others[key] = tensors.pop(key) * 1.01
    save_file(tensors, holder(folder, key), {"format": "pt"})
    save_file(others, folder / OTHERS_FILE, {"format": "pt"})
    edit_json(folder / "model.safetensors.index.json", lambda index: index["weight_map"].update({key: OTHERS_FILE}))
    write_digests(folder)
    assert found_against(folder, model) == [f"{key} changed"]
