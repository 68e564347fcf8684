"""What the exporters write, without the runtimes: values, names, refusals, half-written directories."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import family_models
import pytest
import torch
from cases import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from made_sources import IDS, MadeSource, quantization_of, reference_logits, rounded, save_model
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from moeq.artifacts.files import PARTIAL
from moeq.artifacts.targets import WIDEN, Grid, loadable_grid, refuse_matrix, targets
from moeq.errors import ArtifactError, FormatError, RecipeError
from moeq.exporters import write
from moeq.exporters.dequantized import plain_dtype
from moeq.exporters.exporter import read_by
from moeq.exporters.foreign import WriteOptions
from moeq.exporters.gptq_layout import _common, patterns
from moeq.exporters.packed_source import Matrices
from moeq.exporters.readers import open_packed
from moeq.models.disk_names import DiskNames
from moeq.models.experts import ExpertLayer
from moeq.models.loading import describe, expert_keys, load_model
from moeq.models.source import open_source
from moeq.numerics.layouts import column_stream, zeros_of
from moeq.progress import Reporter
from moeq.runtimes import of_method, runtimes, written
from moeq.verification.weights import differences
from moeq_kernels.packed import PackedWeight, symmetric_bits, widened
from moeq_kernels.packing import unpack
from moeq_kernels.widths import Encoding

MIX = (2, 3, 4, 8, 16, 4)


def mixed(layer: int, expert: int, projection: str) -> int:
    return MIX[(layer + expert) % len(MIX)]


@pytest.fixture(scope="module")
def mixtral(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("mixtral") / "model", "mixtral", sliding_window=None)


def all_tensors(directory: Path) -> dict[str, Tensor]:
    return {key: value for file in directory.glob("*.safetensors") for key, value in load_file(file).items()}


@pytest.mark.cases(1)
@pytest.mark.parametrize("family", ["mixtral", "gpt_oss", "qwen2_moe", "dbrx", "longcat_flash"])
def test_dequantized_computes_the_same(family: str, tmp_path: Path) -> None:
    """Families that keep experts apart on disk, also beside those of none; in one tensor, with biases, transposed."""
    family_models.build(family).save_pretrained(tmp_path / "model")
    source = MadeSource(tmp_path / "model", mixed, group_size=16, symmetric=False)
    write("dequantized", source, tmp_path / "out", WriteOptions())
    assert set(open_source(str(tmp_path / "out")).tensors) == set(source.source.tensors)
    model = load_model(open_source(str(tmp_path / "out")), torch.float32, torch.device("cpu"))
    with torch.no_grad():
        found = model(input_ids=IDS).logits
    wanted = reference_logits(source)
    assert float((found - wanted).norm() / wanted.norm()) < 1e-6


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_plain_values_of_other_modules_are_those_that_were_packed(dtype: torch.dtype, tmp_path: Path) -> None:
    """Also in the type of what stands in their place in the packed checkpoint."""
    family_models.build("mixtral").to(dtype).save_pretrained(tmp_path / "model")
    name = "model.layers.0.self_attn.q_proj"
    source = MadeSource(tmp_path / "model", lambda layer, expert, projection: 4, group_size=8, others={name: 4})
    write("native", source, tmp_path / "native", WriteOptions())
    write("dequantized", source, tmp_path / "out", WriteOptions())
    packed, reporter = open_packed(tmp_path / "native"), Reporter(quiet=True)
    assert differences(packed, open_packed(tmp_path / "out", as_values=True), reporter) == []
    header = open_source(str(tmp_path / "out")).tensors[f"{name}.weight"]
    tensors = load_file(header.file)
    tensors[f"{name}.weight"][3, 5] += 1
    save_file(tensors, header.file, {"format": "pt"})
    damaged = open_packed(tmp_path / "out", as_values=True)
    assert differences(packed, damaged, reporter) == [f"{name}: its values differ"]


def test_the_models_type_is_that_of_what_is_not_packed(mixtral: Path) -> None:
    source = MadeSource(mixtral, lambda layer, expert, projection: 8)
    packed = {
        key: replace(header, dtype="F8_E5M2") for key, header in source.source.tensors.items() if "experts" in key
    }
    source.source = replace(source.source, tensors=source.source.tensors | packed)
    assert plain_dtype(source) == torch.bfloat16


@pytest.mark.cases(3)
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("name", ["auto-round", "gptqmodel"])
def test_gptq_layout_holds_the_values(name: str, symmetric: bool, mixtral: Path, tmp_path: Path) -> None:
    source = MadeSource(mixtral, mixed, symmetric=symmetric)
    write(name, source, tmp_path / "out", WriteOptions())
    tensors, declared = all_tensors(tmp_path / "out"), quantization_of(tmp_path / "out")
    first = declared.get("packing_format") == "auto_round:auto_gptq" or declared.get("checkpoint_format") == "gptq"
    assert first == symmetric == declared["sym"]
    names = DiskNames(source.model)
    for layer in source.layers:
        for expert in range(layer.num_experts):
            for projection, matrix in source.expert(layer, expert)[0].items():
                key = f"{layer.name}.{expert}.{projection}."
                key = names.renamed(key) if name == "auto-round" else key
                if isinstance(matrix, Tensor):
                    assert torch.equal(tensors[f"{key}weight"], matrix)
                    continue
                codes = unpack(
                    column_stream(tensors[f"{key}qweight"], matrix.bits, matrix.inputs), matrix.bits, matrix.inputs
                )
                rows = matrix.scales.shape[0]
                zeros = zeros_of(tensors[f"{key}qzeros"], matrix.bits, rows, less_one=first).float()
                scales = tensors[f"{key}scales"].float().mT
                values = (codes.float() - zeros.repeat_interleave(32, -1)) * scales.repeat_interleave(32, -1)
                assert torch.equal(values, matrix.dequantize())


@given(st.data())
@settings(max_examples=examples(150), deadline=None)
def test_widened_has_the_same_values(data: st.DataObject) -> None:
    bits = data.draw(st.integers(1, 8))
    symmetric = data.draw(st.booleans())
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**31)))
    rows, inputs, group = (
        data.draw(st.integers(1, 5)),
        data.draw(st.integers(1, 40)),
        data.draw(st.sampled_from([-1, 8, 16])),
    )
    weight = rounded(torch.randn(rows, inputs, generator=generator), bits, group, symmetric)
    least = symmetric_bits(weight)
    wide = data.draw(st.integers(least, 9))
    if wide == 9 or least > 8:
        with pytest.raises(ValueError, match="no symmetric grid"):
            widened(weight, wide)
        return
    found = widened(weight, wide)
    assert (found.bits, found.symmetric, found.zeros) == (wide, True, None)
    assert torch.equal(found.dequantize(), weight.dequantize())
    if least > 1:
        with pytest.raises(ValueError, match="no symmetric grid"):
            widened(weight, least - 1)


REFUSED = {
    "one bit": ("auto-round", lambda layer, expert, projection: 1, {}, "1 bits; auto-round loads", "--widen"),
    "one bit for gptq": ("gptqmodel", lambda layer, expert, projection: 1, {}, "1 bits; gptqmodel loads", "--widen"),
    "mixed widths": ("transformers", mixed, {}, "one scheme for all experts", "assign.target: transformers"),
    "full precision": (
        "transformers", lambda layer, expert, projection: 16 if expert == 3 else 4, {}, "full precision beside",
        "assign.target: transformers",
    ),
    "zero points": (
        "transformers", lambda layer, expert, projection: 4, {"symmetric": False}, "zero points",
        "losses.symmetric: true",
    ),
    "short groups": (
        "auto-round", lambda layer, expert, projection: 4, {"group_size": 48}, "128 inputs in groups of 48",
        "losses.group_size: 128",
    ),
    "packed embeddings": (
        "gptqmodel", lambda layer, expert, projection: 4, {"others": {"model.embed_tokens": 4}}, "embeddings and heads",
        "leave embeddings",
    ),
    "other modules": (
        "transformers", lambda layer, expert, projection: 4, {"others": {"model.layers.0.self_attn.q_proj": 4}},
        "full precision only", "auto-round or gptq",
    ),
}  # fmt: skip


def scale_all(source: MadeSource, monkeypatch: pytest.MonkeyPatch, scale: float) -> None:
    """Give every scale of the ups this value."""
    honest = source.expert

    def scaled(layer: ExpertLayer, expert: int) -> tuple[Matrices, dict[str, Tensor]]:
        matrices, biases = honest(layer, expert)
        weight = matrices["up_proj"]
        assert isinstance(weight, PackedWeight)
        return matrices | {"up_proj": replace(weight, scales=torch.full_like(weight.scales, scale))}, biases

    monkeypatch.setattr(source, "expert", scaled)


def test_values_beyond_float16_are_refused_where_they_are_computed_in_it(
    mixtral: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At float16's ends: the least scales are written as they are, the largest only where no product is infinite."""
    source = MadeSource(mixtral, lambda layer, expert, projection: 8)
    for scale in (2.0**-24, 511.0):
        scale_all(source, monkeypatch, scale)
        write("transformers", source, tmp_path / "out", WriteOptions())
        tensors = all_tensors(tmp_path / "out")
        stored = [tensor for key, tensor in tensors.items() if key.endswith("w3.weight_scale")]
        assert stored
        assert all(bool((tensor == scale).all()) for tensor in stored)
    scale_all(source, monkeypatch, 60000.0)
    with pytest.raises(FormatError, match=r"experts\.0\.up_proj: values beyond float16"):
        write("transformers", source, tmp_path / "no", WriteOptions())
    write("dequantized", source, tmp_path / "plain", WriteOptions())
    half = AutoModelForCausalLM.from_pretrained(mixtral, dtype=torch.float16)
    half.save_pretrained(tmp_path / "half")
    source = MadeSource(tmp_path / "half", lambda layer, expert, projection: 8)
    scale_all(source, monkeypatch, 60000.0)
    with pytest.raises(FormatError, match=r"dequantized: .*experts\.0\.up_proj: values beyond float16"):
        write("dequantized", source, tmp_path / "no", WriteOptions())


