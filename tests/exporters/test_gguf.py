"""GGUF: what is written holds the dequantized values bit for bit (gguf's own reader says so), transformers computes the
dequantized model's logits from it and llama.cpp the same but for its rounding of activations; what no type holds is
refused, and wrong when it is written all the same.

Skipped where gguf, or llama-cpp-python, is not installed. Models are saved in bfloat16, or float32 for llama.cpp, which
rounds activations to the type of the weights.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import peers
import pytest
import torch
from exporters import handmade
from gguf_read import ROUNDED, check_stacks, llama_logits, tensors_of, typical, values
from made_sources import IDS, Choose, MadeSource, reference, reference_logits, save_model
from safetensors.torch import load_file, save_file
from strangers import changed
from torch import Tensor

from moeq.artifacts.assignment import Assignment, ExpertChoice, LayerAssignment
from moeq.bundled import bundled_path
from moeq.conversion import convert
from moeq.errors import ArtifactError, EvaluationError, FormatError, RecipeError
from moeq.exporters import gguf_families, write
from moeq.exporters.foreign import WriteOptions
from moeq.exporters.gguf import FILE
from moeq.exporters.gguf_families import block_of, stack_name
from moeq.exporters.imatrix import matrix_of
from moeq.exporters.readers import open_packed
from moeq.exporters.readers.gguf import Gguf, check_parameters
from moeq.models.disk_names import DiskNames
from moeq.models.non_experts import find_others
from moeq.numerics.ggml_types import HOLDS
from moeq.progress import Reporter
from moeq.recipe import load_recipe
from moeq.registry import EXPORTERS
from moeq.stages.context import Context
from moeq.stages.loading import where_it_loads
from moeq.verification.reference import streamed
from moeq.verification.verify import Options, verify
from moeq.verification.written import check_written
from moeq_kernels.packed import PackedWeight

RIGHT = 0.002
WRONG = 0.1
WIDE = {"hidden_size": 256, "head_dim": 64, "moe_intermediate_size": 512, "intermediate_size": 512}
SETTINGS: dict[str, dict[str, Any]] = {
    "mixtral": {"sliding_window": None},
    "qwen2_moe": {"norm_topk_prob": False, "mlp_only_layers": []},
    "qwen3_moe": {"norm_topk_prob": True},
    "olmoe": {"norm_topk_prob": False, "num_key_value_heads": 4},
    "deepseek_v3": {"n_group": 2, "topk_group": 1},
}
IN_TRANSFORMERS = ("qwen2_moe", "qwen3_moe")


def four(layer: int, expert: int, projection: str) -> int:
    return 4


def by_stack(layer: int, expert: int, projection: str) -> int:
    """Every width that groups of 256 have, one a stack."""
    widths = {"gate_proj": (1, 4), "up_proj": (2, 8), "down_proj": (3, 16)}
    return widths[projection][layer % 2]


def made(folder: Path, family: str, **settings: Any) -> Path:
    folder.parent.mkdir(exist_ok=True)
    return save_model(folder, family, **SETTINGS[family] | settings)


def in_float32(folder: Path) -> Path:
    """The same model with weights of float32."""
    tensors = {key: tensor.float() for key, tensor in load_file(folder / "model.safetensors").items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text("utf-8"))
    (folder / "config.json").write_text(json.dumps(config | {"dtype": "float32"}), "utf-8")
    return folder


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    return {family: made(folder / family, family) for family in SETTINGS}


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made(tmp_path_factory.mktemp("wide") / "model", "qwen3_moe", **WIDE)


def exported(source: MadeSource, out: Path, **options: Any) -> Path:
    peers.module("gguf")
    write("llama.cpp", source, out, WriteOptions(**options))
    return out


@pytest.mark.cases(1)
@pytest.mark.parametrize("family", list(SETTINGS))
def test_gguf_itself_reads_the_dequantized_values(family: str, models: dict[str, Path], tmp_path: Path) -> None:
    choose: Choose = lambda layer, expert, projection: (4, 8, 16)[(layer + len(projection)) % 3]  # noqa: E731
    source = MadeSource(models[family], choose)
    out = exported(source, tmp_path / "out")
    tensors = tensors_of(out)
    check_stacks(source, tensors)
    plain = load_file(models[family] / "model.safetensors")
    for key in source.rest():
        if "kv_b_proj" in key or (family == "mixtral" and ("q_proj" in key or "k_proj" in key)):
            continue  # which are turned; the logits say whether they are right
        (piece,) = gguf_families.pieces(
            source.model.config, gguf_families.FAMILIES[family], key, tuple(plain[key].shape), tied=False
        )
        assert torch.equal(tensors[piece.name].flatten(), plain[key].float().flatten()), key
    assert not list(out.glob("*.header"))


def test_one_width_a_stack_in_groups_of_256(wide: Path, tmp_path: Path) -> None:
    """All types but Q1_0, which gguf 0.19 does not read and moeq's own reader does."""
    source = MadeSource(wide, by_stack, group_size=256)
    out = exported(source, tmp_path / "out")
    found = open_packed(out, as_values=True)
    for layer, mine in zip(source.layers, found.layers, strict=True):
        for expert in range(layer.num_experts):
            wanted, there = source.expert(layer, expert)[0], found.expert(mine, expert)[0]
            assert all(torch.equal(values(there[name]), values(matrix)) for name, matrix in wanted.items())
    gguf = peers.module("gguf")
    kinds = {tensor.name: tensor.tensor_type.name for tensor in gguf.GGUFReader(out / FILE).tensors}
    names = ("ffn_gate_exps", "ffn_up_exps", "ffn_down_exps")
    assert [kinds[f"blk.0.{name}.weight"] for name in names] == ["Q1_0", "Q2_K", "Q3_K"]
    assert [kinds[f"blk.1.{name}.weight"] for name in names] == ["Q4_0", "Q8_0", "BF16"]


