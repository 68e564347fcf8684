"""Checkpoints of other tools as PackedSources: exact values, names of all sorts, and what is refused."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from exporters import handmade
from family_models import save
from safetensors.torch import load_file, save_file
from torch import Tensor

from moeq.conversion import convert
from moeq.errors import ArtifactError, ModelError, StorageError
from moeq.exporters import compressed_tensors
from moeq.exporters.exporter import read_by
from moeq.exporters.packed_source import PackedSource
from moeq.exporters.readers import open_other, open_packed
from moeq.inspection import inspect
from moeq.models import loading
from moeq.models.experts import find_expert_layers, stacked_biases
from moeq.models.source import open_source
from moeq.runtimes import of_method
from moeq_kernels.packed import PackedWeight
from moeq_kernels.packing import unpack

SHORT = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}


def mixed(layer: int, expert: int, projection: str) -> int:
    """2 to 8 bits and a dense expert, other widths in the second layer, one projection apart."""
    if (layer, expert) == (1, 2):
        return 16
    return 8 if (layer, expert, projection) == (0, 2, "w2") else (2, 3, 4)[expert] if layer == 0 else (4, 8, 2)[expert]


def rules(name: str, plus: str) -> dict[str, Any]:
    """The same widths as a configuration says them, first match first; `name`: the experts' path in memory."""
    found: dict[str, Any] = {f"{plus}.*layers\\.0\\.{name}\\.experts\\.2\\.(w2|down_proj)": {"bits": 8}}
    for layer in (0, 1):
        for expert in range(3):
            bits = mixed(layer, expert, "w1")
            found[f"{plus}.*layers\\.{layer}\\.{name}\\.experts\\.{expert}\\..*"] = {"bits": bits}
    return found


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return handmade.model(tmp_path_factory.mktemp("models") / "mixtral")


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return handmade.model(tmp_path_factory.mktemp("models") / "qwen", "qwen3_moe")


def check_values(found: PackedSource, model: Path, wanted: dict[str, Tensor], tmp_path: Path) -> None:
    """Every expert's values, as transformers has them in memory, equal those that were written."""
    twin = open_source(str(handmade.twin(model, tmp_path / "twin", wanted)))
    loaded = loading.load_model(twin, torch.float32, torch.device("cpu"))
    for layer in found.layers:
        for expert in range(layer.num_experts):
            matrices, biases = found.expert(layer, expert)
            assert not biases
            exact = layer.kind.views(loaded.get_submodule(layer.name), expert)
            assert set(matrices) == set(exact) == set(layer.projections)
            for name, matrix in matrices.items():
                values = matrix.dequantize() if isinstance(matrix, PackedWeight) else matrix.float()
                assert torch.equal(values, exact[name]), (layer.name, expert, name)


def test_one_bit_of_compressed_tensors_is_another_grid(qwen: Path, tmp_path: Path) -> None:
    """Its codes stand for -1 and 0 steps, a sign grid's for -1/2 and 1/2."""
    config = handmade.compressed_config(1)
    handmade.write(qwen, tmp_path / "packed", config, handmade.compressed_parts, lambda *_: 1)
    with pytest.raises(ArtifactError, match="moeq reads 2 to 8 bits of compressed-tensors"):
        open_packed(tmp_path / "packed").check()  # type: ignore[attr-defined]


def gptq(model: Path, target: Path, **options: Any) -> dict[str, Tensor]:
    declared = handmade.gptq_config(rules("mlp", "+:"))
    return handmade.write(model, target, declared, handmade.gptq_parts, mixed, **options)


def test_gptq_mixed_widths_and_names_of_the_family(model: Path, tmp_path: Path) -> None:
    values = gptq(model, tmp_path / "packed")
    found = open_other(open_source(str(tmp_path / "packed")))
    found.check()
    check_values(found, model, values, tmp_path)
    assert "quantization_config" not in found.config
    assert not [key for key in found.rest() if ".experts." in key]
    assert set(found.rest()) == {key for key in load_file(model / "model.safetensors") if ".experts." not in key}
    widths = [found.expert(found.layers[0], expert)[0]["gate_proj"].bits for expert in range(3)]  # type: ignore[union-attr]
    assert widths == [2, 3, 4]


def test_gptq_names_of_other_tools(model: Path, tmp_path: Path) -> None:
    def rename(module: str) -> str:
        head, _, leaf = module.rpartition(".")
        return f"{head.replace('block_sparse_moe', 'mlp')}.{SHORT[leaf]}"

    values = gptq(model, tmp_path / "packed", rename=rename)
    check_values(open_other(open_source(str(tmp_path / "packed"))), model, values, tmp_path)


