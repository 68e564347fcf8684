"""humming's layout: a width for each layer, read back by a reader of its own, and what is refused."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from exporters import handmade
from made_sources import Choose, MadeSource, quantization_of, save_model
from safetensors.torch import load_file
from torch import Tensor

from moeq.errors import ArtifactError, FormatError
from moeq.exporters import write
from moeq.exporters.foreign import WriteOptions
from moeq.exporters.readers import open_other
from moeq.inspection import inspect
from moeq.models.source import open_source
from moeq.progress import Reporter
from moeq.verification.launch import NotInstalledError
from moeq.verification.verify import Options, verify
from moeq_kernels.packed import PackedWeight

GROUP = 32
BLOCKS = {"mixtral": "block_sparse_moe", "qwen3_moe": "mlp"}
LEAVES = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}


@pytest.fixture(scope="module", params=BLOCKS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model") / request.param, request.param)


@pytest.fixture(scope="module")
def mixtral(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("mixtral") / "mixtral", "mixtral", hidden_size=64, intermediate_size=64)


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return handmade.model(tmp_path_factory.mktemp("qwen") / "model", "qwen3_moe")


def by_layer(first: int, second: int) -> Choose:
    return lambda layer, expert, projection: (first, second)[layer]


def asked(declared: dict[str, Any], prefix: str) -> dict[str, Any] | None:
    """What vLLM 0.32 and SGLang 0.5.23 find for a module: None is left out, else the first rule over the rest."""
    rules = declared["dynamic"]
    if "lm_head" in prefix or any(re.match(rule[2:], prefix) for rule in rules if rule[0] == "-"):
        return None
    own = (rules[rule] for rule in rules if rule[0] == "+" and re.match(rule[2:], prefix))
    return {name: value for name, value in declared.items() if name != "dynamic"} | next(own, {})


def values(weight: np.ndarray[Any, Any], scale: np.ndarray[Any, Any], bits: int) -> np.ndarray[Any, Any]:
    """As humming documents it (pack_weight.cuh, dequantize_weight): 32 codes of a row fill `bits` words, code i at bit
    i*bits of their stream, the lowest first; a code stands for itself less the middle, times its group's scale."""
    rows, words = weight.shape
    inputs = words * 32 // bits
    stream = (weight.view(np.uint32)[:, :, None] >> np.arange(32, dtype=np.uint32)) & 1
    each = stream.reshape(rows, inputs, bits)
    codes = (each.astype(np.int64) << np.arange(bits)).sum(-1)
    steps = scale.astype(np.float32).repeat(inputs // scale.shape[1], axis=1)
    return (codes - (1 << (bits - 1))).astype(np.float32) * steps


def tensors_of(folder: Path) -> dict[str, Tensor]:
    return {key: tensor for file in folder.glob("*.safetensors") for key, tensor in load_file(file).items()}


@pytest.mark.cases(3)
@pytest.mark.parametrize(("first", "second"), [(2, 3), (4, 5), (6, 7), (8, 16), (16, 4), (16, 16)])
def test_every_matrix_is_what_an_independent_reader_finds(model: Path, tmp_path: Path, first: int, second: int) -> None:
    source = MadeSource(model, by_layer(first, second), group_size=GROUP)
    write("humming", source, tmp_path / "out", WriteOptions())
    declared, tensors, seen = quantization_of(tmp_path / "out"), tensors_of(tmp_path / "out"), 0
    for layer in source.layers:
        fused = f"model.layers.{layer.index}.{BLOCKS[model.name]}.experts"
        grid = asked(declared, fused)
        assert asked(declared, f"{fused}.0.w1") == grid, "where a runtime asks for single experts"
        assert grid is None or grid["weight_scale_group_size"] == GROUP
        for expert in range(layer.num_experts):
            for projection, matrix in source.expert(layer, expert)[0].items():
                leaf = LEAVES[projection] if model.name == "mixtral" else projection
                name = f"{fused}.{expert}.{leaf}"
                if grid is None:
                    assert isinstance(matrix, Tensor)
                    assert torch.equal(tensors[f"{name}.weight"], matrix)
                    continue
                assert isinstance(matrix, PackedWeight)
                weight, scale = tensors[f"{name}.weight"], tensors[f"{name}.weight_scale"]
                assert weight.dtype == torch.int32
                found = values(weight.numpy(), scale.numpy(), int(grid["b_dtype"].removeprefix("uint")))
                assert np.array_equal(found, matrix.dequantize().numpy()), name
                seen += 1
    assert seen == sum(bits < 16 for bits in (first, second)) * 3 * source.layers[0].num_experts
    for beside in ("self_attn.q_proj", "self_attn.qkv_proj", f"{BLOCKS[model.name]}.gate", "mlp.shared_expert.up_proj"):
        assert asked(declared, f"model.layers.0.{beside}") is None, beside
    assert "lm_head.weight" in tensors
    assert tensors["lm_head.weight"].is_floating_point()


def test_settings_mean_weights_alone(mixtral: Path, tmp_path: Path) -> None:
    """humming would take `dtype` and `group_size` as the activations' too, and quantize these."""
    write("humming", MadeSource(mixtral, by_layer(8, 3), group_size=GROUP), tmp_path / "out", WriteOptions())
    declared = quantization_of(tmp_path / "out")
    assert set(declared) == {"quant_method", "b_dtype", "weight_scale_group_size", "dynamic"}
    assert declared["b_dtype"] == "uint3", "the narrowest is the common one: what ignores the rules does not fit"
    assert [rule for rule in declared["dynamic"].values() if rule] == [
        {"b_dtype": "uint8", "weight_scale_group_size": GROUP}
    ]
    card = (tmp_path / "out" / "README.md").read_text("utf-8")
    assert 'dtype="float16"' in card


@pytest.mark.parametrize(
    ("choose", "more", "message"),
    [
        (lambda layer, expert, projection: 2 if expert == 1 else 4, {},
         r"2 bits beside 4 bits of .*; humming takes one scheme for all experts of a layer; assign one width \(assign"),
        (lambda layer, expert, projection: 16 if expert == 1 else 4, {}, "full precision beside 4 bits of"),
        (by_layer(1, 4), {}, r"1 bits; humming loads 2, 3, 4, 5, 6, 7, 8, 16; set export\.widen: true"),
        (by_layer(4, 4), {"symmetric": False}, "zero points; humming reads symmetric grids only; set losses.symmetric"),
        (by_layer(4, 4), {"group_size": 16}, "groups of 16; humming loads groups of 32, 64, 128; set losses"),
        (by_layer(4, 4), {"others": {"model.layers.0.self_attn.q_proj": 4}}, "in full precision only; run without"),
    ],
)  # fmt: skip
def test_what_vllm_does_not_load_is_refused(
    mixtral: Path, tmp_path: Path, choose: Choose, more: dict[str, Any], message: str
) -> None:
    source = MadeSource(mixtral, choose, **({"group_size": GROUP} | more))
    with pytest.raises(FormatError, match=message) as caught:
        write("humming", source, tmp_path / "out", WriteOptions())
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_widened_mixes_hold_the_same_values(mixtral: Path, tmp_path: Path) -> None:
    """1 bit in 2, and 2 beside 4 in 4."""
    widths = {0: (1, 1), 1: (2, 4)}
    source = MadeSource(mixtral, lambda layer, expert, projection: widths[layer][expert % 2], group_size=GROUP)
    write("humming", source, tmp_path / "out", WriteOptions(widen=True))
    found = open_other(open_source(str(tmp_path / "out")))
    found.check()
    for layer, bits in zip(found.layers, (2, 4), strict=True):
        for expert in range(layer.num_experts):
            for name, matrix in found.expert(layer, expert)[0].items():
                assert isinstance(matrix, PackedWeight)
                assert matrix.bits == bits
                wanted = source.expert(source.layers[layer.index], expert)[0][name]
                assert isinstance(wanted, PackedWeight)
                assert torch.equal(matrix.dequantize(), wanted.dequantize())


@pytest.mark.parametrize(("bits", "symmetric"), [(2, True), (3, False), (4, False), (5, True), (8, False)])
@pytest.mark.parametrize("names", [("b_dtype", "weight_scale_group_size"), ("dtype", "group_size")])
def test_others_checkpoints_are_read(
    qwen: Path, tmp_path: Path, bits: int, symmetric: bool, names: tuple[str, str]
) -> None:
    grid = dict(zip(names, (f"{'' if symmetric else 'u'}int{bits}", handmade.GROUP), strict=True))
    whole = {
        "quant_method": "humming",
        **grid,
        "has_zero_point": not symmetric,
        "modules_to_not_convert": ["self_attn"],
    }
    wanted = handmade.write(
        qwen, tmp_path / "out", whole | {"dynamic": {"-:.*gate$": {}}}, handmade.humming_parts,
        lambda *_: bits, symmetric=symmetric,
    )  # fmt: skip
    found = open_other(open_source(str(tmp_path / "out")))
    found.check()
    matrix = found.expert(found.layers[1], 2)[0]["down_proj"]
    assert isinstance(matrix, PackedWeight)
    assert matrix.symmetric == symmetric
    assert torch.equal(matrix.dequantize(), wanted["model.layers.1.mlp.experts.2.down_proj.weight"])


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"b_dtype": "float4e2m1"}, "humming with 'float4e2m1' weights is not supported"),
        ({"b_dtype": "uint1"}, "moeq reads 2 to 8 bits of humming"),
        ({"is_fp_zero_point": True}, "zero points between the codes"),
        ({"weight_scale_type": "tensor"}, "scales by 'tensor'"),
        ({"weight_scale_group_size_n": 128}, "scales by 'block'"),
        ({"weight_scale_2_type": "channel"}, "second scales by 'channel'"),
        ({"hadamard_block_size": 32}, "Hadamard"),
        ({"weight_scale_group_size": 16}, r"weight_scale is F16 \[96, 2\], not .* \[96, 4\] as config.json has it"),
        ({"has_zero_point": True}, "zero_point is missing"),
        ({"dynamic": {"-:.*experts": {}}}, "is packed, config.json leaves it as it is"),
    ],
)
def test_what_moeq_does_not_read_is_said(qwen: Path, tmp_path: Path, changed: dict[str, Any], message: str) -> None:
    handmade.write(qwen, tmp_path / "out", handmade.humming_config(), handmade.humming_parts)
    config = json.loads((tmp_path / "out" / "config.json").read_text("utf-8"))
    config["quantization_config"] |= changed
    (tmp_path / "out" / "config.json").write_text(json.dumps(config))
    with pytest.raises(ArtifactError, match=message):
        open_other(open_source(str(tmp_path / "out"))).check()


def test_it_is_inspected_and_verified_where_vllm_is(mixtral: Path, tmp_path: Path) -> None:
    write("humming", MadeSource(mixtral, by_layer(2, 4), group_size=GROUP), tmp_path / "out", WriteOptions())
    said = inspect(tmp_path / "out")
    assert (said["kind"], said["packed_modules_beside_experts"]) == ("packed checkpoint (humming)", 0)
    with pytest.raises(NotInstalledError, match="vllm cannot be imported there"):
        verify(tmp_path / "out", Options(), Reporter(quiet=True))
