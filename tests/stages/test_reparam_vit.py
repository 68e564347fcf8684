"""`moeq reparam` on MoE-ViTs: zero points everywhere, biases for routers, routers of tasks that share their experts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForImageClassification

from moeq import pipeline
from moeq.artifacts.run import FOLDED
from moeq.integers.artifacts.reparam import read_reparam
from moeq.integers.vit.configuration import MoeViTConfig
from moeq.integers.vit.modeling import MoeViTForImageClassification
from moeq.progress import Reporter
from moeq.recipe import load_recipe
from moeq.stages.context import Context

SMALL = ("corpus.source=digits", "corpus.sequences=24", "corpus.batch_size=9", "reparam.samples=20")


def model_of(folder: Path, **changes: Any) -> Path:
    """A random classifier of digits with norms that are no longer what they were made as."""
    sizes = {
        "image_size": 8, "patch_size": 2, "num_channels": 1, "hidden_size": 36, "num_hidden_layers": 3,
        "num_attention_heads": 3, "intermediate_size": 44, "moe_layers": [1, 2], "num_experts": 5,
        "moe_intermediate_size": 20, "num_labels": 10, "pixel_scale": 0.0625,
    }  # fmt: skip
    torch.manual_seed(5)
    model = MoeViTForImageClassification(MoeViTConfig(**(sizes | changes)))
    for weight in model.parameters():
        weight.data += 0.15 * torch.randn(weight.shape)
    model.save_pretrained(folder)
    return folder


def context_of(model: Path | str, out: Path, *overrides: str) -> Context:
    recipe = load_recipe(None, [*SMALL, *overrides])
    return Context(recipe=recipe, model_name=str(model), out=out, reporter=Reporter(quiet=True))


def reparam(model: Path | str, out: Path, *overrides: str) -> Path:
    pipeline.run_alone(context_of(model, out, *overrides), "reparam")
    return out / "reparam" / FOLDED


def logits(folder: Path, task: int = 0) -> Tensor:
    model = AutoModelForImageClassification.from_pretrained(folder, dtype=torch.float32).eval()
    images = torch.rand(6, 1, 8, 8, generator=torch.Generator().manual_seed(7))
    with torch.no_grad():
        return model(images, task=task).logits  # type: ignore[no-any-return]


def relative(found: Tensor, wanted: Tensor) -> float:
    return float((found - wanted).norm() / wanted.norm())


def test_all_norms_take_zero_points_and_routers_gain_biases(tmp_path: Path) -> None:
    model = model_of(tmp_path / "model")
    folded = reparam(model, tmp_path / "run", "reparam.norms=all")
    report = read_reparam(tmp_path / "run" / "reparam")
    assert [(norm.path, norm.mode) for norm in report.norms] == [
        *((f"blocks.{block}.norm{place}", "asymmetric") for block in range(3) for place in (1, 2)),
        ("norm", "asymmetric"),
    ]
    assert {one.bias for one in report.norms[3].consumers} == {
        "blocks.1.moe.experts.up_proj_bias", "blocks.1.moe.router.bias",
    }  # fmt: skip
    assert report.perplexity is None
    assert report.float32.error < 1e-5
    assert relative(logits(folded), logits(model)) < 1e-5
    assert json.loads((folded / "config.json").read_text("utf-8"))["router_bias"] is True
    gained = {name for path in folded.glob("*.safetensors") for name in load_file(path)}
    had = set(load_file(model / "model.safetensors"))
    assert gained - had == {"blocks.1.moe.router.bias", "blocks.2.moe.router.bias"}
    assert had <= gained


def test_scales_alone_leave_routers_without_biases(tmp_path: Path) -> None:
    model = model_of(tmp_path / "model")
    folded = reparam(model, tmp_path / "run", "reparam.bias=false")
    assert {norm.mode for norm in read_reparam(tmp_path / "run" / "reparam").norms} == {"scale-only"}
    assert json.loads((folded / "config.json").read_text("utf-8"))["router_bias"] is False
    assert relative(logits(folded), logits(model)) < 1e-5


def test_images_whose_routing_ties_are_counted_and_left_out(tmp_path: Path) -> None:
    """Two experts whose logits differ by rounding alone: the fold may change their places, and nothing else."""
    model = model_of(tmp_path / "model")
    held = load_file(model / "model.safetensors")
    for block in (1, 2):
        router = held[f"blocks.{block}.moe.router.weight"]
        router[3] = router[1] * (1 + 1e-7)
    save_file(held, model / "model.safetensors", {"format": "pt"})
    reparam(model, tmp_path / "run")
    found = read_reparam(tmp_path / "run" / "reparam").float32
    assert 0 < found.left_out < found.sequences == 20
    assert found.changed_tokens >= found.left_out
    assert found.error < 1e-5


@pytest.mark.cases(1)
@pytest.mark.parametrize("biased", [False, True])
def test_every_task_has_its_router_folded(biased: bool, tmp_path: Path) -> None:
    model = model_of(tmp_path / "model", num_tasks=3, num_labels=[10, 10, 4], router_bias=biased)
    folded = reparam(model, tmp_path / "run")
    report = read_reparam(tmp_path / "run" / "reparam")
    assert [one.weight for one in report.norms[3].consumers] == [
        "blocks.1.moe.experts.up_proj", *(f"blocks.1.moe.routers.{task}.weight" for task in range(3)),
    ]  # fmt: skip
    assert report.samples == 3 * 20
    for task in range(3):
        assert relative(logits(folded, task), logits(model, task)) < 1e-5


def test_a_folded_model_runs_through_the_pipeline(tmp_path: Path) -> None:
    recipe = load_recipe(
        None,
        [
            *SMALL, "reparam={samples: 8}", "losses.group_size=16", "losses.methods=[rtn]", "assign.quantizer=rtn",
            "eval.compare=[]", "eval.images.images=20", "export.verify=false", "estimate.geometry=model",
            "estimate.grid.inputs=[128]", "estimate.grid.outputs=[512]",
        ],
    )  # fmt: skip
    context = Context(recipe=recipe, model_name="bundled:tiny-moe-vit", out=tmp_path, reporter=Reporter(quiet=True))
    found = pipeline.run(context, ("reparam", "profile", "losses", "assign", "quantize", "export", "eval"))
    assert len({one.record.model.digest for one in found}) == 2
    config = json.loads((tmp_path / "checkpoint" / "config.json").read_text("utf-8"))
    assert config["router_bias"] is True