@pytest.mark.cases(5)
@pytest.mark.parametrize("version", ["gptq", "gptq_v2"])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_gptq_zero_points(qwen: Path, tmp_path: Path, version: str, bits: int) -> None:
    declared = handmade.gptq_config(bits=bits, sym=False, checkpoint_format=version)
    if bits == 4:  # the other name that GPTQModel has for it
        declared["format"] = declared.pop("checkpoint_format")

    def parts(packed: PackedWeight) -> dict[str, Tensor]:
        return handmade.gptq_parts(packed, second=version == "gptq_v2", g_idx=False)

    values = handmade.write(qwen, tmp_path / "packed", declared, parts, lambda *_: bits, symmetric=False)
    found = open_other(open_source(str(tmp_path / "packed")))
    found.check()
    check_values(found, qwen, values, tmp_path)
    assert not found.expert(found.layers[0], 0)[0]["up_proj"].symmetric  # type: ignore[union-attr]


@pytest.mark.parametrize("symmetric", [True, False])
def test_gptq_of_sizes_that_fill_no_words(tmp_path: Path, symmetric: bool) -> None:
    """GPTQModel fills up the last word of codes and of zero points: 36 x 4 bits are 4.5 words."""
    source = handmade.model(tmp_path / "model", "qwen3_moe", hidden_size=72, moe_intermediate_size=36)
    declared = handmade.gptq_config(sym=symmetric, group_size=-1)

    def parts(packed: PackedWeight) -> dict[str, Tensor]:
        return handmade.gptq_parts(packed) | {"g_idx": torch.zeros(packed.inputs, dtype=torch.int32)}

    values = handmade.write(source, tmp_path / "packed", declared, parts, symmetric=symmetric, group_size=-1)
    assert inspect(tmp_path / "packed")["moe_layers"] == 2
    found = open_other(open_source(str(tmp_path / "packed")))
    found.check()
    check_values(found, source, values, tmp_path)


@pytest.mark.parametrize("packing", ["auto_round:auto_gptq", "auto_round", "auto_round:gptqmodel"])
def test_auto_round(model: Path, tmp_path: Path, packing: str) -> None:
    declared = handmade.auto_round_config(rules("mlp", ""), packing_format=packing)
    second = packing != "auto_round:auto_gptq"
    values = handmade.write(
        model, tmp_path / "packed", declared, lambda packed: handmade.gptq_parts(packed, second=second), mixed
    )
    found = open_other(open_source(str(tmp_path / "packed")))
    found.check()
    check_values(found, model, values, tmp_path)


OLDER = {"bits": None, "w_bit": 4, "group_size": None, "q_group_size": handmade.GROUP}


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize(
    "declared",
    [
        handmade.awq_config(),
        {name: value for name, value in handmade.awq_config(**OLDER).items() if value is not None},
        handmade.auto_round_config(packing_format="auto_round:auto_awq"),
    ],
    ids=["awq", "older", "auto-round"],
)
def test_awq(qwen: Path, tmp_path: Path, declared: dict[str, Any], symmetric: bool) -> None:
    """Whatever `gate` among the modules that are not converted fits."""
    values = handmade.write(qwen, tmp_path / "packed", declared, handmade.awq_parts, symmetric=symmetric)
    found = open_other(open_source(str(tmp_path / "packed")))
    found.check()
    check_values(found, qwen, values, tmp_path)
    assert found.expert(found.layers[0], 0)[0]["gate_proj"].symmetric == symmetric  # type: ignore[union-attr]
    assert not [key for key in found.rest() if ".experts." in key]
    described = inspect(tmp_path / "packed")
    assert described["kind"] == f"packed checkpoint ({declared['quant_method']})"
    assert [name for name, refused in described["loads_in"].items() if refused is None] == (
        ["gptqmodel"] if declared["quant_method"] == "awq" else []
    )
    assert described["packed_bytes"] + described["plain_bytes"] == sum(
        header.bytes for header in open_source(str(tmp_path / "packed")).tensors.values()
    )


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"version": "gemv_fast"}, "awq with version 'gemv_fast' is not supported"),
        ({"version": "GEMM", "bits": 8}, "moeq reads 4 bits of awq"),
        ({"group_size": 64}, r"qzeros is I32 \[2, 12\], not I32 \[1, 12\]"),
    ],
)
def test_awq_that_is_refused(qwen: Path, tmp_path: Path, changed: dict[str, Any], why: str) -> None:
    handmade.write(qwen, tmp_path / "packed", handmade.awq_config(**changed), handmade.awq_parts)
    with pytest.raises(ArtifactError, match=why):
        open_packed(tmp_path / "packed").check()  # type: ignore[attr-defined]


