"""Checkpoints of other formats in the native one: the same codes, scales and zero points, and what is refused."""

from __future__ import annotations

from pathlib import Path

import peers
import pytest
import torch
from family_models import save
from made_sources import IDS, MadeSource, reference_logits, rounded, save_model
from packed_layers import any_codes
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from moeq.conversion import convert
from moeq.errors import ArtifactError, FormatError
from moeq.exporters import write
from moeq.exporters.foreign import WriteOptions, grid_of
from moeq.exporters.native_conversion import Common
from moeq.exporters.native_reader import NativeReader
from moeq.exporters.packed_source import Matrices, PackedSource
from moeq.exporters.readers import open_packed
from moeq.exporters.readers.described import gguf_headers
from moeq.models.experts import ExpertLayer
from moeq.verification.manifest_files import check_native
from moeq_kernels.packed import PackedWeight
from moeq_kernels.widths import Encoding

FORMATS = {"gptqmodel": 4, "auto-round": 3, "transformers": 4, "vllm-cuda": 4, "humming": 3, "llama.cpp": 4}


@pytest.fixture(scope="module")
def mixtral(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("mixtral") / "model", "mixtral", sliding_window=None)


def same(source: PackedSource, found: PackedSource) -> None:
    """The same matrices bit for bit, packed or not, of experts and beside them."""
    for layer, other in zip(source.layers, found.layers, strict=True):
        for expert in range(layer.num_experts):
            mine, theirs = source.expert(layer, expert)[0], found.expert(other, expert)[0]
            assert set(mine) == set(theirs)
            for name, matrix in mine.items():
                equal(matrix, theirs[name])
    others = dict(found.others())
    for name, weight in source.others():
        equal(weight, others.pop(name))
    assert not others


def equal(first: PackedWeight | torch.Tensor, second: PackedWeight | torch.Tensor) -> None:
    assert isinstance(first, PackedWeight) == isinstance(second, PackedWeight)
    if isinstance(first, PackedWeight) and isinstance(second, PackedWeight):
        assert (first.bits, first.symmetric) == (second.bits, second.symmetric)
        assert set(first.parts()) == set(second.parts())
        for part, tensor in first.parts().items():
            assert torch.equal(tensor, second.parts()[part]), part
    else:
        assert torch.equal(first, second)


@pytest.mark.cases(1)
@pytest.mark.parametrize("runtime", FORMATS)
def test_what_moeq_wrote_for_others_comes_back(runtime: str, mixtral: Path, tmp_path: Path) -> None:
    """Codes, scales and zero points are those that were exported, and the manifest has their digests."""
    if runtime == "llama.cpp":
        peers.module("gguf")
    source = MadeSource(mixtral, lambda *_: FORMATS[runtime])
    write(runtime, source, tmp_path / "theirs", WriteOptions())
    convert(tmp_path / "theirs", "native", tmp_path / "native")
    found = NativeReader(tmp_path / "native")
    same(source, found)
    assert set(found.rest()) == set(source.rest())
    manifest = check_native(tmp_path / "native").manifest
    assert manifest.assignment["name"] == "carried over"
    assert {layer.top_k for layer in manifest.layers} == {2}
    assert {expert.tier for layer in manifest.layers for expert in layer.experts} == {"gpu"}


def test_biases_of_experts_go_along(tmp_path: Path) -> None:
    model_path = save_model(tmp_path / "model", "gpt_oss")
    source = MadeSource(model_path, lambda layer, expert, projection: (4, 16)[expert % 2])
    write("native", source, tmp_path / "native", WriteOptions())
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "native", dtype=torch.float32)
    with torch.no_grad():
        logits = model(input_ids=IDS).logits
    assert (logits - reference_logits(source)).abs().max() < 1e-4


def test_families_whose_tokens_choose_one_expert_state_no_number(tmp_path: Path) -> None:
    save("switch_transformers", tmp_path / "model", with_tokenizer=False)
    write("native", MadeSource(tmp_path / "model", lambda *place: 4, group_size=8), tmp_path / "native", WriteOptions())
    assert {layer.top_k for layer in check_native(tmp_path / "native").manifest.layers} == {1}


MIX = (2, 3, 4, 8, 16, 4)


@pytest.mark.cases(1)
@pytest.mark.parametrize("runtime", ["gptqmodel", "auto-round"])
def test_a_mix_with_zero_points_and_packed_modules_comes_back(runtime: str, mixtral: Path, tmp_path: Path) -> None:
    """Every width beside the others, dense matrices, and attention with a width of its own."""
    others = {f"model.layers.{layer}.self_attn.{name}_proj": 4 for layer in (0, 1) for name in "qkvo"}
    source = MadeSource(
        mixtral,
        lambda layer, expert, projection: MIX[(layer + expert + len(projection)) % len(MIX)],
        symmetric=False,
        others=others,
    )
    write(runtime, source, tmp_path / "theirs", WriteOptions())
    convert(tmp_path / "theirs", "native", tmp_path / "native", verify=True)
    found = NativeReader(tmp_path / "native")
    same(source, found)
    assert {module.kind for module in found.manifest.others} == {"attention"}
    assert set(found.rest()) == set(source.rest())