@pytest.mark.cases(1)
@pytest.mark.parametrize("bits", [2, 4])
def test_zero_points_in_groups_of_256(bits: int, wide: Path, tmp_path: Path) -> None:
    source = MadeSource(wide, lambda layer, expert, projection: bits, group_size=256, symmetric=False)
    check_stacks(source, tensors_of(exported(source, tmp_path / "out")))


def test_widened_stacks_hold_the_same_values(models: dict[str, Path], tmp_path: Path) -> None:
    """1 to 3 bits with zero points, another width for every expert, in 4 bits; 4 bits with them in 8."""
    for choose in ((lambda layer, expert, projection: 1 + expert % 3), four):
        source = MadeSource(models["mixtral"], choose, symmetric=False)
        check_stacks(source, tensors_of(exported(source, tmp_path / "out", widen=True)))


@pytest.mark.cases(1)
@pytest.mark.parametrize("family", IN_TRANSFORMERS)
@pytest.mark.parametrize("mix", [four, by_stack])
def test_transformers_computes_the_dequantized_logits(family: str, mix: Choose, tmp_path: Path) -> None:
    peers.module("gguf")
    from transformers import AutoConfig, AutoModelForCausalLM

    choose: Choose = mix
    if mix is by_stack:  # transformers reads through gguf, which does not read Q1_0
        choose = lambda layer, expert, projection: max(2, by_stack(layer, expert, projection))  # noqa: E731
    model = made(tmp_path / "model", family, **WIDE)
    source = MadeSource(model, choose, group_size=256, others={"model.layers.0.self_attn.o_proj": 4})
    out = exported(source, tmp_path / "out")
    config = AutoConfig.from_pretrained(out)
    loaded = AutoModelForCausalLM.from_pretrained(out, gguf_file=FILE, config=config, dtype=torch.float32)
    with torch.no_grad():
        logits = loaded.eval()(input_ids=IDS).logits
    wanted = reference_logits(source)
    assert float((logits - wanted).norm() / wanted.norm()) < RIGHT


@pytest.mark.parametrize("family", list(SETTINGS))
def test_llama_cpp_computes_the_families(family: str, tmp_path: Path) -> None:
    """In float32 all logits agree: names, hyperparameters, turned rows, rotary embeddings and routing are right."""
    peers.interpreter("llama-cpp-python")
    source = MadeSource(in_float32(made(tmp_path / "model", family)), lambda layer, expert, projection: 16)
    logits = llama_logits(exported(source, tmp_path / "out"), tmp_path)
    wanted = reference_logits(source)
    assert not isinstance(logits, str), logits
    assert float((logits - wanted).norm() / wanted.norm()) < RIGHT
    assert torch.equal(logits.argmax(-1), wanted.argmax(-1))


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "rope_theta": 10000.0}
LINEAR = {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}