def test_auto_round_names_before_patterns(qwen: Path, tmp_path: Path) -> None:
    extra = {"experts\\.1": {"bits": 2}, "model.layers.0.mlp.experts.1.up_proj": {"bits": 8}}
    declared = handmade.auto_round_config(extra)

    def widths(layer: int, expert: int, projection: str) -> int:
        return 8 if (layer, expert, projection) == (0, 1, "up_proj") else 2 if expert == 1 else 4

    values = handmade.write(qwen, tmp_path / "packed", declared, handmade.gptq_parts, widths)
    check_values(open_other(open_source(str(tmp_path / "packed"))), qwen, values, tmp_path)


@pytest.mark.parametrize(("bits", "symmetric"), [(2, True), (3, True), (4, True), (4, False), (5, False), (8, True)])
def test_compressed_tensors(qwen: Path, tmp_path: Path, bits: int, symmetric: bool) -> None:
    declared = handmade.compressed_config(bits, symmetric=symmetric)
    values = handmade.write(
        qwen, tmp_path / "packed", declared, handmade.compressed_parts, lambda *_: bits, symmetric=symmetric
    )
    found = open_other(open_source(str(tmp_path / "packed")))
    found.check()
    check_values(found, qwen, values, tmp_path)


@pytest.mark.parametrize("bits", [8, 3])
def test_compressed_tensors_has_its_own_defaults(qwen: Path, tmp_path: Path, bits: int) -> None:
    """What QuantizationArgs takes where a configuration does not say it."""
    weights = {"group_size": handmade.GROUP, "strategy": None} | ({} if bits == 8 else {"num_bits": bits})
    declared = handmade.compressed_config(groups={"group_0": {"targets": ["Linear"], "weights": weights}})
    values = handmade.write(qwen, tmp_path / "packed", declared, handmade.compressed_parts, lambda *_: bits)
    found = open_other(open_source(str(tmp_path / "packed")))
    found.check()
    check_values(found, qwen, values, tmp_path)
    assert inspect(tmp_path / "packed")["moe_layers"] == len(found.layers)


def test_bfloat16_scales_stay_exact(qwen: Path, tmp_path: Path) -> None:
    """Scales that float16 holds come as float16, others in their own type."""
    tiny = torch.tensor(2.0**-30, dtype=torch.bfloat16)

    def parts(packed: PackedWeight) -> dict[str, Tensor]:
        found = handmade.compressed_parts(packed)
        scale = found["weight_scale"].bfloat16()
        scale[0, 0] = tiny if packed.inputs == 96 else 0.5
        return found | {"weight_scale": scale}

    handmade.write(qwen, tmp_path / "packed", handmade.compressed_config(), parts)
    found = open_other(open_source(str(tmp_path / "packed")))
    matrices = found.expert(found.layers[0], 0)[0]
    down, up = matrices["down_proj"], matrices["up_proj"]
    assert isinstance(down, PackedWeight)
    assert isinstance(up, PackedWeight)
    assert down.scales.dtype == torch.bfloat16
    assert down.scales[0, 0] == tiny
    assert up.scales.dtype == torch.float16


def test_a_plain_checkpoint(model: Path, tmp_path: Path) -> None:
    found = open_other(open_source(str(model)))
    found.check()
    check_values(found, model, load_file(model / "model.safetensors"), tmp_path)
    assert list(found.others()) == []