@pytest.mark.cases(7)
@pytest.mark.parametrize("case", list(REFUSED))
def test_refusals_name_the_place_and_what_works(case: str, mixtral: Path, tmp_path: Path) -> None:
    name, choose, settings_, why, remedy = REFUSED[case]
    with pytest.raises(FormatError) as error:
        write(name, MadeSource(mixtral, choose, **settings_), tmp_path / "out", WriteOptions())
    assert why in str(error.value)
    assert remedy in str(error.value)
    assert "model." in str(error.value.where)
    assert not list(tmp_path.iterdir()), "nothing is left behind"


@pytest.mark.cases(2)
@pytest.mark.parametrize("family", ["gpt_oss", "granitemoe", "switch_transformers"])
@pytest.mark.parametrize("name", ["auto-round", "gptqmodel", "transformers"])
def test_families_without_a_tensor_for_every_matrix_are_refused(family: str, name: str, tmp_path: Path) -> None:
    family_models.build(family).save_pretrained(tmp_path / "model")
    source = MadeSource(tmp_path / "model", lambda layer, expert, projection: 4, group_size=8)
    with pytest.raises(FormatError, match="native or dequantized"):
        write(name, source, tmp_path / "out", WriteOptions())
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["auto-round", "transformers"])
def test_matrices_of_experts_that_compute_nothing_are_refused_beside_packed_ones(name: str, tmp_path: Path) -> None:
    """transformers wants LongCat's, which are none of the experts that are packed."""
    family_models.build("longcat_flash").save_pretrained(tmp_path / "model")
    source = MadeSource(tmp_path / "model", lambda layer, expert, projection: 4, group_size=8)
    with pytest.raises(FormatError, match=r"longcat_flash stores matrices of 2 experts that compute nothing.* or dequ"):
        write(name, source, tmp_path / "out", WriteOptions())
    assert not (tmp_path / "out").exists()
    model, _ = describe(source.source)
    with pytest.raises(FormatError, match="experts that compute nothing"):
        runtimes()[name].exporter.check(source.source, model)


