"""reparam.w8a8: the checkpoint in int8 gives codes and scales back, and computes what the simulation does."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import peers
import pytest
import torch
from family_models import save
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from moeq import pipeline
from moeq.artifacts.sums import check_sums
from moeq.bundled import bundled_path
from moeq.errors import FormatError, QuantizationError, RecipeError
from moeq.exporters.readers.w8a8 import Int8Checkpoint
from moeq.inspection import inspect
from moeq.integers.artifacts.reparam import ReparamReport, read_reparam
from moeq.integers.static_int8 import StaticInputs, round_rows
from moeq.models.loading import load_tokenizer
from moeq.models.source import open_source
from moeq.recipe import ReparamSection, W8A8Section
from moeq.runtimes import W8A8
from moeq.stages import reparam as reparam_stage
from moeq.stages import w8a8 as stage
from stages.test_reparam import QUICK, context_of, reparam, tensors

PROBE = Path(__file__).parents[1] / "exporters" / "peer_w8a8.py"
PLAIN, INT8 = "reparam.w8a8.experts=plain", "reparam.w8a8={}"


def written(model: Path | str, out: Path, *overrides: str) -> tuple[Path, ReparamReport]:
    reparam(model, out, *overrides)
    return out / "reparam" / "w8a8", read_reparam(out / "reparam")


def declared(checkpoint: Path) -> dict[str, Any]:
    return json.loads((checkpoint / "config.json").read_text("utf-8"))["quantization_config"]  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "llama"
    torch.manual_seed(3)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=2048, num_key_value_heads=2, **sizes)).to(torch.bfloat16)
    for name, weight in model.named_parameters():
        if "norm" in name:  # channels of a norm that differ, as real models' do
            weight.data = torch.rand_like(weight) * 4 + 0.2
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((bundled_path("tiny-mixtral") / name).read_bytes())
    return folder


def twin_of(checkpoint: Path, out: Path) -> Path:
    """The same checkpoint with values in place of codes, and nothing said of any quantization."""
    out.mkdir()
    found = tensors(checkpoint)
    values = {
        key: one.float() * found[f"{key}_scale"] if one.dtype == torch.int8 else one.float()
        for key, one in found.items()
        if not key.endswith("_scale")
    }
    save_file(values, out / "model.safetensors", {"format": "pt"})
    config = json.loads((checkpoint / "config.json").read_text("utf-8"))
    del config["quantization_config"]
    (out / "config.json").write_text(json.dumps(config))
    return out


def test_codes_and_scales_are_those_of_the_folded_weights(tiny_mixtral: Path, tmp_path: Path) -> None:
    checkpoint, report = written(tiny_mixtral, tmp_path, INT8, QUICK, "reparam.dtype=float32")
    found, folded = tensors(checkpoint), tensors(tmp_path / "reparam" / "checkpoint")
    codes = {key: one for key, one in found.items() if one.dtype == torch.int8}
    assert {key.rpartition("layers.")[2][2:] for key in codes if ".0." in key} == {
        *(f"self_attn.{name}_proj.weight" for name in "qkvo"),
        *(f"block_sparse_moe.experts.{expert}.{name}.weight" for expert in range(5) for name in ("w1", "w2", "w3")),
    }
    for key, code in codes.items():
        weight, scale = folded[key], found[f"{key}_scale"]
        assert (scale.dtype, scale.shape) == (torch.float32, (len(weight), 1))
        assert torch.equal(scale, weight.abs().amax(1, keepdim=True) / 127)
        assert torch.equal(code.double(), (weight.double() / scale).round())
        assert code.abs().amax() == 127
    stored = Int8Checkpoint(open_source(str(checkpoint)))
    assert {f"{module}.weight" for module in stored.modules} == set(codes)
    for module in stored.modules:
        matrix = stored.read(module)
        assert torch.equal(matrix.codes, codes[f"{module}.weight"])
        assert torch.equal(matrix.codes * matrix.scale, round_rows(folded[f"{module}.weight"]))
        assert (matrix.input_scale is None) == (".experts." in module)
    described = inspect(checkpoint)
    assert (described["linears_with_static_inputs"], described["matrices_with_inputs_by_token"]) == (8, 30)
    assert described["loaded_by"] == "vLLM, int8 experts on a GPU"
    for key in set(folded) - set(codes):
        assert torch.equal(found[key], folded[key])
    norms = {norm.path: torch.tensor([norm.scale], dtype=torch.float32) for norm in report.norms}
    for layer in (0, 1):
        for name in "qkv":
            at = f"model.layers.{layer}.self_attn.{name}_proj.input_scale"
            assert torch.equal(found[at], norms[f"model.layers.{layer}.input_layernorm"])
        assert found[f"model.layers.{layer}.self_attn.o_proj.input_scale"].shape == (1,)
    assert not any(".experts." in key for key in found if key.endswith("input_scale"))
    assert set(check_sums(checkpoint).files) >= {"config.json", "model.safetensors.index.json"}


@pytest.mark.full
def test_config_says_how_every_linear_computes(tmp_path: Path) -> None:
    """Routers and their like are named, as vLLM has them as linears; those of experts have a group of their own."""
    model = save("qwen2_moe", tmp_path / "model")
    config = declared(written(model, tmp_path / "a", INT8, QUICK)[0])
    assert config["format"] == "int-quantized"
    assert config["ignore"] == ["lm_head", *(
        f"model.layers.{layer}.mlp.{name}" for layer in (1, 2) for name in ("gate", "shared_expert_gate")
    )]  # fmt: skip
    static, token = config["config_groups"].values()
    assert static["targets"] == ["Linear"]
    assert (static["input_activations"]["strategy"], static["input_activations"]["dynamic"]) == ("tensor", False)
    assert (token["input_activations"]["strategy"], token["input_activations"]["dynamic"]) == ("token", True)
    assert {(one["weights"]["num_bits"], one["weights"]["strategy"]) for one in (static, token)} == {(8, "channel")}
    plain = declared(written(model, tmp_path / "b", PLAIN, QUICK)[0])
    assert list(plain["config_groups"]) == ["group_0"]
    assert plain["ignore"] == [*config["ignore"], r"re:.*\.experts($|\..*)"]


def test_latent_attentions_absorbed_matrix_stays(tmp_path: Path) -> None:
    checkpoint, _ = written(save("deepseek_v3", tmp_path / "model"), tmp_path / "run", INT8, QUICK)
    codes = {key.partition("self_attn.")[2] for key, one in tensors(checkpoint).items() if one.dtype == torch.int8}
    assert codes - {""} == {f"{name}.weight" for name in ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "o_proj")}
    assert "model.layers.0.self_attn.kv_b_proj" in declared(checkpoint)["ignore"]


def test_experts_that_share_tensors_stay_plain(tmp_path: Path) -> None:
    model = save("gpt_oss", tmp_path / "model")
    with pytest.raises(
        FormatError, match=r"model_type gpt_oss: it has biases; write them .* reparam.w8a8.experts: plain"
    ):
        reparam(model, tmp_path / "run", INT8, QUICK)
    assert not (tmp_path / "run").exists()
    checkpoint, _ = written(model, tmp_path / "plain", PLAIN, QUICK)
    assert any(one.dtype == torch.int8 for one in tensors(checkpoint).values())


def test_what_cannot_be_is_refused(tiny_mixtral: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        RecipeError, match=r"w8a8 has inputs of 8 bits, the norms are folded for 4; set reparam\.bits to 8$"
    ):
        context_of(tiny_mixtral, tmp_path / "run", INT8, "reparam.bits=4")
    with pytest.raises(RecipeError, match=r"it is of language models; of vision transformers: reparam\.integer"):
        pipeline.run_alone(
            context_of("bundled:tiny-moe-vit", tmp_path / "run", INT8, "eval.perplexity=null"), "reparam"
        )
    monkeypatch.setattr(StaticInputs, "_input", lambda self, name, given: given)
    with pytest.raises(QuantizationError, match=r"self_attn\..*: calibration saw no input of this linear but zeros"):
        reparam(tiny_mixtral, tmp_path / "run", INT8, QUICK, "reparam.norms=[model.layers.*.post_attention_layernorm]")
    assert not (tmp_path / "run" / "reparam").exists()


def test_scales_do_not_hang_on_pads(tiny_mixtral: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In batches of any size the largest inputs are those that texts have alone; experts' included."""
    model, texts = tmp_path / "model", ["The cat sat on a mat and looked at the dog. " * 3, "The cat sat."]
    shutil.copytree(tiny_mixtral, model)
    (weights,) = model.glob("*.safetensors")
    found = load_file(weights)
    pad = found["model.embed_tokens.weight"][load_tokenizer(open_source(str(model))).pad_token_id]
    pad.copy_(torch.arange(len(pad)) == 3)  # the largest that a norm can make of anything
    save_file(found, weights, {"format": "pt"})
    seen: list[dict[str, float]] = []
    parts = stage.parts
    monkeypatch.setattr(stage, "parts", lambda *given: (seen.append(given[2]), parts(*given))[1])
    for number, (size, rows) in enumerate(((1, texts[:1]), (1, texts[1:]), (1, texts), (2, texts))):
        source = tmp_path / f"{number}.jsonl"
        source.write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))
        given = (f"corpus.source={source}", f"corpus.sequences={len(rows)}", f"corpus.batch_size={size}")
        reparam(model, tmp_path / str(number), INT8, QUICK, *given, "corpus.packed=false", "corpus.sequence_length=48")
    alone = {name: max(first, seen[1][name]) for name, first in seen[0].items()}
    assert any(name.endswith("experts.down_proj") for name in alone)
    for together in seen[2:]:
        assert together == pytest.approx(alone, rel=1e-5)