@pytest.mark.parametrize(
    ("family", "rope"),
    [
        ("qwen3_moe", YARN),
        ("deepseek_v3", YARN | {"mscale": 1.0, "mscale_all_dim": 1.0, "beta_fast": 32, "beta_slow": 1}),
        ("mixtral", LINEAR),
    ],
)
def test_llama_cpp_scales_rotary_embeddings_alike(family: str, rope: dict[str, Any], tmp_path: Path) -> None:
    peers.interpreter("llama-cpp-python")
    model = in_float32(made(tmp_path / "model", family, rope_parameters=rope))
    source = MadeSource(model, lambda layer, expert, projection: 16)
    logits = llama_logits(exported(source, tmp_path / "out"), tmp_path)
    wanted = reference_logits(source)
    assert float((logits - wanted).norm() / wanted.norm()) < RIGHT


@pytest.mark.parametrize(("bits", "symmetric"), list(HOLDS))
def test_llama_cpp_computes_every_type(bits: int, symmetric: bool, wide: Path, tmp_path: Path) -> None:
    """But for the rounding of activations, which now and then sends a token to another expert."""
    peers.interpreter("llama-cpp-python")
    source = MadeSource(wide, lambda layer, expert, projection: bits, group_size=256, symmetric=symmetric)
    logits = llama_logits(exported(source, tmp_path / "out"), tmp_path)
    assert not isinstance(logits, str), logits
    assert typical(logits, reference_logits(source)) < ROUNDED


def test_llama_cpp_generates_as_transformers_does(tmp_path: Path) -> None:
    """The bundled model, which was trained: the same words, and tokens of a text."""
    peers.interpreter("llama-cpp-python")
    source = MadeSource(bundled_path("tiny-mixtral"), lambda layer, expert, projection: 8)
    out = exported(source, tmp_path / "out")
    from transformers import AutoTokenizer

    text = "The fox said: don't jump 3 times, naïve café!\n\n  Then"
    ids = AutoTokenizer.from_pretrained(out)(text)["input_ids"]
    model = reference(source)
    wanted = model.generate(torch.tensor([ids]), max_new_tokens=12, do_sample=False)[0, len(ids) :].tolist()
    job = {"model": str(out / FILE), "text": text, "tokens": 12}
    (tmp_path / "job.json").write_text(json.dumps(job))
    found = json.loads(peers.run("llama-cpp-python", Path(__file__).parent / "peer_llama.py", tmp_path / "job.json"))
    assert found["ids"] == ids
    assert found["text"] == text
    assert found["generated"] == wanted


def test_names_and_keys_are_ggufs_own(models: dict[str, Path]) -> None:
    gguf = peers.module("gguf")
    known = {
        value.replace("{arch}", "A")
        for group in vars(gguf.Keys).values()
        if isinstance(group, type)
        for value in vars(group).values()
        if isinstance(value, str) and value.startswith("{arch}")
    }
    for model in models.values():
        source = MadeSource(model, four)
        kind = gguf_families.family_of(source.model.config)
        arch = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == kind.arch)
        theirs = gguf.get_tensor_name_map(arch, source.model.config.num_hidden_layers)
        assert {f"A.{key}" for key in gguf_families.parameters(source.model.config, kind)} <= known
        for key in source.rest():
            own = gguf_families.pieces(source.model.config, kind, key, source.source.tensors[key].shape, tied=False)
            if "kv_b_proj" in key or "e_score_correction_bias" in key:
                assert all(piece.name.split(".")[2] in ("attn_k_b", "attn_v_b", "exp_probs_b") for piece in own)
                continue
            assert [piece.name for piece in own] == [theirs.get_name(key, try_suffixes=(".weight", ".bias"))]
        for layer in source.layers:
            for projection in layer.projections:
                name = f"model.layers.{block_of(layer)}.mlp.experts.{projection}.weight"
                assert theirs.get_name(name, try_suffixes=(".weight",)) == stack_name(layer, projection)


def mixed(layer: int, expert: int, projection: str) -> int:
    return 8 if expert == 3 else 4


REFUSED: dict[str, tuple[Choose, dict[str, Any], str, str]] = {
    "a mix of experts": (mixed, {}, "4, 8 bits among its experts", "--widen"),
    "full precision beside": (
        lambda layer, expert, projection: 16 if expert == 3 else 4, {}, "full precision beside 4 bits",
        "assign.granularity: layer",
    ),
    "two bits": (lambda layer, expert, projection: 2, {}, "2 bits of 128 inputs in groups of 32", "--widen"),
    "one bit": (lambda layer, expert, projection: 1, {}, "blocks of 128", "losses.group_size: 128"),
    "zero points": (four, {"symmetric": False}, "4 bits with zero points of 128 inputs in groups of 32", "--widen"),
    "short groups": (four, {"group_size": 48}, "in groups of 48; llama.cpp has blocks of 32", "losses.group_size: 32"),
}  # fmt: skip