@pytest.mark.parametrize("name", list(targets()))
def test_widening_alone_is_advised_where_it_helps(name: str) -> None:
    """With it the same line came again, where groups or rows are refused of every wider grid, too."""
    target = targets()[name]
    cases = product(range(1, 9), (-1, 16, 32, 48, 64, 128), (True, False), (96, 128, 256, 1000))
    for bits, size, symmetric, inputs in cases:
        grid = Grid(rows=256, inputs=inputs, bits=bits, group_size=size, symmetric=symmetric or bits == 1)
        refused = refuse_matrix(target, grid)
        if refused is None:
            continue
        alone = refused[1] == WIDEN or refused[1].endswith(f"or {WIDEN}")
        helps = refuse_matrix(target, loadable_grid(target, grid)) is None
        assert helps or not alone, (grid, refused)
        assert alone or WIDEN not in refused[1] or "set losses." in refused[1]


@pytest.mark.parametrize("widen", [True, False])
def test_what_no_width_makes_alike_is_not_to_be_widened(widen: bool, mixtral: Path, tmp_path: Path) -> None:
    source = MadeSource(mixtral, lambda layer, expert, projection: 16 if expert == 3 else 4)
    with pytest.raises(FormatError, match="full precision beside") as caught:
        write("transformers", source, tmp_path / "out", WriteOptions(widen=widen))
    assert "widen" not in str(caught.value)