@pytest.mark.cases(2)
@pytest.mark.parametrize("family", ["llama4_text", "mistral4", "gpt_oss"])
def test_experts_one_by_one_of_a_family_that_stores_stacks(family: str, tmp_path: Path) -> None:
    """As other tools pack them, whichever way the family's own stacks lie."""
    sizes = {"hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 96}
    plain = open_source(str(save(family, tmp_path / "plain", **sizes)))
    model = loading.load_model(plain, torch.float32, torch.device("cpu"))
    wanted, layers = {}, find_expert_layers(model)
    stacks = {f"{layer.name}.{name}" for layer in layers for name in layer.parameters}
    tensors = {key: tensor for key, tensor in load_file(plain.path / "model.safetensors").items() if key not in stacks}
    for layer in layers:
        for expert in range(layer.num_experts):
            for name, matrix in layer.kind.views(model.get_submodule(layer.name), expert).items():
                packed = handmade.rounded(matrix.detach(), 4)
                wanted[layer.index, expert, name] = packed.dequantize()
                parts = handmade.gptq_parts(packed)
                tensors |= {f"{layer.name}.{expert}.{name}.{part}": tensor for part, tensor in parts.items()}
            for name, bias in stacked_biases(model, layer, slice(expert, expert + 1)).items():
                wanted[layer.index, expert, f"{name}.bias"] = bias[0].clone()
                tensors[f"{layer.name}.{expert}.{name}.bias"] = bias[0].clone()
    save_file(tensors, plain.path / "model.safetensors", {"format": "pt"})
    own = {"autoround_version": "0.16.1"} if family == "gpt_oss" else {}
    declare(plain.path, handmade.gptq_config(**own))
    found = open_packed(plain.path)
    found.check()  # type: ignore[attr-defined]
    for layer in found.layers:
        for expert in range(layer.num_experts):
            matrices, biases = found.expert(layer, expert)
            for name, matrix in matrices.items():
                assert isinstance(matrix, PackedWeight)
                assert torch.equal(matrix.dequantize(), wanted[layer.index, expert, name])
            assert set(biases) == (set(layer.projections) if layer.biased else set())
            assert all(torch.equal(bias, wanted[layer.index, expert, f"{name}.bias"]) for name, bias in biases.items())
    convert(plain.path, "native", tmp_path / "native", verify=True)
    declare(plain.path, handmade.compressed_config())  # by which alone is told who loads it
    source, taken_apart = open_source(str(plain.path)), family == "llama4_text"
    loader = compressed_tensors.loader_of(SimpleNamespace(source=source))
    assert loader.name == ("transformers" if taken_apart else "vllm-cuda")
    if not taken_apart:
        with pytest.raises(ModelError, match="packed one by one, and not as transformers loads"):
            loading.load_model(source, torch.float32, torch.device("cpu"))
    declare(plain.path, handmade.gptq_config(**own))
    if layers[0].biased:
        stack = {f"{layers[0].name}.down_proj_bias": torch.zeros(layers[0].num_experts, 64)}
        save_file(tensors | stack, plain.path / "model.safetensors", {"format": "pt"})
        for reads in (inspect, open_packed):
            with pytest.raises(ArtifactError, match=r"down_proj_bias holds the biases of all experts, whose"):
                reads(plain.path).check()
        save_file(tensors, plain.path / "model.safetensors", {"format": "pt"})
        change(plain.path, lambda tensors: tensors.pop(f"{layers[0].name}.2.up_proj.bias"))
        with pytest.raises(ArtifactError, match="expert 2, up_proj: its bias is missing"):
            open_packed(plain.path).check()  # type: ignore[attr-defined]
    change(plain.path, lambda tensors: tensors.pop(f"{layers[0].name}.1.up_proj.qweight"))
    with pytest.raises(ArtifactError, match="expert 1, up_proj: the matrix is missing"):
        open_packed(plain.path).check()  # type: ignore[attr-defined]
    if family == "gpt_oss":  # another tool's gate_proj is the first half of rows that hold gate and up in turns
        declare(plain.path, handmade.gptq_config())
        with pytest.raises(ArtifactError, match="gate and up in turns: tools split these"):
            open_packed(plain.path).check()  # type: ignore[attr-defined]


def test_packed_linears_outside_of_experts(qwen: Path, tmp_path: Path) -> None:
    declared = handmade.gptq_config()
    handmade.write(qwen, tmp_path / "packed", declared, handmade.gptq_parts)
    tensors = load_file(tmp_path / "packed" / "model.safetensors")
    name = "model.layers.1.self_attn.o_proj"
    packed = handmade.rounded(tensors.pop(f"{name}.weight"), 4)
    tensors |= {f"{name}.{part}": value for part, value in handmade.gptq_parts(packed).items()}
    save_file(tensors, tmp_path / "packed" / "model.safetensors", {"format": "pt"})
    declare(tmp_path / "packed", handmade.gptq_config() | {"dynamic": {"-:.*mlp.gate$": {}}})
    found = open_other(open_source(str(tmp_path / "packed")))
    assert found.other_names() == [name]
    assert torch.equal(dict(found.others())[name].dequantize(), packed.dequantize())
    assert not [key for key in found.rest() if name in key]


def test_packed_linears_beside_plain_stacks(tmp_path: Path) -> None:
    """As auto-round leaves Llama 4: experts in the family's own stacks, attention packed."""
    folder = save("llama4_text", tmp_path / "model", hidden_size=64)
    plain = load_file(folder / "model.safetensors")
    model = loading.load_model(open_source(str(folder)), torch.float32, torch.device("cpu"))
    name = "model.layers.1.self_attn.o_proj"
    packed = handmade.rounded(plain.pop(f"{name}.weight"), 4)
    parts = {f"{name}.{part}": value for part, value in handmade.gptq_parts(packed).items()}
    save_file(plain | parts, folder / "model.safetensors", {"format": "pt"})
    declare(folder, handmade.gptq_config() | {"dynamic": {"-:(?!.*self_attn.o_proj)": {}}})
    found = open_packed(folder)
    found.check()  # type: ignore[attr-defined]
    assert torch.equal(dict(found.others())[name].dequantize(), packed.dequantize())
    for layer in find_expert_layers(model):
        for expert in range(layer.num_experts):
            wanted = layer.kind.views(model.get_submodule(layer.name), expert)
            matrices, _ = found.expert(layer, expert)
            assert all(torch.equal(matrices[name], value) for name, value in wanted.items())  # type: ignore[arg-type]


def test_ordered_groups(qwen: Path, tmp_path: Path) -> None:
    """Act order: refused as a packed matrix, exact as values."""
    generator = torch.Generator().manual_seed(3)
    orders = {}

    def parts(packed: PackedWeight) -> dict[str, Tensor]:
        found = handmade.gptq_parts(packed)
        order = torch.randperm(packed.inputs, generator=generator)
        orders[packed.inputs] = orders.get(packed.inputs, order)
        return found | {"g_idx": found["g_idx"][orders[packed.inputs]]}

    values = handmade.write(qwen, tmp_path / "packed", handmade.gptq_config(desc_act=True), parts)
    found = open_other(open_source(str(tmp_path / "packed")))
    with pytest.raises(ArtifactError, match="not consecutive inputs"):
        found.expert(found.layers[0], 1)
    exact = open_other(open_source(str(tmp_path / "packed")), as_values=True).expert(found.layers[0], 1)[0]["up_proj"]
    assert isinstance(exact, Tensor)
    packed = handmade.rounded(load_file(qwen / "model.safetensors")["model.layers.0.mlp.experts.1.up_proj.weight"], 4)
    scale = packed.scales.float()[:, orders[64] // handmade.GROUP]
    wanted = (unpack(packed.codes, 4, 64).float() - 8) * scale
    assert torch.equal(exact, wanted)
    assert not torch.equal(exact, values["model.layers.0.mlp.experts.1.up_proj.weight"])


def declare(folder: Path, declared: dict[str, Any]) -> None:
    config = json.loads((folder / "config.json").read_text("utf-8"))
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": declared}), "utf-8")


def change(folder: Path, edit: Any) -> None:
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


BROKEN = "model.layers.1.mlp.experts.2.up_proj"
PLACE = "model.layers.1.mlp.experts, expert 2, up_proj"


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda tensors: tensors.pop(f"{BROKEN}.scales"), "scales is missing"),
        (lambda tensors: tensors.pop(f"{BROKEN}.qweight"), "the matrix is missing"),
        (lambda tensors: tensors.update({f"{BROKEN}.scales": torch.ones(2, 95).half()}), "scales is F16 [2, 95]"),
        (lambda tensors: tensors.update({f"{BROKEN}.qweight": torch.ones(8, 96).half()}), "qweight is F16"),
        (lambda tensors: tensors[f"{BROKEN}.scales"].view(-1).fill_(torch.nan), "not finite"),
    ],
)
def test_damage_is_named(qwen: Path, tmp_path: Path, edit: Any, message: str) -> None:
    handmade.write(qwen, tmp_path / "packed", handmade.gptq_config(), handmade.gptq_parts)
    change(tmp_path / "packed", edit)
    found = open_other(open_source(str(tmp_path / "packed")))

    def read() -> None:
        found.check()
        found.expert(found.layers[1], 2)

    with pytest.raises(ArtifactError) as caught:
        read()
    assert message in str(caught.value)
    assert PLACE in str(caught.value)