@pytest.mark.parametrize("case", list(REFUSED))
def test_refusals_name_the_place_and_what_works(case: str, models: dict[str, Path], tmp_path: Path) -> None:
    choose, settings, why, remedy = REFUSED[case]
    with pytest.raises(FormatError) as error:
        exported(MadeSource(models["mixtral"], choose, **settings), tmp_path / "out")
    assert why in str(error.value)
    assert remedy in str(error.value)
    assert "model.layers.0.mlp.experts, gate_proj" in str(error.value.where)
    assert not list(tmp_path.iterdir()), "nothing is left behind"


def test_full_precision_cannot_be_widened_into(models: dict[str, Path], tmp_path: Path) -> None:
    source = MadeSource(models["mixtral"], lambda layer, expert, projection: 16 if expert == 3 else 2)
    with pytest.raises(FormatError, match="full precision beside 2 bits"):
        exported(source, tmp_path / "out", widen=True)


FAMILIES_REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "window": ("mixtral", {"sliding_window": 8}, "attention within a window of 8"),
    "norm": ("qwen3_moe", {"norm_topk_prob": False}, "norm_topk_prob: false"),
    "norm of olmoe": ("olmoe", {"norm_topk_prob": True}, "norm_topk_prob: true"),
    "dense layers": ("qwen3_moe", {"mlp_only_layers": [0]}, "dense layers among"),
    "shared heads": ("olmoe", {"num_key_value_heads": 2}, "share keys and values"),
    "clipped": ("olmoe", {"clip_qkv": 4.0}, "clip_qkv"),
    "halves": ("deepseek_v3", {"rope_interleave": False}, "rope_interleave: false"),
    "activation": ("mixtral", {"hidden_act": "gelu"}, "activation gelu"),
    "rope": (
        "qwen3_moe", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}, "of type dynamic",
    ),
    "biases of attention": ("qwen3_moe", {"attention_bias": True}, "attention_bias"),
    "yarn without mscale": ("deepseek_v3", {"rope_parameters": YARN}, "mscale None and mscale_all_dim None"),
    "yarn with half of it": (
        "deepseek_v3", {"rope_parameters": YARN | {"mscale_all_dim": 1.0}}, "mscale None and mscale_all_dim 1.0",
    ),
    "linear": ("deepseek_v3", {"rope_parameters": LINEAR}, "of type linear in latent attention"),
    "mscale": ("qwen3_moe", {"rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}}, "yarn with mscale"),
    "betas": ("qwen3_moe", {"rope_parameters": YARN | {"beta_fast": 20, "beta_slow": 2}}, "another beta_fast"),
}  # fmt: skip


@pytest.mark.cases(5)
@pytest.mark.parametrize("case", list(FAMILIES_REFUSED))
def test_what_llama_cpp_computes_otherwise_is_refused(case: str, tmp_path: Path) -> None:
    family, settings, why = FAMILIES_REFUSED[case]
    source = MadeSource(made(tmp_path / "model", family, **settings), four)
    with pytest.raises(FormatError, match=why) as error:
        exported(source, tmp_path / "out")
    assert "native or dequantized" in str(error.value)


def test_other_families_are_refused(tmp_path: Path) -> None:
    from family_models import build

    build("phimoe").save_pretrained(tmp_path / "model")
    with pytest.raises(FormatError, match=r"model_type phimoe.*mixtral, qwen2_moe, qwen3_moe, olmoe, deepseek_v3"):
        exported(MadeSource(tmp_path / "model", four, group_size=8), tmp_path / "out")


def test_packed_modules_that_gguf_keeps_otherwise_are_refused(models: dict[str, Path], tmp_path: Path) -> None:
    others = {"model.layers.1.self_attn.kv_b_proj": 4}
    with pytest.raises(FormatError, match=r"kv_b_proj: GGUF keeps it transposed.*leave"):
        exported(MadeSource(models["deepseek_v3"], four, others=others), tmp_path / "out")
    overrides = ["losses.symmetric=true", "losses.group_size=32", "others={attention: 4, symmetric: true}"]
    context = Context(
        recipe=load_recipe(None, overrides), model_name=str(models["deepseek_v3"]), out=tmp_path, reporter=Reporter()
    )
    choice = ExpertChoice(tier="ndp", bits=4, importance=0)
    layers = tuple(LayerAssignment(name=one.name, experts=(choice,) * one.num_experts) for one in context.model.layers)
    grids = {"group_size": 32, "symmetric": True}
    refused = where_it_loads(context, Assignment(name="a", method="uniform", layers=layers, **grids))["llama.cpp"]
    assert refused is not None
    assert refused["reason"] == "attention: GGUF keeps it transposed, and not packed"


def test_packed_modules_that_are_turned(tmp_path: Path) -> None:
    """mixtral's q_proj at 4 bits, rows in llama.cpp's order, and packed embeddings."""
    peers.interpreter("llama-cpp-python")
    others = {"model.layers.0.self_attn.q_proj": 8, "model.embed_tokens": 8}
    source = MadeSource(in_float32(made(tmp_path / "model", "mixtral")), lambda *_: 16, others=others)
    logits = llama_logits(exported(source, tmp_path / "out"), tmp_path)
    assert typical(logits, reference_logits(source)) < ROUNDED


def half_zero_points(weight: PackedWeight) -> Tensor:
    """Q4_1: the zero point times the scale in float16, which has too few digits for it."""
    from moeq_kernels.packing import unpack
    from moeq_kernels.widths import resolved_group_size

    zeros = unpack(weight.zeros, 4, weight.scales.shape[-1])
    least = -(zeros.half() * weight.scales)
    codes = unpack(weight.codes, 4, weight.inputs).unflatten(-1, (-1, 2, 16))
    packed = (codes[..., 0, :] | codes[..., 1, :] << 4).view(len(codes), -1, 16)
    assert resolved_group_size(weight.inputs, weight.group_size) == 32
    heads = [part.unsqueeze(-1).contiguous().view(torch.uint8) for part in (weight.scales, least)]
    return torch.cat([*heads, packed], -1).flatten(-2)


def test_q4_1_does_not_hold_zero_points(models: dict[str, Path]) -> None:
    gguf = peers.module("gguf")
    source = MadeSource(models["mixtral"], four, symmetric=False)
    weight = source.expert(source.layers[0], 0)[0]["up_proj"]
    assert isinstance(weight, PackedWeight)
    blocks = half_zero_points(weight)
    found = torch.from_numpy(gguf.dequantize(blocks.numpy(), gguf.GGMLQuantizationType.Q4_1))
    exact = (found == weight.dequantize()).view(len(found), -1, 32).all(-1)
    assert torch.allclose(found, weight.dequantize(), rtol=0, atol=float(found.abs().max()) * 2**-9)
    assert 0 < float(exact.float().mean()) < 0.8


def forced(source: MadeSource, out: Path, monkeypatch: pytest.MonkeyPatch, family: Any = None) -> Path:
    """Write what would be refused."""
    with monkeypatch.context() as patch:
        patch.setattr(gguf_families, "_reasons", lambda *arguments: iter(()))
        if family is not None:
            patch.setitem(gguf_families.FAMILIES, source.config["model_type"], family)
        return exported(source, out)


LIES: dict[str, tuple[str, dict[str, Any]]] = {
    "window": ("mixtral", {"sliding_window": 8}),
    "norm": ("qwen3_moe", {"norm_topk_prob": False}),
    "norm of olmoe": ("olmoe", {"norm_topk_prob": True}),
    "shared heads": ("olmoe", {"num_key_value_heads": 2}),
    "activation": ("mixtral", {"hidden_act": "gelu"}),
    "halves": ("deepseek_v3", {"rope_interleave": False}),
    "clipped": ("olmoe", {"clip_qkv": 0.2}),
    "dense layers": ("qwen3_moe", {"mlp_only_layers": [0]}),
    **{
        case: FAMILIES_REFUSED[case][:2]
        for case in ("biases of attention", "yarn without mscale", "yarn with half of it", "linear", "mscale", "betas")
    },
}


@pytest.mark.parametrize("case", list(LIES))
def test_what_is_refused_of_a_family_fails_or_lies(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In float32, where what is right is right to the third digit."""
    peers.interpreter("llama-cpp-python")
    family, settings = LIES[case]
    model = in_float32(made(tmp_path / "model", family, **settings))
    source = MadeSource(model, lambda layer, expert, projection: 16)
    logits = llama_logits(forced(source, tmp_path / "out", monkeypatch), tmp_path)
    if not isinstance(logits, str):
        wanted = reference_logits(source)
        assert float((logits - wanted).norm() / wanted.norm()) > 10 * RIGHT


def test_rows_that_are_not_turned_are_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    peers.interpreter("llama-cpp-python")
    source = MadeSource(in_float32(made(tmp_path / "model", "mixtral")), lambda layer, expert, projection: 16)
    flat = replace(gguf_families.FAMILIES["mixtral"], orders=gguf_families.FAMILIES["olmoe"].orders)
    logits = llama_logits(forced(source, tmp_path / "out", monkeypatch, flat), tmp_path)
    assert typical(logits, reference_logits(source)) > WRONG


def test_transformers_does_not_load_other_families(models: dict[str, Path], tmp_path: Path) -> None:
    """Which is why `moeq verify` takes llama.cpp for them."""
    peers.module("gguf")
    from transformers import AutoConfig, AutoModelForCausalLM

    for family in sorted(set(SETTINGS) - set(IN_TRANSFORMERS)):
        out = exported(MadeSource(models[family], four), tmp_path / family)
        config = AutoConfig.from_pretrained(out)
        with pytest.raises((ValueError, NotImplementedError)):
            AutoModelForCausalLM.from_pretrained(out, gguf_file=FILE, config=config)


def test_layers_that_predict_further_tokens_are_left_out(tmp_path: Path) -> None:
    model = made(tmp_path / "model", "deepseek_v3")
    tensors = load_file(model / "model.safetensors")
    further = {f"model.layers.3.{name}": torch.ones(4, 8) for name in ("eh_proj.weight", "mlp.gate.weight")}
    further |= {"model.layers.3.mlp.gate.e_score_correction_bias": torch.ones(8)}
    save_file(tensors | further, model / "model.safetensors", {"format": "pt"})
    found = tensors_of(exported(MadeSource(model, four), tmp_path / "out"))
    assert found
    assert not [name for name in found if name.startswith("blk.3.")]
    save_file(tensors | {"model.layers.1.unknown.weight": torch.ones(8)}, model / "model.safetensors", {"format": "pt"})
    with pytest.raises(FormatError, match=r"model\.layers\.1\.unknown\.weight: moeq knows no name for it in GGUF"):
        exported(MadeSource(model, four), tmp_path / "other")


def test_frequencies_of_rotary_embeddings_are_left_out(tmp_path: Path) -> None:
    """Which older checkpoints hold, transformers passes over, and llama.cpp's converter leaves out, too."""
    model = made(tmp_path / "model", "mixtral")
    wanted = tensors_of(exported(MadeSource(model, four), tmp_path / "without"))
    tensors = load_file(model / "model.safetensors") | {"model.layers.1.self_attn.rotary_emb.inv_freq": torch.ones(16)}
    save_file(tensors, model / "model.safetensors", {"format": "pt"})
    assert list(tensors_of(exported(MadeSource(model, four), tmp_path / "out"))) == list(wanted)


def test_tied_embeddings(tmp_path: Path) -> None:
    """llama.cpp takes them for the head, but for families whose code wants a head of its own."""
    for family, has_head in (("mixtral", False), ("olmoe", True)):
        model = made(tmp_path / family, family, tie_word_embeddings=True)
        source = MadeSource(model, four)
        tensors = tensors_of(exported(source, tmp_path / f"out-{family}"))
        assert ("output.weight" in tensors) == has_head
        if has_head:
            assert torch.equal(tensors["output.weight"], tensors["token_embd.weight"])
        check = open_packed(tmp_path / f"out-{family}", as_values=True)
        assert "lm_head.weight" not in check.rest()


@pytest.mark.cases(1)
@pytest.mark.parametrize("family", ["mixtral", "olmoe"])
def test_a_head_of_its_own_is_written_whatever_config_json_says_of_ties(family: str, tmp_path: Path) -> None:
    """As transformers does not tie what a checkpoint has twice with other values; with the same, it is tied."""
    model = made(tmp_path / family, family, tie_word_embeddings=True)
    tensors = load_file(model / "model.safetensors")
    table = tensors["model.embed_tokens.weight"]
    for head in (table.flip(0), table.clone()):
        save_file(tensors | {"lm_head.weight": head.contiguous()}, model / "model.safetensors", {"format": "pt"})
        out = exported(source := MadeSource(model, four), tmp_path / f"out-{torch.equal(head, table)}")
        found = tensors_of(out)
        assert torch.equal(found.get("output.weight", found["token_embd.weight"]), head.float())
        assert torch.equal(found["token_embd.weight"], table.float())
        opened = open_packed(out, as_values=True)
        assert ("lm_head.weight" in opened.rest()) != torch.equal(head, table)
        logits = streamed(opened, torch.float32).model(input_ids=IDS, use_cache=False).logits
        assert torch.allclose(logits, reference_logits(source), atol=1e-4)
        others = find_others(source.model, source.layers, source.source).modules
        matrices = {matrix_of(source.model.config, module) for module in others}
        assert ("output.weight" in matrices) == ("output.weight" in found), "the importance matrix has it alike"


def test_verify_with_transformers(models: dict[str, Path], tmp_path: Path) -> None:
    out = exported(MadeSource(models["qwen3_moe"], four), tmp_path / "out")
    verdict = verify(out, Options(against=str(models["qwen3_moe"])), Reporter(quiet=True))
    assert (verdict.format, verdict.target) == ("gguf", "transformers")
    assert not verdict.problems
    assert all(layer.error is not None and layer.worst < RIGHT for layer in verdict.layers)
    assert verdict.logits_error < RIGHT
    assert verdict.distance is not None
    assert verdict.distance.equal > 0
    assert 0.01 < verdict.distance.weights_error < 0.2


def test_verify_with_llama_cpp(models: dict[str, Path], tmp_path: Path) -> None:
    out = exported(MadeSource(models["mixtral"], four), tmp_path / "out")
    options = Options(python=peers.interpreter("llama-cpp-python"), against=str(models["mixtral"]))
    verdict = verify(out, options, Reporter(quiet=True))
    assert verdict.target == "llama.cpp"
    assert not verdict.problems
    assert verdict.logits_error < verdict.tolerance == ROUNDED
    assert verdict.distance is not None
    assert verdict.distance.equal > 0


ROPE = {"rope_theta": 10000.0, "rope_type": "default"}
OTHERWISE: dict[str, tuple[dict[str, Any], str]] = {  # what config.json says instead, and what is said of it
    "base": ({"rope_parameters": ROPE | {"rope_theta": 1e6}}, r"rope\.freq_base is 10000\.0, config\.json says 1"),
    "scaled": (
        {"rope_parameters": ROPE | {"rope_type": "linear", "factor": 2.0}},
        r"rope\.scaling\.type is None, config\.json says 'linear'",
    ),
    "norms": ({"rms_norm_eps": 1e-6}, r"attention\.layer_norm_rms_epsilon is 9\.99\S+, config\.json says 1e-06"),
    "experts": ({"num_experts_per_tok": 3}, r"expert_used_count is 2, config\.json says 3"),
    "heads": ({"num_attention_heads": 2, "head_dim": 64, "num_key_value_heads": 1}, r"attention\.head_count is 4, "),
}


@pytest.mark.parametrize("case", list(OTHERWISE))
def test_a_header_that_says_otherwise_than_config_json_is_refused(case: str, tmp_path: Path) -> None:
    """llama.cpp goes by the one, moeq by the other: no tensor tells."""
    settings, said = OTHERWISE[case]
    model = made(tmp_path / "model", "mixtral", rope_parameters=ROPE, rms_norm_eps=1e-5)
    out = exported(MadeSource(model, four), tmp_path / "out")
    assert open_packed(out).config["num_experts_per_tok"] == 2
    config = json.loads((out / "config.json").read_text("utf-8"))
    (out / "SHA256SUMS").unlink()
    (out / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 64} | settings), "utf-8")
    for opened in (open_packed, lambda path: convert(path, "native", tmp_path / "other")):
        with pytest.raises(ArtifactError, match=rf"model\.gguf: llama\.{said}"):
            opened(out)