@pytest.mark.cases(1)
@pytest.mark.parametrize("symmetric", [True, False])
def test_gguf_comes_back_with_its_groups(symmetric: bool, tmp_path: Path) -> None:
    """Groups wider than a block, zero points, modules beside the experts, one of them with its rows turned."""
    peers.module("gguf")
    model = save_model(tmp_path / "model", "mixtral", hidden_size=512, intermediate_size=256, sliding_window=None)
    others = {"model.layers.0.self_attn.q_proj": 8, "model.layers.1.self_attn.v_proj": 8}
    source = MadeSource(
        model,
        lambda layer, *_: (4, 2)[layer],
        group_size=256,
        symmetric=symmetric,
        others=others if symmetric else None,
    )
    write("llama.cpp", source, tmp_path / "theirs", WriteOptions())
    convert(tmp_path / "theirs", "native", tmp_path / "native")
    same(source, NativeReader(tmp_path / "native"))


@pytest.mark.parametrize("inputs", [96, 100])
def test_several_grids_become_their_common_one(inputs: int) -> None:
    """Scales stand for each of the smaller groups, symmetric grids get zero points; no value and no code changes."""
    generator = torch.Generator().manual_seed(3)
    common, made = Common(), []
    for bits, size, symmetric in ((4, 32, True), (2, 48, False), (8, -1, True), (3, 16, False), (1, 32, True)):
        weight = rounded(torch.randn(6, inputs, generator=generator), bits, size, symmetric)
        common.add("", grid_of(weight))
        made.append(weight)
    assert (common.group_size, common.symmetric) == (16, False)
    for weight in made:
        carried = common.of(weight)
        carried.check()
        assert torch.equal(carried.codes, weight.codes)
        assert torch.equal(carried.dequantize(), weight.dequantize())


def test_whole_rows_stay_whole_rows() -> None:
    common, weight = Common(), rounded(torch.eye(4, 32), 4, -1, True)
    common.add("", grid_of(weight))
    equal(common.of(weight), weight)
    assert common.group_size == -1


@pytest.mark.parametrize("bits", [2, 3])
def test_codes_of_exl3_stay_what_they_are(bits: int, tmp_path: Path) -> None:
    sizes = {"hidden_size": 128, "moe_intermediate_size": 128, "num_experts": 2, "num_experts_per_tok": 1}
    model = save_model(tmp_path / "model", "qwen3_moe", num_hidden_layers=1, **sizes)
    source = MadeSource(model, lambda *_: bits, exl3=True)
    write("exl3", source, tmp_path / "theirs", WriteOptions())
    convert(tmp_path / "theirs", "native", tmp_path / "native")
    found = NativeReader(tmp_path / "native")
    assert found.manifest.encoding == source.encoding
    same(source, found)


def test_codes_of_two_kinds_have_no_common_grid() -> None:
    common = Common()
    common.add("first", grid_of(any_codes(128, 128, 2, Encoding.exl3())))
    with pytest.raises(FormatError, match=r"for native: second: codes of another kind than those before it"):
        common.add("second", grid_of(any_codes(128, 128, 2, Encoding.exl3("mcg"))))


class Finer(MadeSource):
    """Experts in groups of their own."""

    def expert(self, layer: ExpertLayer, expert: int) -> tuple[Matrices, dict[str, torch.Tensor]]:
        self.group_size = (32, 64)[expert % 2]
        return super().expert(layer, expert)


def test_a_checkpoint_of_two_group_sizes_keeps_its_values(mixtral: Path, tmp_path: Path) -> None:
    source = Finer(mixtral, lambda *_: 4)
    write("gptqmodel", source, tmp_path / "theirs", WriteOptions())
    convert(tmp_path / "theirs", "native", tmp_path / "native")
    found = NativeReader(tmp_path / "native")
    assert found.manifest.layout["group_size"] == 32
    for layer, other in zip(source.layers, found.layers, strict=True):
        for expert in range(layer.num_experts):
            mine, theirs = source.expert(layer, expert)[0], found.expert(other, expert)[0]
            assert all(torch.equal(mine[name].dequantize(), theirs[name].dequantize()) for name in mine)


def refused(source: MadeSource, runtime: str, folder: Path, *words: str) -> None:
    """What a checkpoint becomes no native one for, in one line, and that nothing is left."""
    write(runtime, source, folder / "theirs", WriteOptions())
    with pytest.raises(FormatError) as error:
        convert(folder / "theirs", "native", folder / "native")
    assert "\n" not in str(error.value)
    for word in words:
        assert word in str(error.value)
    assert not (folder / "native").exists()