def test_a_configuration_that_lies_about_bits(qwen: Path, tmp_path: Path) -> None:
    lie = {"+:model.layers.1.mlp.experts.2.up_proj": {"bits": 2}}
    handmade.write(qwen, tmp_path / "packed", handmade.gptq_config(lie), handmade.gptq_parts)
    with pytest.raises(ArtifactError, match=r"qweight is I32 \[8, 96\], not I32 \[4, 96\].*2 bits") as caught:
        open_other(open_source(str(tmp_path / "packed"))).check()
    assert PLACE in str(caught.value)


def test_settings_that_lie_beside_config_json_alone(qwen: Path, tmp_path: Path) -> None:
    """As AutoGPTQ wrote them before config.json had them: without a method."""
    folder, settings = tmp_path / "packed", {"bits": 4, "group_size": 32, "desc_act": False, "sym": True}
    values = handmade.write(qwen, folder, handmade.gptq_config(), handmade.gptq_parts)
    (folder / "config.json").write_bytes((qwen / "config.json").read_bytes())
    (folder / "quantize_config.json").write_text(json.dumps(settings), "utf-8")
    check_values(open_other(open_source(str(folder))), qwen, values, tmp_path)
    assert inspect(folder)["kind"] == "packed checkpoint (gptq)"
    (folder / "quantize_config.json").write_text("[4]", "utf-8")
    with pytest.raises(ModelError, match=r"quantize_config\.json: its settings are no mapping"):
        open_source(str(folder))
    (qwen / "quantize_config.json").write_text(json.dumps(settings), "utf-8")
    assert open_source(str(qwen)).config == json.loads((qwen / "config.json").read_text("utf-8"))  # nothing is packed
    (qwen / "quantize_config.json").unlink()