def test_a_run_that_was_made_before_has_the_same_key(tiny_mixtral: Path, tmp_path: Path) -> None:
    before, now = (context_of(tiny_mixtral, tmp_path, QUICK, "reparam.samples=8", *more) for more in ((), (INT8,)))
    assert "w8a8" not in reparam_stage.inputs(before.given())["reparam"]
    assert "w8a8" in reparam_stage.inputs(now.given())["reparam"]


def test_a_format_names_it_too(tiny_mixtral: Path, tmp_path: Path) -> None:
    """export.formats, and `moeq export` of a run that folds its norms or has no stages yet."""
    named = context_of(tiny_mixtral, tmp_path / "run", "export.formats=[compressed-tensors-w8a8, dequantized]")
    assert named.recipe.export.formats == ["dequantized"]
    assert named.recipe.reparam is not None
    assert named.recipe.reparam.w8a8 == W8A8Section()
    assert context_of(tiny_mixtral, tmp_path, PLAIN, f"export.formats=[{W8A8}]").recipe.reparam == ReparamSection(
        samples=8, w8a8=W8A8Section(experts="plain")
    )
    asked = context_of(tiny_mixtral, tmp_path / "run", QUICK)
    pipeline.run_alone(stage.wanted(asked), "reparam")
    assert pipeline.result_paths(named)["w8a8"] == tmp_path / "run" / "reparam" / "w8a8"
    assert declared(tmp_path / "run" / "reparam" / "w8a8")["format"] == "int-quantized"
    assert stage.wanted(named) is named
    with pytest.raises(RecipeError, match=r"reparam.bits: norms are folded for 4 bits, W8A8 has inputs of 8"):
        stage.wanted(context_of(tiny_mixtral, tmp_path / "run", "reparam.bits=4"))
    unfolded = context_of(tiny_mixtral, tmp_path / "run")
    unfolded.recipe = unfolded.recipe.model_copy(update={"reparam": None})
    (tmp_path / "run" / "profile").mkdir()
    with pytest.raises(RecipeError, match="this run went on with the model as it was"):
        stage.wanted(unfolded)