def test_what_cannot_be_carried_is_refused_by_its_name(mixtral: Path, tmp_path: Path) -> None:
    six = MadeSource(mixtral, lambda layer, *_: 6 if layer else 4)
    refused(six, "auto-round", tmp_path / "six", "model.layers.1.mlp.experts.0.gate_proj: 6 bits", "--widen")
    router = MadeSource(mixtral, lambda *_: 4)
    write("gptqmodel", router, tmp_path / "router", WriteOptions())
    path = tmp_path / "router" / "model-experts-000.safetensors"
    tensors = load_file(path)
    key = "model.layers.0.mlp.experts.3.up_proj.scales"
    save_file(tensors | {key: tensors[key].float() + 1e-9}, path, {"format": "pt"})
    (tmp_path / "router" / "SHA256SUMS").unlink()
    with pytest.raises(FormatError, match=r"experts\.3\.up_proj: scales that float16 does not hold"):
        convert(tmp_path / "router", "native", tmp_path / "none")
    convert(tmp_path / "six" / "theirs", "native", tmp_path / "wide", widen=True)
    assert {weight.bits for layer in NativeReader(tmp_path / "wide").manifest.layers for weight in layer.experts} == {
        4,
        8,
    }


def test_blocks_that_no_grid_holds_become_values_alone(tmp_path: Path) -> None:
    """Of llama.cpp's own Q4_K, whose scales are products."""
    peers.module("gguf")
    model = save_model(tmp_path / "model", "qwen3_moe", hidden_size=256, moe_intermediate_size=256, norm_topk_prob=True)
    source = MadeSource(model, lambda *_: 4, group_size=256, symmetric=False)
    write("llama.cpp", source, tmp_path / "theirs", WriteOptions())
    file = gguf_headers(tmp_path / "theirs")[0]
    tensor = file.tensors["blk.1.ffn_up_exps.weight"]
    data = bytearray(file.path.read_bytes())
    at = tensor.offset + tensor.bytes // 4  # the first block of expert 1 of 4, or of a later row
    block = at + (tensor.offset - at) % 144
    data[block : block + 2] = torch.tensor([0.1], dtype=torch.float16).view(torch.uint8).numpy().tobytes()
    data[block + 4] = data[block + 4] & 0xC0 | 37  # 37 * 0.1 has more digits than float16
    file.path.write_bytes(data)
    (tmp_path / "theirs" / "SHA256SUMS").unlink()
    with pytest.raises(FormatError, match=r"expert \d of blk\.1\.ffn_up_exps\.weight: Q4_K with a"):
        convert(tmp_path / "theirs", "native", tmp_path / "native")
    convert(tmp_path / "theirs", "dequantized", tmp_path / "plain")
    made, plain = open_packed(tmp_path / "theirs", as_values=True), open_packed(tmp_path / "plain")
    for layer, other in zip(made.layers, plain.layers, strict=True):
        for expert in range(layer.num_experts):
            found = plain.expert(other, expert)[0]
            for name, exact in made.expert(layer, expert)[0].items():
                stored = found[name]
                assert isinstance(exact, torch.Tensor)
                assert isinstance(stored, torch.Tensor)
                assert torch.equal(exact.to(stored.dtype), stored)


def test_native_is_not_made_of_native_nor_of_plain(mixtral: Path, tmp_path: Path) -> None:
    write("gptqmodel", MadeSource(mixtral, lambda *_: 4), tmp_path / "theirs", WriteOptions())
    convert(tmp_path / "theirs", "native", tmp_path / "native")
    with pytest.raises(FormatError, match="it is in the native format already"):
        convert(tmp_path / "native", "native", tmp_path / "again")
    with pytest.raises(ArtifactError, match="nothing in it is packed"):
        convert(mixtral, "native", tmp_path / "again")


def test_tensors_without_sums_are_those_of_the_manifest(mixtral: Path, tmp_path: Path) -> None:
    """Also what is not packed, where SHA256SUMS is gone: a flipped bit was carried on without a word."""
    write("auto-round", MadeSource(mixtral, lambda *place: 4), tmp_path / "made", WriteOptions())
    convert(tmp_path / "made", "native", tmp_path / "native")
    (tmp_path / "native" / "SHA256SUMS").unlink()
    convert(tmp_path / "native", "dequantized", tmp_path / "plain")
    file = tmp_path / "native" / "model-00001-of-00001.safetensors"
    stored = bytearray(file.read_bytes())
    stored[-1] ^= 1
    file.write_bytes(stored)
    with pytest.raises(ArtifactError, match="SHA-256 of the tensor differs from the manifest"):
        convert(tmp_path / "native", "dequantized", tmp_path / "out")
    assert not (tmp_path / "out").exists()