def test_widths_that_gptqmodel_keeps_otherwise(qwen: Path, tmp_path: Path) -> None:
    handmade.write(qwen, tmp_path / "gptq", handmade.gptq_config(bits=5), handmade.gptq_parts, lambda *_: 5)
    with pytest.raises(ArtifactError, match="moeq reads 2, 3, 4, 8 bits of gptq"):
        open_other(open_source(str(tmp_path / "gptq"))).check()
    config = handmade.auto_round_config(bits=5)
    values = handmade.write(qwen, tmp_path / "auto-round", config, handmade.gptq_parts, lambda *_: 5)
    check_values(open_other(open_source(str(tmp_path / "auto-round"))), qwen, values, tmp_path)


def test_awq_settings_that_lie_beside_config_json_alone(qwen: Path, tmp_path: Path) -> None:
    """As AutoAWQ wrote them before config.json had them."""
    settings = {"zero_point": True, "q_group_size": handmade.GROUP, "w_bit": 4, "version": "GEMM"}
    folder = tmp_path / "packed"
    values = handmade.write(qwen, folder, handmade.awq_config(), handmade.awq_parts, symmetric=False)
    (folder / "config.json").write_bytes((qwen / "config.json").read_bytes())
    (folder / "quant_config.json").write_text(json.dumps(settings), "utf-8")
    check_values(open_other(open_source(str(folder))), qwen, values, tmp_path)
    assert inspect(folder)["kind"] == "packed checkpoint (awq)"


UNDECLARED = {  # parts, their anchor
    "gptq or awq": (handmade.gptq_parts, "qweight"),
    "compressed-tensors": (handmade.compressed_parts, "weight_packed"),
}


@pytest.mark.parametrize("method", list(UNDECLARED))
def test_a_matrix_that_is_packed_and_plain_is_refused(method: str, qwen: Path, tmp_path: Path) -> None:
    """The plain one went unnoticed."""
    parts, anchor = UNDECLARED[method]
    declared = handmade.gptq_config() if anchor == "qweight" else handmade.compressed_config()
    handmade.write(qwen, tmp_path / "packed", declared, parts)
    change(tmp_path / "packed", lambda tensors: tensors.update({f"{BROKEN}.weight": torch.zeros(96, 64)}))
    for reads in (inspect, lambda path: open_packed(path).check()):  # type: ignore[attr-defined]
        with pytest.raises(ArtifactError, match=rf"{BROKEN}\.weight lies beside {BROKEN}\.{anchor}"):
            reads(tmp_path / "packed")


@pytest.mark.parametrize("method", list(UNDECLARED))
def test_packed_tensors_of_which_nothing_says_how_are_named(method: str, qwen: Path, tmp_path: Path) -> None:
    """convert said that nothing is packed, inspect that an expert is missing."""
    parts, anchor = UNDECLARED[method]
    handmade.write(qwen, tmp_path / "packed", {}, parts)
    config = tmp_path / "packed" / "config.json"
    text = json.loads(config.read_text("utf-8"))
    del text["quantization_config"]
    config.write_text(json.dumps(text), "utf-8")
    found = rf"config\.json: no quantization_config .*\.{anchor} is packed \({method}\)"
    for reads in (inspect, lambda path: convert(path, "native", tmp_path / "out"), lambda path: open_source(str(path))):
        with pytest.raises(ModelError, match=found):
            reads(tmp_path / "packed")


def test_quantization_in_an_earlier_word_is_read(qwen: Path, tmp_path: Path) -> None:
    values = handmade.write(qwen, tmp_path / "packed", handmade.compressed_config(), handmade.compressed_parts)
    config = tmp_path / "packed" / "config.json"
    text = json.loads(config.read_text("utf-8"))
    text["compression_config"] = text.pop("quantization_config")
    config.write_text(json.dumps(text), "utf-8")
    check_values(open_other(open_source(str(tmp_path / "packed"))), qwen, values, tmp_path)