@pytest.mark.full
def test_transformers_and_compressed_tensors_compute_the_simulation(
    dense: Path, tiny_mixtral: Path, tmp_path: Path
) -> None:
    """As perplexities; the whole checkpoint where transformers reads it, which it does of dense models alone."""
    peers.interpreter("compressed-tensors")
    jobs, wanted = [], []
    for name, model, form in (("dense", dense, INT8), ("plain", tiny_mixtral, PLAIN), ("int8", tiny_mixtral, INT8)):
        checkpoint, report = written(model, tmp_path / name, form)
        row = report.perplexity
        assert row is not None
        assert row.w8a8_written is not None
        assert abs(row.w8a8_written / row.original - 1) > 1e-5, "nothing was rounded"
        wanted.append(row.w8a8_written)
        ids = context_of(model, tmp_path / name, form).text.evaluation.ids  # type: ignore[union-attr]
        save_file({"ids": ids}, tmp_path / f"{name}.ids")
        twin = None if name == "dense" else str(twin_of(checkpoint, tmp_path / f"{name}-twin"))
        found = str(tmp_path / f"{name}.json")
        jobs.append({"checkpoint": str(checkpoint), "twin": twin, "ids": str(tmp_path / f"{name}.ids"), "found": found})
    (tmp_path / "jobs.json").write_text(json.dumps(jobs))
    peers.run("compressed-tensors", PROBE, tmp_path / "jobs.json")
    for job, perplexity in zip(jobs, wanted, strict=True):
        got = json.loads(Path(str(job["found"])).read_text("utf-8"))
        assert got["perplexity"] == pytest.approx(perplexity, rel=2e-6)
        assert got["quantized"] == (14 if job["twin"] is None else 8)


@pytest.mark.full
def test_transformers_refuses_experts_of_their_own(tiny_mixtral: Path, tmp_path: Path) -> None:
    """Why the test above builds such models itself: 5.23 reads no int8 experts, nor plain ones beside int8 linears.
    Notices when it does."""
    peers.interpreter("compressed-tensors")
    for form in (PLAIN, INT8):
        checkpoint, _ = written(tiny_mixtral, tmp_path / form[-5:], form, QUICK)
        with pytest.raises(RuntimeError, match="issues during automatic conversion"):
            AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
