"""The Mixture-of-Experts vision transformer: its forward against one written from the names and shapes alone.

Letters: B images, S positions, D hidden size, E experts.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional
from transformers import AutoConfig, DeiTForImageClassification, ViTForImageClassification

from moeq.errors import ModelError
from moeq.integers.vit.configuration import MoeViTConfig
from moeq.integers.vit.modeling import MoeViTForImageClassification
from moeq.models import loading
from moeq.models.experts import find_expert_layers
from moeq.models.single import ExpertReader
from moeq.models.source import open_source
from moeq.models.streaming import StreamedModel

CPU = torch.device("cpu")
SIZES: dict[str, Any] = {
    "image_size": 8,
    "patch_size": 4,
    "num_channels": 2,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "moe_layers": [1],
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 12,
    "num_labels": 5,
    "initializer_range": 0.3,
}


def made(seed: int = 0, **changes: Any) -> MoeViTForImageClassification:
    torch.manual_seed(seed)
    model = MoeViTForImageClassification(MoeViTConfig(**SIZES | changes)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "bias" in name or "norm" in name:
                parameter.add_(torch.randn_like(parameter) * 0.2)
    return model


def pixels(count: int = 6, channels: int = 2) -> Tensor:
    return torch.rand(count, channels, 8, 8, generator=torch.Generator().manual_seed(1))


def reference(config: dict[str, Any], t: dict[str, Tensor], images: Tensor, task: int = 0) -> Tensor:
    """Logits of images, one image and one token at a time, from the tensors as they lie on disk."""
    size, heads, patch = config["hidden_size"], config["num_attention_heads"], config["patch_size"]

    def norm(x: Tensor, name: str) -> Tensor:
        centred = x - x.mean(-1, keepdim=True)
        deviation = (centred.square().mean(-1, keepdim=True) + config["layer_norm_eps"]).sqrt()
        return centred / deviation * t[f"{name}.weight"] + t[f"{name}.bias"]

    def linear(x: Tensor, name: str) -> Tensor:
        return x @ t[f"{name}.weight"].T + t.get(f"{name}.bias", torch.zeros(()))

    def mlp(x: Tensor, name: str) -> Tensor:
        inner = linear(x, f"{name}.fc1")
        return linear(inner * 0.5 * (1 + torch.erf(inner / 2**0.5)), f"{name}.fc2")

    def mixture(token: Tensor, name: str) -> Tensor:
        router = f"{name}.router" if f"{name}.router.weight" in t else f"{name}.routers.{task}"
        logits = linear(token, router)
        best = sorted(range(len(logits)), key=lambda expert: -float(logits[expert]))[: config["num_experts_per_tok"]]
        exponents = logits.exp()
        whole = exponents[best].sum() if config["gating"] == "softmax_over_topk" else exponents.sum()
        return torch.stack([exponents[e] / whole * mlp(token, f"{name}.experts.{e}") for e in best]).sum(0)

    def attention(x: Tensor, name: str) -> Tensor:
        width, out = size // heads, []
        qkv = linear(x, f"{name}.qkv")
        for head in range(heads):
            q, k, v = (qkv[:, part * size + head * width :][:, :width] for part in range(3))
            out.append((q @ k.T / width**0.5).softmax(-1) @ v)
        return linear(torch.cat(out, -1), f"{name}.proj")

    found = []
    for image in images:
        rows = [functional.conv2d(image[None], t["patch_embed.weight"], t["patch_embed.bias"], stride=patch)[0]]
        x = torch.cat([t["cls_token"][0], rows[0].flatten(1).T]) + t["pos_embed"][0]
        for i in range(config["num_hidden_layers"]):
            x = x + attention(norm(x, f"blocks.{i}.norm1"), f"blocks.{i}.attn")
            y = norm(x, f"blocks.{i}.norm2")
            if i in config["moe_layers"]:
                x = x + torch.stack([mixture(token, f"blocks.{i}.moe") for token in y])
            else:
                x = x + mlp(y, f"blocks.{i}.mlp")
        x = norm(x, "norm")
        head = "head" if "head.weight" in t else f"heads.{task}"
        found.append(linear(x[0] if config["pooling"] == "cls" else x[1:].mean(0), head))
    return torch.stack(found)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("vit") / "model"
    made().save_pretrained(path)
    return path


def on_disk(path: Path) -> dict[str, Tensor]:
    return load_file(path / "model.safetensors")


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"gating": "topk_over_softmax", "router_bias": True, "pooling": "mean"},
        {"moe_layers": [0, 1], "num_experts_per_tok": 1, "qkv_bias": False},
        {"moe_layers": []},
        {"num_tasks": 2},
    ],
)
def test_the_forward_is_that_of_the_names_and_shapes(tmp_path: Path, changes: dict[str, Any]) -> None:
    model = made(**changes)
    model.save_pretrained(tmp_path)
    config = model.config.to_dict()
    with torch.no_grad():
        for task in range(config["num_tasks"]):
            wanted = reference(config, on_disk(tmp_path), pixels(), task)
            torch.testing.assert_close(model(pixels(), task=task).logits, wanted, rtol=1e-5, atol=1e-5)


def test_every_task_has_its_router_and_its_head(tmp_path: Path) -> None:
    model = made(num_tasks=3, num_labels=[5, 2, 7])
    model.save_pretrained(tmp_path)
    again = loading.load_model(open_source(str(tmp_path)), torch.float32, CPU)
    tensors = on_disk(tmp_path)
    assert {f"blocks.1.moe.routers.{task}.weight" for task in range(3)} < set(tensors)
    with torch.no_grad():
        for task, labels in enumerate([5, 2, 7]):
            wanted = reference(model.config.to_dict(), tensors, pixels(), task)
            assert wanted.shape == (6, labels)
            torch.testing.assert_close(again(pixels(), task=task).logits, wanted, rtol=1e-5, atol=1e-5)
    with pytest.raises(ValueError, match="task 3 of 3"):
        model(pixels(), task=3)


def test_tensors_on_disk_are_one_pair_of_linears_an_expert(saved: Path) -> None:
    tensors = on_disk(saved)
    experts = {name for name in tensors if ".experts." in name}
    assert experts == {
        f"blocks.1.moe.experts.{e}.{linear}.{part}"
        for e in range(4)
        for linear in ("fc1", "fc2")
        for part in ("weight", "bias")
    }
    assert tensors["blocks.1.moe.experts.0.fc1.weight"].shape == (12, 16)
    assert {"cls_token", "pos_embed", "patch_embed.weight", "head.bias", "blocks.1.moe.router.weight"} < set(tensors)
    assert tensors["pos_embed"].shape == (1, 5, 16)


def test_what_is_saved_loads_streams_and_is_read_by_expert(saved: Path) -> None:
    source = open_source(str(saved))
    wanted = made()
    streamed = StreamedModel(source, torch.float32, CPU)
    loaded = loading.load_model(source, torch.float32, CPU)
    with torch.no_grad():
        logits = wanted(pixels()).logits
        assert torch.equal(loaded(pixels()).logits, logits)
        assert torch.equal(streamed.model(pixels()).logits, logits)
    (layer,) = find_expert_layers(loaded)
    assert (layer.name, layer.projections, layer.biased) == ("blocks.1.moe.experts", ("up_proj", "down_proj"), True)
    reader = ExpertReader(source, loading.skeleton(source))
    weights, biases = reader.read(layer, 2)
    assert torch.equal(weights["up_proj"], on_disk(saved)["blocks.1.moe.experts.2.fc1.weight"])
    assert torch.equal(biases["down_proj"], on_disk(saved)["blocks.1.moe.experts.2.fc2.bias"])
    assert reader.bytes_read == 4 * (2 * 12 * 16 + 12 + 16)


@pytest.mark.full
def test_a_folder_without_architectures_opens_in_a_process_that_only_imports_moeq(saved: Path, tmp_path: Path) -> None:
    config = json.loads((saved / "config.json").read_text())
    del config["architectures"]
    save_file(on_disk(saved), tmp_path / "model.safetensors", {"format": "pt"})
    (tmp_path / "config.json").write_text(json.dumps(config))
    code = (
        "import moeq\n"
        "from transformers import AutoConfig, AutoModelForImageClassification\n"
        f"print(type(AutoConfig.from_pretrained({str(tmp_path)!r})).__name__)\n"
        f"print(type(AutoModelForImageClassification.from_pretrained({str(tmp_path)!r})).__name__)\n"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert found.stdout.split() == ["MoeViTConfig", "MoeViTForImageClassification"]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"gating": "noisy"}, "gating is 'noisy'"),
        ({"pooling": "max"}, "pooling is 'max'"),
        ({"moe_layers": [2]}, r"moe_layers \[2\] are not different numbers of the 2 blocks"),
        ({"num_experts_per_tok": 5}, "num_experts_per_tok is 5, there are 4 experts"),
        ({"patch_size": 3}, "image_size 8 is no multiple of patch_size 3"),
        ({"num_tasks": 2, "num_labels": [3]}, "num_labels has 1 tasks, num_tasks is 2"),
        ({"num_experts": 0}, "num_experts must be at least 1"),
    ],
)
def test_sizes_that_do_not_go_together_are_one_clear_line(
    saved: Path, tmp_path: Path, changes: dict[str, Any], says: str
) -> None:
    config = json.loads((saved / "config.json").read_text())
    save_file(on_disk(saved), tmp_path / "model.safetensors", {"format": "pt"})
    (tmp_path / "config.json").write_text(json.dumps({k: v for k, v in config.items() if k != "id2label"} | changes))
    with pytest.raises(ModelError, match=says) as caught:
        loading.load_config(open_source(str(tmp_path)))
    assert "\n" not in str(caught.value)


def test_images_of_another_shape_are_refused() -> None:
    with pytest.raises(ValueError, match=r"pixel_values are \[6, 1, 8, 8\], \[images, 2, 8, 8\] are wanted"):
        made()(pixels(channels=1))


@pytest.mark.parametrize("family", [ViTForImageClassification, DeiTForImageClassification])
def test_dense_classifiers_load_and_have_no_experts(tmp_path: Path, family: Any) -> None:
    sizes = {key: SIZES[key] for key in ("image_size", "patch_size", "num_channels", "hidden_size", "num_labels")}
    config = family.config_class(**sizes, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16)
    model = family(config)
    model.save_pretrained(tmp_path)
    changed = json.loads((tmp_path / "config.json").read_text())
    del changed["architectures"]
    (tmp_path / "config.json").write_text(json.dumps(changed))
    loaded = loading.load_model(open_source(str(tmp_path)), torch.float32, CPU)
    assert type(loaded) is family
    with torch.no_grad():
        assert torch.equal(loaded(pixels()).logits, model.eval()(pixels()).logits)
    with pytest.raises(ModelError, match="no module holds routed experts"):
        find_expert_layers(loaded)


def test_the_configuration_survives_saving(tmp_path: Path) -> None:
    config = MoeViTConfig(**SIZES | {"num_labels": [2, 3], "num_tasks": 2, "pixel_scale": 0.0625})
    config.save_pretrained(tmp_path)
    again = AutoConfig.from_pretrained(tmp_path)
    assert isinstance(again, MoeViTConfig)
    assert (again.task_labels, again.num_tasks, again.pixel_scale) == ([2, 3], 2, 0.0625)
    assert again.moe_layers == [1]
