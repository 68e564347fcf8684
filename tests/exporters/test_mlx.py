"""MLX's layout: a grid for each stack of experts, read back by another reader and by mlx-lm, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import peers
import pytest
import torch
from made_sources import IDS, OF_MLX, Choose, MadeSource, reference_logits, save_model
from safetensors.torch import load_file, save_file
from torch import Tensor

from moeq import pipeline
from moeq.artifacts.stage import read_record
from moeq.errors import ArtifactError, FormatError
from moeq.exporters import write
from moeq.exporters.foreign import WriteOptions
from moeq.exporters.mlx_families import FAMILIES
from moeq.exporters.readers import open_other, open_packed
from moeq.exporters.readers.foreign import Foreign
from moeq.folders import bytes_in
from moeq.inspection import inspect
from moeq.models.source import open_source
from moeq.progress import Reporter
from moeq.recipe import load_recipe
from moeq.stages import non_experts
from moeq.stages.context import Context
from moeq.verification.launch import NotInstalledError
from moeq.verification.verify import Options, verify
from moeq.verification.weights import differences
from moeq_kernels.packed import PackedWeight

GROUP = 32
BLOCKS = {"mixtral": "block_sparse_moe", "qwen3_moe": "mlp"}
BESIDE = tuple(f"{name}.weight" for name in ("o_proj", "q_proj", "self_attn.kv_b_proj", "embed_tokens"))
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32}
OTHERS = {"model.layers.0.self_attn.q_proj": 4, "model.layers.1.self_attn.o_proj": 8, "model.embed_tokens": 8}
BY_STACK = {"gate_proj": 2, "up_proj": 3, "down_proj": 5}


@pytest.fixture(scope="module", params=BLOCKS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    settings: dict[str, Any] = {"sliding_window": None, "intermediate_size": 64} if request.param == "mixtral" else {}
    return save_model(tmp_path_factory.mktemp("model") / request.param, request.param, **settings)


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("qwen") / "qwen3_moe", "qwen3_moe")


def by_stack(layer: int, expert: int, projection: str) -> int:
    return BY_STACK[projection] if layer == 0 else {"gate_proj": 16, "up_proj": 8, "down_proj": 6}[projection]


def config_of(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "config.json").read_text("utf-8"))
    return found


def tensors_of(folder: Path) -> dict[str, Tensor]:
    """As mlx-lm takes them: of files that are called model*."""
    return {key: tensor for file in folder.glob("model*.safetensors") for key, tensor in load_file(file).items()}


def affine(weight: Tensor, scales: Tensor, biases: Tensor, bits: int) -> np.ndarray[Any, Any]:
    """As MLX documents mx.dequantize: code i of a row at bit i*bits of its words' stream, times a group's scale, plus
    its bias."""
    words = weight.view(torch.int32).numpy().view(np.uint32)
    stream = (words[..., None] >> np.arange(32, dtype=np.uint32)) & 1
    each = stream.reshape(*words.shape[:-1], -1, bits).astype(np.int64)
    codes = (each << np.arange(bits)).sum(-1)
    size = codes.shape[-1] // scales.shape[-1]
    steps, starts = (one.double().numpy().repeat(size, axis=-1) for one in (scales, biases))
    return codes * steps + starts


@pytest.mark.parametrize("symmetric", [True, False])
def test_every_matrix_is_what_an_independent_reader_finds(model: Path, tmp_path: Path, symmetric: bool) -> None:
    """Within what bfloat16 keeps of scales and zero points, each named with its grid."""
    source = MadeSource(model, by_stack, group_size=GROUP, symmetric=symmetric, others=OTHERS)
    write("mlx", source, tmp_path / "out", WriteOptions())
    config, tensors, seen = config_of(tmp_path / "out"), tensors_of(tmp_path / "out"), set()
    declared = config["quantization"]
    assert declared == config["quantization_config"]
    assert (declared["mode"], declared["quant_method"]) == ("affine", "mlx")
    for layer in source.layers:
        for expert in range(layer.num_experts):
            for projection, matrix in source.expert(layer, expert)[0].items():
                name = f"model.layers.{layer.index}.{BLOCKS[model.name]}.switch_mlp.{projection}"
                if isinstance(matrix, Tensor):
                    assert name not in declared
                    assert torch.equal(tensors[f"{name}.weight"][expert], matrix)
                    continue
                seen.add(name)
                assert declared[name] == {"group_size": GROUP, "bits": matrix.bits}
                parts = [tensors[f"{name}.{part}"] for part in ("weight", "scales", "biases")]
                assert [part.dtype for part in parts] == [torch.uint32, torch.bfloat16, torch.bfloat16]
                assert len(parts[0]) == layer.num_experts
                wanted = matrix.dequantize().double().numpy()
                found = affine(*(part[expert] for part in parts), bits=matrix.bits)
                most = np.abs(matrix.scales.float().numpy()).max() * 2**matrix.bits * 2.0**-8
                assert np.abs(found - wanted).max() <= most, name
    for name, weight in source.others():
        seen.add(name)
        assert declared[name] == {"group_size": GROUP, "bits": weight.bits}
        assert f"{name}.scales" in tensors
    assert seen == {key for key, one in declared.items() if isinstance(one, dict)}
    assert not any(".experts." in key for key in tensors)


@pytest.mark.cases(6)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_is_read_back(family: str, tmp_path: Path) -> None:
    """Stacks under the name that mlx-lm has for them, whatever the family calls its experts on the disk."""
    source = MadeSource(
        save_model(tmp_path / "model", family, **OF_MLX.get(family, {})),
        lambda *_: 4,
        group_size=GROUP,
        symmetric=False,
    )
    write("mlx", source, tmp_path / "out", WriteOptions())
    found = open_packed(tmp_path / "out", as_values=True)
    assert isinstance(found, Foreign)
    found.check()
    for layer in found.layers:
        for expert in (0, layer.num_experts - 1):
            wanted, biases = source.expert(source.layers[layer.index], expert)
            values, read = found.expert(layer, expert)
            assert {name: tensor.tolist() for name, tensor in read.items()} == {
                name: tensor.tolist() for name, tensor in biases.items()
            }
            for name, matrix in values.items():
                assert torch.equal(_values(matrix), _values(found.written(wanted[name])))
    declared, keys = config_of(tmp_path / "out")["quantization"], tensors_of(tmp_path / "out")
    stacks = {key.removesuffix(".scales") for key in keys if key.endswith(".scales")}
    assert len(stacks) == 3 * len(found.layers)
    assert {FAMILIES[family].own(name) for name in stacks} <= declared.keys()


def _values(matrix: PackedWeight | Tensor) -> Tensor:
    return matrix.dequantize() if isinstance(matrix, PackedWeight) else matrix


@pytest.mark.parametrize("symmetric", [True, False])
def test_what_was_written_is_read_back(model: Path, tmp_path: Path, symmetric: bool) -> None:
    """A symmetric grid as one; of zero points the values that MLX computes with, and no others."""
    source = MadeSource(model, by_stack, group_size=GROUP, symmetric=symmetric, others=OTHERS)
    write("mlx", source, tmp_path / "out", WriteOptions())
    found = open_packed(tmp_path / "out", as_values=True)
    assert isinstance(found, Foreign)
    found.check()
    tensors = tensors_of(tmp_path / "out")
    layer = found.layers[0]
    for projection, matrix in found.expert(layer, 2)[0].items():
        name = f"model.layers.0.{BLOCKS[model.name]}.switch_mlp.{projection}"
        parts = (tensors[f"{name}.{part}"][2] for part in ("weight", "scales", "biases"))
        wanted = affine(*parts, bits=BY_STACK[projection])
        if symmetric:
            assert isinstance(matrix, PackedWeight)
            assert matrix.symmetric
        values = matrix.dequantize() if isinstance(matrix, PackedWeight) else matrix
        np.testing.assert_allclose(values.numpy(), wanted, rtol=0, atol=1e-6 * np.abs(wanted).max())
    assert sorted(name for name, _ in source.others()) == found.other_names()
    assert differences(source, found, Reporter(quiet=True)) == []
    said = inspect(tmp_path / "out")
    assert (said["kind"], said["packed_modules_beside_experts"]) == ("packed checkpoint (mlx)", len(OTHERS))


def test_a_changed_code_is_found(qwen: Path, tmp_path: Path) -> None:
    source = MadeSource(qwen, by_stack, group_size=GROUP)
    write("mlx", source, tmp_path / "out", WriteOptions())
    file = tmp_path / "out" / "model-experts-000.safetensors"
    tensors = load_file(file)
    words = tensors["model.layers.0.mlp.switch_mlp.up_proj.weight"].view(torch.int32)
    words[3, 0, 0] ^= 1
    save_file(tensors, file, {"format": "pt"})
    found = open_packed(tmp_path / "out", as_values=True)
    (problem,) = differences(source, found, Reporter(quiet=True))
    assert "model.layers.0.mlp.experts, expert 3, up_proj" in problem


def test_names_that_mlx_lm_reads_are_there(qwen: Path, tmp_path: Path) -> None:
    """transformers 5 saves num_experts and rope_theta under other names, and mlx-lm takes defaults where it can."""
    assert not {"num_experts", "rope_theta"} & config_of(qwen).keys()
    write("mlx", MadeSource(qwen, by_stack, group_size=GROUP), tmp_path / "out", WriteOptions())
    config, before = config_of(tmp_path / "out"), config_of(qwen)
    assert config["rope_theta"] == before["rope_parameters"]["rope_theta"]
    assert config["rope_scaling"] is None
    assert config["num_experts"] == before["num_local_experts"]
    assert {key: config[key] for key in before} == before


@pytest.mark.parametrize(
    ("choose", "more", "message"),
    [
        (lambda layer, expert, projection: 2 if expert == 1 else 4, {}, r"2 bits beside 4 bits of .*; mlx takes one"),
        (lambda layer, expert, projection: 16 if expert == 1 else 4, {}, "full precision beside 4 bits of"),
        (lambda layer, expert, projection: 1, {}, r"1 bits; mlx loads 2, 3, 4, 5, 6, 8, 16; set export\.widen: true"),
        (lambda layer, expert, projection: 4, {"group_size": 16}, "groups of 16; mlx loads groups of 32, 64, 128"),
    ],
)
def test_what_mlx_has_no_place_for_is_refused(
    qwen: Path, tmp_path: Path, choose: Choose, more: dict[str, Any], message: str
) -> None:
    source = MadeSource(qwen, choose, **({"group_size": GROUP} | more))
    with pytest.raises(FormatError, match=message) as caught:
        write("mlx", source, tmp_path / "out", WriteOptions())
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("family", "settings", "message"),
    [
        ("jamba", {}, "model_type jamba was not tried"),  # mlx-lm makes the chosen experts' weights add up to 1
        ("ernie4_5_moe", {}, "model_type ernie4_5_moe was not tried in mlx-lm"),
        ("gpt_oss", {"swiglu_limit": 6.0}, r"swiglu_limit is 6\.0, and mlx-lm"),
        ("dots1", {"layer_types": ["sliding_attention", "full_attention"]}, r"layer_types is \['sliding_attention'"),
        ("qwen3_moe", {"rope_parameters": YARN}, "rope_type is 'yarn', and mlx-lm .* as if it were 'default'"),
        ("olmoe", {"rope_parameters": YARN | {"attention_factor": 1.5}}, r"attention_factor is 1\.5, and mlx-lm"),
        ("qwen2_moe", {"norm_topk_prob": True}, "norm_topk_prob is True, and mlx-lm .* as if it were False"),
        ("mixtral", {"sliding_window": 16}, "sliding_window is 16, and mlx-lm"),
        ("olmoe", {"clip_qkv": 2.0}, r"clip_qkv is 2\.0, and mlx-lm"),
    ],
)
def test_what_mlx_lm_would_compute_otherwise_is_refused(
    family: str, settings: dict[str, Any], message: str, tmp_path: Path
) -> None:
    source = MadeSource(save_model(tmp_path / "model", family, **settings), lambda *_: 4, group_size=GROUP)
    with pytest.raises(FormatError, match=message):
        write("mlx", source, tmp_path / "out", WriteOptions())
    assert not (tmp_path / "out").exists()


def test_a_matrix_that_mlx_lm_divides_is_refused(tmp_path: Path) -> None:
    path = save_model(tmp_path / "model", "deepseek_v3")
    others = {"model.layers.0.self_attn.kv_b_proj": 8}
    with pytest.raises(
        FormatError, match=r"kv_b_proj: mlx-lm divides kv_b_proj and would quantize it again; leave .*kv_b_proj out"
    ):
        write("mlx", MadeSource(path, lambda *_: 4, group_size=GROUP, others=others), tmp_path / "out", WriteOptions())


def test_widened_stacks_hold_the_same_values(qwen: Path, tmp_path: Path) -> None:
    """2 beside 4 bits in 4, and 1 in 2."""
    widths = {0: (1, 1), 1: (2, 4)}
    source = MadeSource(qwen, lambda layer, expert, projection: widths[layer][expert % 2], group_size=GROUP)
    write("mlx", source, tmp_path / "out", WriteOptions(widen=True))
    found = open_other(open_source(str(tmp_path / "out")))
    for layer, bits in zip(found.layers, (2, 4), strict=True):
        for expert in range(layer.num_experts):
            for name, matrix in found.expert(layer, expert)[0].items():
                wanted = source.expert(source.layers[layer.index], expert)[0][name]
                assert isinstance(matrix, PackedWeight)
                assert isinstance(wanted, PackedWeight)
                assert matrix.bits == bits
                torch.testing.assert_close(matrix.dequantize(), wanted.dequantize(), rtol=2**-8, atol=0)


def test_a_checkpoint_of_mlx_lms_own_is_read(qwen: Path, tmp_path: Path) -> None:
    """It names no quant_method, says its grid twice, and has biases that are no zero points."""
    source = MadeSource(qwen, lambda *_: 4, group_size=GROUP)
    write("mlx", source, tmp_path / "out", WriteOptions())
    config = config_of(tmp_path / "out")
    for key in ("quantization", "quantization_config"):
        config[key] = {"group_size": GROUP, "bits": 4}
    (tmp_path / "out" / "config.json").write_text(json.dumps(config))
    file = tmp_path / "out" / "model-experts-001.safetensors"
    tensors = load_file(file)
    name = "model.layers.1.mlp.switch_mlp.down_proj"
    tensors[f"{name}.biases"] *= 1.25
    save_file(tensors, file, {"format": "pt"})
    found = open_packed(tmp_path / "out", as_values=True)
    matrix = found.expert(found.layers[1], 0)[0]["down_proj"]
    assert isinstance(matrix, Tensor)
    wanted = affine(*(tensors[f"{name}.{part}"][0] for part in ("weight", "scales", "biases")), bits=4)
    np.testing.assert_allclose(matrix.numpy(), wanted, rtol=0, atol=1e-6 * np.abs(wanted).max())


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"mode": "mxfp4"}, "mlx with mode 'mxfp4' is not supported"),
        ({"bits": 7}, "inputs of 7 bits are no whole groups|no matrix of 7 bits"),
        ({"group_size": 64}, r"scales is BF16 \[64, 4\], not .* \[64, 2\] as config.json has it"),
    ],
)
def test_what_moeq_does_not_read_is_said(qwen: Path, tmp_path: Path, changed: dict[str, Any], message: str) -> None:
    write("mlx", MadeSource(qwen, lambda *_: 4, group_size=GROUP), tmp_path / "out", WriteOptions())
    config = config_of(tmp_path / "out")
    config["quantization"] = config["quantization_config"] = {"group_size": GROUP, "bits": 4} | changed
    (tmp_path / "out" / "config.json").write_text(json.dumps(config))
    with pytest.raises(ArtifactError, match=message):
        open_other(open_source(str(tmp_path / "out"))).check()


def test_an_expert_beside_its_stack_is_refused(qwen: Path, tmp_path: Path) -> None:
    """As is a stack of no experts; a name that holds the stack's twice is none of an expert's."""
    write("mlx", MadeSource(qwen, lambda *_: 4, group_size=GROUP), tmp_path / "out", WriteOptions())
    file = tmp_path / "out" / "model-experts-000.safetensors"
    kept, name = load_file(file), "model.layers.0.mlp.switch_mlp.up_proj.scales"
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text("utf-8"))
    for added, message in (
        ({"model.layers.0.mlp.experts.1.up_proj.scales": kept[name][1].clone()}, "lies beside"),
        ({name: kept[name][:0]}, "is \\[0, "),
        ({f"x.switch_mlp.{name}": kept[name].clone()}, "no part of the model|weight \\[\\] is no matrix"),
    ):
        save_file(kept | added, file, {"format": "pt"})
        index["weight_map"] |= dict.fromkeys(added, file.name)
        (tmp_path / "out" / "model.safetensors.index.json").write_text(json.dumps(index))
        with pytest.raises(ArtifactError, match=message):
            open_other(open_source(str(tmp_path / "out"))).check()
        index["weight_map"] = {key: one for key, one in index["weight_map"].items() if key in kept or one != file.name}


def test_verifying_says_what_is_missing(qwen: Path, tmp_path: Path) -> None:
    write("mlx", MadeSource(qwen, by_stack, group_size=GROUP), tmp_path / "out", WriteOptions())
    with pytest.raises(NotInstalledError, match="mlx_lm cannot be imported there"):
        verify(tmp_path / "out", Options(), Reporter(quiet=True))


@pytest.mark.parametrize("symmetric", [True, False])
def test_mlx_lm_computes_with_its_values(model: Path, tmp_path: Path, symmetric: bool) -> None:
    """By `moeq verify`, against the values as they are stored; and near those that they were rounded from."""
    python = peers.interpreter("mlx")
    source = MadeSource(model, by_stack, group_size=GROUP, symmetric=symmetric, others=OTHERS)
    write("mlx", source, tmp_path / "out", WriteOptions())
    verdict = verify(tmp_path / "out", Options(python=python), Reporter(quiet=True))
    assert verdict.problems == ()
    assert verdict.logits_error < 1e-4
    save_file({"ids": IDS}, tmp_path / "ids.safetensors")
    (found,) = peers.load("mlx", "mlx", [tmp_path / "out"], tmp_path / "ids.safetensors")
    assert isinstance(found, Tensor), found
    wanted, given = (one.double().log_softmax(-1) for one in (reference_logits(source), found))
    divergence = (wanted.exp() * (wanted - given)).sum(-1)
    assert 0 < float(divergence.median()) < 2e-3, "a token may be routed otherwise"


@pytest.mark.cases(4)
@pytest.mark.parametrize("family", FAMILIES)
def test_mlx_lm_computes_every_family(family: str, tmp_path: Path) -> None:
    """With packed modules beside the experts."""
    python = peers.interpreter("mlx")
    path = save_model(tmp_path / "model", family, **OF_MLX.get(family, {}))
    names = MadeSource(path, lambda *_: 4).model.state_dict()
    others = {name.removesuffix(".weight"): 8 for name in names if name.endswith(BESIDE)}
    others = {name: bits for name, bits in others.items() if not name.endswith(tuple(FAMILIES[family].plain))}
    source = MadeSource(path, by_stack, group_size=GROUP, symmetric=False, others=others)
    write("mlx", source, tmp_path / "out", WriteOptions())
    verdict = verify(tmp_path / "out", Options(python=python), Reporter(quiet=True))
    assert verdict.problems == ()
    assert verdict.logits_error < 1e-4


def test_a_run_leaves_out_what_its_target_has_no_place_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """And says so; without the target it packs that, too."""
    path = save_model(tmp_path / "model", "deepseek_v3")
    settings = (
        "corpus.sequences=4", "corpus.sequence_length=32", "losses.methods=[rtn]", "losses.bits=[4]",
        "losses.group_size=32", "assign.method=optimal", "assign.bits_per_weight=5", "eval.compare=[]",
        "others={attention: 8, method: rtn, symmetric: true}",
    )  # fmt: skip
    for_mlx = ("assign.target=mlx", "export.formats=[mlx]")
    ends = {"": ("profile", "losses"), "mlx": ("profile", "losses", "assign", "quantize", "export")}
    for target, stages in ends.items():
        context = Context(
            recipe=load_recipe(None, (*settings, *(for_mlx if target else ()))),
            model_name=str(path), out=tmp_path / f"out{target}", reporter=Reporter(),
        )  # fmt: skip
        pipeline.run(context, stages)
        said, left = capsys.readouterr().err, [f"model.layers.{layer}.self_attn.kv_b_proj" for layer in range(3)]
        packed = {module.name for module in non_experts.chosen(context)}
        assert ("3 matrices beside the experts stay in full precision: mlx-lm divides kv_b_proj" in said) == bool(
            target
        )
        assert packed.isdisjoint(left) if target else packed > set(left)
    tensors = tensors_of(tmp_path / "outmlx" / "checkpoint-mlx")
    assert all(f"{name}.weight" in tensors and f"{name}.scales" not in tensors for name in left)
    assert all(f"{name.replace('kv_b_proj', 'q_b_proj')}.scales" in tensors for name in left)


def test_a_size_limits_the_checkpoint_for_mlx(qwen: Path, tmp_path: Path) -> None:
    """What MLX stores of a group, two numbers of 16 bits, is what the budget counts."""
    size = bytes_in(qwen) * 53 // 100
    settings = (
        "corpus.sequences=4", "corpus.sequence_length=32", "losses.methods=[rtn]", "losses.bits=[2,3,4,8]",
        "losses.group_size=32", "assign.method=optimal", "assign.granularity=projection", f"assign.size={size}",
        "assign.target=mlx", "export.formats=[mlx]", "eval.compare=[]",
        "others={attention: 8, embeddings: 8, head: 8, method: rtn, symmetric: true}",
    )  # fmt: skip
    context = Context(
        recipe=load_recipe(None, settings), model_name=str(qwen), out=tmp_path, reporter=Reporter(quiet=True)
    )
    pipeline.run(context, ("profile", "losses", "assign", "quantize", "export"))
    taken = bytes_in(tmp_path / "checkpoint-mlx")
    assert 0.96 * size < taken <= size
    found = open_packed(tmp_path / "checkpoint-mlx", as_values=True)
    stored = sum(
        sum(
            found.source.tensors[f"{key.removesuffix('weight')}{part}"].bytes for part in ("weight", "scales", "biases")
        )
        for key in found.source.tensors
        if ".experts." in key and key.endswith(".weight")
    )
    weights = sum(layer.num_experts * layer.weights_per_expert for layer in found.layers)
    summary = read_record(tmp_path / "assign", "assign").summary
    assert summary["bits_per_weight_for"] == {"mlx": pytest.approx(8 * stored / weights)}