FUSED = {"location": "weight_input", "targets": ["re:.*down_proj$"], "inverse": True}
ONLINE = {
    "config_groups": {
        "R1": {"type": "hadamard", "apply": [FUSED]},
        "R4": {"type": "hadamard", "apply": [FUSED, FUSED | {"location": "input"}]},
    }
}


def test_transforms_that_are_in_the_weights_are_none_that_is_left(qwen: Path, tmp_path: Path) -> None:
    fused = {"config_groups": {"R1": {"type": "hadamard", "apply": [FUSED]}}}
    declared = handmade.compressed_config() | {"transform_config": fused}
    values = handmade.write(qwen, tmp_path / "packed", declared, handmade.compressed_parts)
    check_values(open_other(open_source(str(tmp_path / "packed"))), qwen, values, tmp_path)


@pytest.mark.parametrize(
    ("declared", "found"),
    [
        ({"quant_method": "hqq", "bits": 4}, "quant_method hqq"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "quant_method bitsandbytes"),
        ({"quant_method": "fp8"}, "fp8 weights"),
        (handmade.gptq_config(checkpoint_format="marlin"), "gptq with checkpoint_format marlin"),
        (handmade.gptq_config(is_marlin_format=True), "gptq with checkpoint_format marlin"),
        (handmade.auto_round_config(packing_format="auto_round:marlin"), "packing_format auto_round:marlin"),
        (handmade.auto_round_config(data_type="mx_fp"), "data_type mx_fp"),
        (handmade.auto_round_config(rotation_config={"hadamard_type": "hadamard"}), "rotation_config"),
        (handmade.compressed_config() | {"transform_config": ONLINE}, "transform_config (R4: 'input')"),
        ({"quant_method": "gptq"}, "declares no bits"),
        (handmade.compressed_config() | {"format": "marlin-24"}, "format 'marlin-24'"),
        (handmade.compressed_config() | {"format": "float-quantized"}, "int weights by group"),
        (handmade.float_config(group_size=32), "float weights by tensor_group"),
        (
            handmade.compressed_config(
                groups={"g": {"targets": ["Linear"], "weights": {"type": "float", "num_bits": 8}}}
            ),
            "float weights",
        ),
    ],
)
def test_what_is_refused(qwen: Path, tmp_path: Path, declared: dict[str, Any], found: str) -> None:
    handmade.write(qwen, tmp_path / "packed", declared, handmade.gptq_parts)
    with pytest.raises(ArtifactError) as caught:
        open_other(open_source(str(tmp_path / "packed")))
    assert found in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize(
    "changed",
    [
        {"config_groups": {"group_0": {"targets": ["Linear"], "weights": None}}},
        {"config_groups": {"group_0": {"targets": ["Linear"]}}},
        {"config_groups": {"group_0": {"weights": {"num_bits": 4, "group_size": 32}}}},
        {"config_groups": ["Linear"]},
        {"ignore": [1]},
    ],
)
def test_inspect_refuses_settings_that_cannot_be(qwen: Path, tmp_path: Path, changed: dict[str, Any]) -> None:
    handmade.write(qwen, tmp_path / "packed", handmade.compressed_config() | changed, handmade.compressed_parts)
    with pytest.raises(ArtifactError, match=r"compressed-tensors with .* is not supported") as caught:
        inspect(tmp_path / "packed")
    assert "KeyError" not in str(caught.value)


def test_a_directory_whose_name_is_no_text_is_refused(qwen: Path, tmp_path: Path) -> None:
    """safetensors opens no file in it."""
    shutil.copytree(qwen, tmp_path / "model\udcff")
    with pytest.raises(ModelError, match=r"its name is no UTF-8; rename it"):
        open_packed(tmp_path / "model\udcff")


def test_more_experts_than_config_json_has_are_refused(qwen: Path, tmp_path: Path) -> None:
    handmade.write(qwen, tmp_path / "packed", handmade.gptq_config(), handmade.gptq_parts)
    path = tmp_path / "packed" / "config.json"
    config = json.loads(path.read_text("utf-8"))
    (name,) = {"num_experts", "num_local_experts"} & set(config)
    count = config[name] - 1
    path.write_text(json.dumps(config | {name: count}), "utf-8")
    found = open_packed(tmp_path / "packed")
    with pytest.raises(ArtifactError, match=f"expert {count}, and config.json says that there are {count}; make or"):
        found.expert(found.layers[0], 0)