def test_a_header_with_a_word_for_a_number_is_refused(models: dict[str, Path], tmp_path: Path) -> None:
    opened = open_packed(exported(MadeSource(models["mixtral"], four), tmp_path / "out"))
    assert isinstance(opened, Gguf)
    file = replace(opened.file, fields=opened.file.fields | {"llama.rope.freq_base": "high"})
    with pytest.raises(ArtifactError, match=r"model\.gguf: llama\.rope\.freq_base is 'high', config\.json says 1"):
        check_parameters(file, opened.model.config, opened.family)


def test_a_file_of_another_model_is_refused(models: dict[str, Path], tmp_path: Path) -> None:
    out = exported(MadeSource(models["mixtral"], four), tmp_path / "out")
    config = json.loads((out / "config.json").read_text("utf-8"))
    (out / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 1}), "utf-8")
    with pytest.raises(ArtifactError, match=r"tensor blk\.1\..* is no part of the model"):
        open_packed(out, as_values=True)
    (out / "config.json").write_text(json.dumps(config | {"intermediate_size": 128}), "utf-8")
    with pytest.raises(ArtifactError, match=r"tensor blk\.0\.ffn_gate_exps\.weight is \[6, 96, 128\], not"):
        open_packed(out, as_values=True)
    data = (out / FILE).read_bytes()
    (out / FILE).write_bytes(data[:-100])
    with pytest.raises(ArtifactError, match=r"cannot be read as GGUF \(truncated"):
        open_packed(out, as_values=True)