def test_widen_stores_the_same_values(mixtral: Path, tmp_path: Path) -> None:
    source = MadeSource(mixtral, lambda layer, expert, projection: 1 + expert % 3, symmetric=False)
    write("transformers", source, tmp_path / "out", WriteOptions(widen=True))
    weights = quantization_of(tmp_path / "out")["config_groups"]["group_0"]["weights"]
    assert (weights["num_bits"], weights["symmetric"]) == (4, True)
    tensors = all_tensors(tmp_path / "out")
    for layer in source.layers:
        for (expert, projection), key in (DiskNames(source.model).experts(layer) or {}).items():
            matrix = source.expert(layer, expert)[0][projection]
            assert not isinstance(matrix, Tensor)
            stem = key.removesuffix("weight")
            words = tensors[f"{stem}weight_packed"].view(torch.uint8)
            values = unpack(words, 4, matrix.inputs).float() - 8
            assert torch.equal(
                values * tensors[f"{stem}weight_scale"].float().repeat_interleave(32, -1), matrix.dequantize()
            )
            assert tensors[f"{stem}weight_shape"].tolist() == list(matrix.dequantize().shape)


@pytest.mark.parametrize("name", ["transformers", "vllm", "vllm-gptq", "humming"])
def test_what_no_wider_codes_hold_is_refused_in_its_own_words(name: str, mixtral: Path, tmp_path: Path) -> None:
    square = save_model(tmp_path / "model", "mixtral", intermediate_size=128, num_hidden_layers=1)
    walked = MadeSource(square, lambda layer, expert, projection: 3, exl3=True)
    with pytest.raises(FormatError, match=f"gate_proj: EXL3's codes; {name} has none"):
        write(name, walked, tmp_path / "out", WriteOptions(widen=True))
    eight = MadeSource(mixtral, lambda layer, expert, projection: 8, symmetric=False)
    with pytest.raises(FormatError, match=r"gate_proj: (zero points|8 bits); ") as error:
        write(name, eight, tmp_path / "out", WriteOptions(widen=True))
    assert "--widen" not in str(error.value)


