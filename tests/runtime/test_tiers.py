"""Experts on the devices of their tiers compute what they compute on one device; activations move once a layer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from family_models import inputs
from second_device import CPU, DEVICE, SecondDevice

import moeq
from moeq.artifacts.manifest import read_manifest
from moeq.errors import ArtifactError, ModelError
from moeq.runtime.checkpoint import load_checkpoint
from moeq.runtime.packed_experts import PackedExperts
from moeq.runtime.tiers import place, tier_devices

Exported = Callable[[str], Path]
TIERS = {"gpu": DEVICE, "ndp": CPU, "host": CPU, "disk": CPU}


def load(folder: Path) -> Any:
    return load_checkpoint(folder, torch.float32, CPU)


@pytest.mark.cases(1)
@pytest.mark.parametrize("family", ["mixtral", "deepseek_v3", "gpt_oss", "cohere2_moe"])
def test_a_placed_model_computes_what_it_computes_on_one_device(family: str, exported: Exported) -> None:
    """Rows, their choices and weights go to the other device once a layer, and their sum comes back once."""
    folder = exported(family)
    model, ids = load(folder), inputs(family)["input_ids"]
    model.set_attn_implementation("eager")
    layers = read_manifest(folder).layers
    with torch.no_grad():
        wanted = model(input_ids=ids, use_cache=False).logits
        with SecondDevice() as device:
            place(model, layers, TIERS)
            device.moves.clear()
            found = model(input_ids=ids.to(DEVICE), use_cache=False).logits.to(CPU)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-4)  # a kernel's, and as they are stored
    sent = [shape for start, _, shape in device.moves if start == DEVICE.type]
    rows = ids.numel()
    assert len(sent) == 3 * len(layers) + 1
    assert sent[-1] == tuple(wanted.shape)
    back = [shape for start, _, shape in device.moves if start == "cpu" and len(shape) == 2 and shape != ids.shape]
    assert len(back) == len(layers)
    assert all(0 < count <= rows and width == layers[0].hidden_size for count, width in back)


def test_every_expert_lies_where_its_tier_is(exported: Exported) -> None:
    folder = exported("mixtral")
    model, manifest = load(folder), read_manifest(folder)
    order = list(model.state_dict())
    with SecondDevice():
        place(model, manifest.layers, TIERS)
        assert list(model.state_dict()) == order
        for layer in manifest.layers:
            for expert in layer.experts:
                state = model.get_submodule(f"{layer.name}.{expert.expert}").state_dict()
                assert {tensor.device for tensor in state.values()} == {TIERS[expert.tier]}
        assert {parameter.device for parameter in model.parameters()} == {DEVICE}
    assert {expert.tier for layer in manifest.layers for expert in layer.experts} == {"gpu", "ndp"}


def test_experts_called_with_every_token_move_once(exported: Exported) -> None:
    """Llama 4: only rows that an expert of the other device is given, one tensor there and one back."""
    folder = exported("llama4_text")
    model, manifest = load(folder), read_manifest(folder)
    experts = next(module for module in model.modules() if isinstance(module, PackedExperts))
    rows = torch.randn(experts.num_experts, 5, 40)
    rows[:, 2:] = 0
    rows[1] = 0
    with torch.no_grad():
        wanted = experts(rows.view(-1, 40))
        with SecondDevice() as device:
            place(model, manifest.layers, TIERS)
            cold = sum(one.tier != "gpu" and one.expert != 1 for one in manifest.layers[0].experts)
            moved = rows.view(-1, 40).to(DEVICE)
            device.moves.clear()
            found = experts(moved)
            assert device.moves == [("maia", "cpu", (2 * cold, 40)), ("cpu", "maia", (2 * cold, 40))]
            torch.testing.assert_close(found.to(CPU), wanted)


def test_loading_with_placement_is_loading(exported: Exported) -> None:
    folder = exported("mixtral")
    ids = inputs("mixtral")["input_ids"]
    with torch.no_grad():
        plain = moeq.load(folder, dtype="float32", placement={"gpu": "cpu"})
        assert torch.equal(plain(ids).logits, load(folder)(ids).logits)
    assert moeq.load(str(folder)).dtype == torch.float32


def test_a_tier_or_a_device_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ModelError, match="placement, vram: no such tier; name gpu, ndp, host, disk"):
        tier_devices({"vram": "cpu"})
    with pytest.raises(ModelError, match="cuda"):
        tier_devices({"gpu": "cuda"})
    for device in ("meta", "mps", "gpu"):  # torch knows the first two
        with pytest.raises(ModelError, match=f"^device {device}: unknown device; use auto, cpu or cuda"):
            tier_devices({"ndp": device})
    assert set(tier_devices({}).values()) == {CPU}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for count, told in ((1, "there is 1"), (2, "there are 2")):
        monkeypatch.setattr(torch.cuda, "device_count", lambda count=count: count)
        with pytest.raises(ModelError, match=f"device cuda:2: no such GPU here: {told}, numbered from 0"):
            tier_devices({"gpu": "cuda:2"})
        assert tier_devices({"gpu": f"cuda:{count - 1}"})["gpu"] == torch.device("cuda", count - 1)


def test_a_manifest_of_another_model_is_refused(exported: Exported) -> None:
    model, manifest = load(exported("mixtral")), read_manifest(exported("mixtral"))
    short = manifest.layers[1].model_copy(update={"experts": manifest.layers[1].experts[1:]})
    for layers in (manifest.layers[:-1], (manifest.layers[0], short, *manifest.layers[2:])):
        with pytest.raises(ArtifactError, match=r"placement.json, model.layers.*differ; export the checkpoint again"):
            place(model, layers, tier_devices({}))


@pytest.mark.cuda
@pytest.mark.parametrize("family", ["mixtral", "llama4_text", "gpt_oss"])
def test_the_gpu_tier_is_on_the_gpu(family: str, exported: Exported) -> None:
    model: Any = moeq.load(exported(family), dtype="float32", placement=True)
    ids = inputs(family)["input_ids"]
    with torch.no_grad():
        wanted = load(exported(family))(ids).logits
        torch.testing.assert_close(model(ids.cuda()).logits.cpu(), wanted, rtol=1e-3, atol=1e-3)
    kept = {"cuda": "dense", "cpu": "codes"}  # of experts in tier gpu, and of the others
    for device, stored in kept.items():
        places = {buffer.device.type for name, buffer in model.named_buffers() if name.endswith(stored)}
        assert places == {device}
    assert model.generate(ids.cuda(), max_new_tokens=4, do_sample=False).shape == (2, ids.shape[1] + 4)