def test_gguf_is_converted_from(models: dict[str, Path], tmp_path: Path) -> None:
    source = MadeSource(models["mixtral"], four)
    out = exported(source, tmp_path / "out")
    convert(out, "auto-round", tmp_path / "other")
    found = open_packed(tmp_path / "other")
    mine, theirs = source.expert(source.layers[1], 2)[0], found.expert(found.layers[1], 2)[0]
    for name, weight in mine.items():
        packed = theirs[name]
        assert isinstance(weight, PackedWeight)
        assert isinstance(packed, PackedWeight)
        assert all(torch.equal(part, packed.parts()[key]) for key, part in weight.parts().items())


def test_converted_from_another_tool(tmp_path: Path) -> None:
    peers.module("gguf")
    model = without_tokenizer(tmp_path / "model", "mixtral", sliding_window=None)
    wanted = handmade.write(model, tmp_path / "packed", handmade.gptq_config(), handmade.gptq_parts)
    convert(tmp_path / "packed", "llama.cpp", tmp_path / "out")
    found = open_packed(tmp_path / "out", as_values=True)
    names = DiskNames(found.model).experts(found.layers[1])  # type: ignore[attr-defined]
    assert names is not None
    for (expert, projection), key in names.items():
        assert torch.equal(values(found.expert(found.layers[1], expert)[0][projection]), wanted[key])