def test_a_sign_grid_whose_scale_is_not_halved_is_refused(
    mixtral: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = MadeSource(mixtral, lambda layer, expert, projection: 1)
    scale_all(source, monkeypatch, 2.0**-24)
    with pytest.raises(
        FormatError, match=r"experts\.0\.up_proj: a scale is too small to be halved; write it for native"
    ):
        write("auto-round", source, tmp_path / "out", WriteOptions(widen=True))


def by_fused_layer(layer: int, expert: int, projection: str) -> int:
    """The first layer at 4 bits, the second mixed, the third in full precision."""
    return (4, (8, 16, 2)[expert % 3], 16)[layer]


def rule(declared: dict[str, Any], name: str) -> Any:
    """What vLLM finds for a module in `dynamic` or `extra_config`; None where it takes what is declared for all."""
    for pattern, found in (declared.get("dynamic") or declared["extra_config"]).items():
        if re.match(pattern.removeprefix("+:").removeprefix("-:"), name):
            return found.get("bits", 16)
    return None


@pytest.mark.parametrize("name", ["auto-round", "gptqmodel"])
def test_what_is_declared_for_all_makes_room_for_the_least(name: str, tmp_path: Path) -> None:
    """A runtime that asks for no rule, or for that of the fused experts alone, has no buffer larger than a tensor."""
    model = save_model(tmp_path / "model", "mixtral", num_hidden_layers=3)
    write(name, MadeSource(model, by_fused_layer), tmp_path / "out", WriteOptions())
    declared = quantization_of(tmp_path / "out")
    assert (declared["bits"], declared["group_size"]) == (2, 32)
    called = ["mlp.experts"] if name == "gptqmodel" else ["mlp.experts", "block_sparse_moe.experts"]
    for experts in called:
        assert [rule(declared, f"model.layers.{layer}.{experts}") for layer in range(3)] == [4, None, 16]
        leaves = [rule(declared, f"model.layers.1.{experts}.{expert}.up_proj") for expert in range(3)]
        assert leaves == [8, 16, None]
    assert rule(declared, "model.layers.1.self_attn.qkv_proj") == 16
    assert rule(declared, "model.layers.1.self_attn.q_proj") == 16


def test_the_common_grid_is_the_least() -> None:
    assert _common({(4, 128): 0, (2, 32): 0}) == (2, 128)
    assert _common({(8, 64): 0, (4, -1): 0, (4, 64): 0}) == (4, -1), "a whole row is the largest group"
    assert _common({}) == (4, 128)


def test_linears_that_runtimes_fuse_have_a_rule_where_their_parts_agree(mixtral: Path, tmp_path: Path) -> None:
    attention = "model.layers.{}.self_attn.{}_proj"
    others = {attention.format(0, part): 8 for part in "qkv"} | {attention.format(1, "q"): 8}
    source = MadeSource(mixtral, lambda layer, expert, projection: 4, others=others)
    write("gptqmodel", source, tmp_path / "out", WriteOptions())
    declared = quantization_of(tmp_path / "out")
    assert rule(declared, attention.format(0, "qkv")) == rule(declared, attention.format(0, "q")) == 8
    assert rule(declared, attention.format(1, "qkv")) is None, "q is packed, k and v are not"


def test_vllms_gptq_has_the_familys_names_and_one_grid_a_layer(tmp_path: Path) -> None:
    mixtral = save_model(tmp_path / "model", "mixtral", intermediate_size=128)
    source = MadeSource(mixtral, lambda layer, expert, projection: (4, 16)[layer], group_size=64)
    write("vllm-gptq", source, tmp_path / "out", WriteOptions())
    names = {key.rpartition(".")[0] for key in all_tensors(tmp_path / "out") if "experts" in key}
    on_disk = {key.rpartition(".")[0] for key in source.source.tensors if "experts" in key}
    assert names == on_disk
    assert any(name.endswith("block_sparse_moe.experts.0.w1") for name in names)
    declared = quantization_of(tmp_path / "out")
    prefix = "model.layers.{}.block_sparse_moe.experts"
    assert (declared["bits"], [rule(declared, prefix.format(layer)) for layer in (0, 1)]) == (4, [None, 16])
    exporter = of_method("gptq")
    assert exporter is not None
    assert read_by(exporter, open_packed(tmp_path / "out")) == {"vllm-gptq": None}
    others = MadeSource(mixtral, lambda *place: 4, group_size=64, others={"model.layers.0.self_attn.q_proj": 4})
    for choose, why in (((4, 16), "full precision beside 4 bits"), ((16, 4), "4 bits beside full precision")):
        mixed = MadeSource(mixtral, lambda layer, expert, part, bits=choose: bits[expert % 2], group_size=64)
        with pytest.raises(FormatError, match=rf"for vllm-gptq: .*{why}.*one scheme for all experts of a layer"):
            write("vllm-gptq", mixed, tmp_path / "no", WriteOptions())
    with pytest.raises(FormatError, match=r"for vllm-gptq: model\.layers\.0.*modules outside of the experts"):
        write("vllm-gptq", others, tmp_path / "no", WriteOptions())


def test_patterns_match_exactly_what_they_name() -> None:
    every = [
        f"model.layers.{layer}.mlp.experts.{expert}.{leaf}"
        for layer in range(12)
        for expert in range(12)
        for leaf in ("gate_proj", "up_proj", "down_proj")
    ]
    every += [f"model.layers.{layer}.{leaf}" for layer in range(12) for leaf in ("mlp.gate", "self_attn.q_proj")]
    chosen = [name for name in every if sum(map(ord, name)) % 3 == 0] + [
        "model.layers.1.mlp.gate",
        "model.layers.1.self_attn.q_proj",
    ]
    found = patterns(chosen)
    assert len(found) <= 12
    assert {name for name in every if any(re.search(pattern, name) for pattern in found)} == set(chosen)
    assert {name for name in every if any(re.match(pattern, name) for pattern in found)} == set(chosen)


def test_patterns_outlive_what_auto_round_makes_of_them() -> None:
    """It renames them as transformers renames Mixtral's weights, by a pattern whose dots are any character."""
    below = ["gate", *(f"experts.{expert}.{leaf}" for expert in range(12) for leaf in ("w1", "w2", "w3"))]
    every = [f"model.layers.{layer}.{place}.{name}" for layer in range(12) for place in ("block_sparse_moe", "mlp")
             for name in below] + [f"model.layers.{layer}.self_attn.q_proj" for layer in range(12)]  # fmt: skip
    chosen = {name for name in every if sum(map(ord, name.replace("block_sparse_moe", "mlp"))) % 3 == 0}
    found = patterns(sorted(chosen))
    assert {name for name in every if any(re.search(pattern, name) for pattern in found)} == chosen
    renamed = [re.compile(re.sub(".block_sparse_moe.", ".mlp.", pattern)) for pattern in found]
    memory = {name for name in every if "block_sparse_moe" not in name}
    assert {name for name in memory if any(one.search(name) for one in renamed)} == chosen & memory


@pytest.mark.full
@pytest.mark.fresh_process
def test_a_mixtral_is_loaded_by_auto_round_in_a_process_of_its_own(mixtral: Path, tmp_path: Path) -> None:
    pytest.importorskip("auto_round")
    from moeq.conversion import convert

    source = MadeSource(mixtral, lambda layer, expert, part: 2 + expert % 3, group_size=32)
    write("native", source, tmp_path / "packed", WriteOptions())
    found = convert(tmp_path / "packed", "auto-round", tmp_path / "out", verify=True)
    assert found["verified_with"] == "auto-round"


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "olmoe", "deepseek_v3", "phimoe", "jamba", "nemotron_h"])
def test_names_on_disk_are_the_familys(family: str, tmp_path: Path) -> None:
    family_models.build(family).save_pretrained(tmp_path)
    source = open_source(str(tmp_path))
    model, layers = describe(source)
    names = [DiskNames(model).experts(layer) for layer in layers]
    assert {key for found in names for key in (found or {}).values()} == expert_keys(source, model, layers)