@pytest.mark.parametrize("method", ["bitsandbytes", "hqq"])
def test_inspect_says_what_no_reader_is_there_for(qwen: Path, tmp_path: Path, method: str) -> None:
    handmade.write(qwen, tmp_path / "packed", {"quant_method": method, "bits": 4}, handmade.gptq_parts)
    with pytest.raises(ArtifactError, match=f"quant_method {method} is not supported; moeq reads its own"):
        inspect(tmp_path / "packed")


def test_schemes_of_whole_rows_need_no_group_size() -> None:
    weights = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "channel"}
    groups = {name: {"targets": [f"re:.*{name}$"], "weights": weights} for name in ("up_proj", "down_proj")}
    config = {"model_type": "mixtral", "quantization_config": handmade.compressed_config(groups=groups)}
    source = SimpleNamespace(config=config, tensors=())
    assert compressed_tensors.loader_of(SimpleNamespace(source=source)).name == "vllm-cuda"


BY_NAME = "model.layers.0.mlp.experts.0.gate_proj.qweight"
GPT_OSS = {"model_type": "gpt_oss"}
BY_AUTO_ROUND = {"autoround_version": "0.16.1"}


@pytest.mark.parametrize(
    ("declared", "config", "key", "why"),
    [
        (handmade.auto_round_config(), {}, BY_NAME, None),
        (handmade.auto_round_config(sym=False, packing_format="auto_round"), {}, BY_NAME, None),
        (handmade.auto_round_config(sym=False), {}, BY_NAME, "less one"),
        (handmade.auto_round_config(packing_format="auto_round:auto_awq"), {}, BY_NAME, "AWQ's layout"),
        (handmade.auto_round_config(), {}, "model.layers.0.block_sparse_moe.experts.0.w1.qweight", "called w1"),
        (handmade.auto_round_config(), GPT_OSS, BY_NAME, "in turns"),
        (handmade.auto_round_config(), GPT_OSS, "model.layers.0.self_attn.o_proj.qweight", None),
        (handmade.gptq_config(), GPT_OSS, BY_NAME, None),
        (handmade.gptq_config(**BY_AUTO_ROUND), GPT_OSS, BY_NAME, "in turns"),
    ],
)
def test_no_runtime_is_named_that_computes_something_else(
    declared: dict[str, Any], config: dict[str, Any], key: str, why: str | None
) -> None:
    """As auto-round 0.16.1 and gptqmodel 7.6.0 were seen to: errors, or other logits."""
    config = {"model_type": "mixtral", "quantization_config": declared} | config
    exporter = of_method(declared["quant_method"])
    assert exporter is not None
    ((name, refused),) = read_by(
        exporter, SimpleNamespace(source=SimpleNamespace(config=config, tensors=[key]))
    ).items()
    assert name == {"gptq": "gptqmodel"}.get(exporter.name, exporter.name)
    assert (refused is None) == (why is None)
    assert why is None or why in refused["reason"]  # type: ignore[index]


@pytest.mark.parametrize("renamed", [False, True])
def test_transformers_loads_mixtral_s_experts_by_their_own_names_alone(
    renamed: bool, model: Path, tmp_path: Path
) -> None:
    """auto-round calls them as in memory."""

    def rename(module: str) -> str:
        head, _, leaf = module.rpartition(".")
        return f"{head}.{SHORT[leaf]}" if renamed else module

    handmade.write(model, tmp_path / "out", handmade.compressed_config(), handmade.compressed_parts, rename=rename)
    source = open_source(str(tmp_path / "out"))
    loader = compressed_tensors.loader_of(SimpleNamespace(source=source))
    assert loader.name == ("vllm-cuda" if renamed else "transformers")


def test_a_gguf_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    with pytest.raises(ArtifactError, match=r"a file \(\.gguf\)"):
        open_packed(tmp_path / "model.gguf")


def test_a_name_that_only_the_locale_has_no_letters_for_is_not_to_be_renamed(tmp_path: Path) -> None:
    given = [sys.executable, "-m", "moeq", "run", "bundled:tiny-mixtral", "--bits", "3", "--out", "modèle"]
    plain = os.environ | {"LC_ALL": "C", "PYTHONUTF8": "0"}
    done = subprocess.run(given, cwd=tmp_path, env=plain, capture_output=True, text=True, check=False)
    assert done.returncode == StorageError.exit_code
    assert "its name is UTF-8, which this locale's names are not (ascii); set PYTHONUTF8=1" in done.stderr
    assert not list(tmp_path.iterdir())