def without_tokenizer(folder: Path, family: str, **changed: Any) -> Path:
    """A handmade model whose tokenizer, of more tokens than it has embeddings, is gone."""
    model = handmade.model(folder, family)
    config = json.loads((model / "config.json").read_text("utf-8")) | changed
    (model / "config.json").write_text(json.dumps(config), "utf-8")
    (model / "tokenizer.json").unlink()
    return model


def test_values_are_compared_where_no_loader_is_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    peers.module("gguf")
    model = without_tokenizer(tmp_path / "model", "qwen3_moe", norm_topk_prob=True)
    handmade.write(model, tmp_path / "packed", handmade.gptq_config(), handmade.gptq_parts)
    wider = handmade.gptq_config(bits=8)
    handmade.write(model, tmp_path / "other", wider, handmade.gptq_parts, lambda *_: 8)
    changed(monkeypatch, EXPORTERS, "gguf", needs={"no_such_package": "pip install it"})
    convert(tmp_path / "packed", "llama.cpp", tmp_path / "out", verify=True, reporter=Reporter())
    said = " ".join(capsys.readouterr().err.split())
    assert "not verified: target transformers" in said
    assert "its values are those of packed" in said
    (tmp_path / "packed").rename(tmp_path / "packed.partial")
    check_written(tmp_path / "out", Reporter(), against=tmp_path / "packed.partial")
    assert capsys.readouterr().err.split()[-1] == "packed"
    with pytest.raises(EvaluationError, match=r"expert 0, gate_proj: its values differ by .* \(and 17 more\)"):
        check_written(tmp_path / "out", Reporter(quiet=True), against=tmp_path / "other")


def test_the_package_is_asked_for(models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = MadeSource(models["mixtral"], four)
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(RecipeError, match=r"gguf is not installed; pip install 'moeq\[gguf\]'"):
        write("llama.cpp", source, tmp_path / "out", WriteOptions())
    assert not list(tmp_path.iterdir())


def test_files_beside_it(models: dict[str, Path], tmp_path: Path) -> None:
    out = exported(MadeSource(models["mixtral"], four), tmp_path / "out", model_name="org/name")
    names = {path.name for path in out.iterdir()}
    beside = {"generation_config.json", "tokenizer.json", "tokenizer_config.json", "SHA256SUMS"}
    assert names == {FILE, "README.md", "config.json"} | beside
    card = (out / "README.md").read_text("utf-8")
    assert "at 4 code bits" in card
    assert "llama_cpp" in card
    gguf = peers.module("gguf")
    fields = gguf.GGUFReader(out / FILE).fields
    assert fields["general.name"].contents() == "org/name"
    assert fields["general.file_type"].contents() == int(gguf.LlamaFileType.MOSTLY_Q4_0)