def test_targets_say_what_they_load_and_why() -> None:
    for target in targets().values():
        assert target.proof
        own = {"group_size": 64, "symmetric": True} if "grid" in target.codes else vars(Encoding.exl3())
        assert refuse_matrix(target, Grid(rows=128, inputs=128, bits=4, **own)) is None
    ragged = Grid(rows=128, inputs=72, bits=4, group_size=32, symmetric=True)
    assert {name for name, target in targets().items() if refuse_matrix(target, ragged) is None} == {"native"}


def test_groups_without_a_kernel_are_refused_with_those_that_have_one() -> None:
    asked = {"rows": 128, "bits": 4, "symmetric": True}
    vllm = targets()["vllm"]
    assert refuse_matrix(vllm, Grid(inputs=256, group_size=64, **asked)) is None
    for inputs, size, why, do in (
        (256, 32, "groups of 32; vllm loads groups of 64, 128", "set losses.group_size: 128"),
        (192, -1, "whole rows as groups; vllm loads groups of 64, 128", "set losses.group_size: 64"),
        (192, 128, "192 inputs in groups of 128; vllm reads whole groups only", "set losses.group_size: 64"),
        (96, 64, "96 inputs in groups of 64; vllm reads whole groups only", "write it for native or dequantized"),
    ):
        assert refuse_matrix(vllm, Grid(inputs=inputs, group_size=size, **asked)) == (why, do)


def test_codes_that_are_no_grids_are_not_to_be_widened() -> None:
    """Of other tools' EXL3 there are 5, 6 and 7 bits, too."""
    walked = Grid(rows=128, inputs=128, bits=7, group_size=-1, symmetric=True, state_bits=16, codebook="mcg")
    for name in ("native", "exl3"):
        why = f"7 bits; {name} loads {targets()[name].listed()}"
        assert refuse_matrix(targets()[name], walked) == (why, "convert it to dequantized")


def test_a_write_that_fails_leaves_the_older_checkpoint(
    mixtral: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = MadeSource(mixtral, lambda layer, expert, projection: 4)
    write("auto-round", source, tmp_path / "out", WriteOptions())
    before = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}

    def broken(layer: object, expert: int) -> None:
        raise ArtifactError("cut off")

    monkeypatch.setattr(source, "expert", broken)
    with pytest.raises(ArtifactError, match="cut off"):
        write("auto-round", source, tmp_path / "out", WriteOptions())
    assert {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()} == before
    assert not list(tmp_path.glob(f"*{PARTIAL}"))


def test_unknown_formats_are_refused(mixtral: Path, tmp_path: Path) -> None:
    source = MadeSource(mixtral, lambda layer, expert, projection: 4)
    with pytest.raises(
        RecipeError, match=r"unknown runtime 'awq'; use one of native, auto-round, transformers, vllm, vllm-cuda, "
    ):
        write("awq", source, tmp_path / "out", WriteOptions())
    assert "awq" not in written()
