"""NVFP4, MXFP4, FP8 from the recipe to the checkpoint: measured, assigned for vLLM, written, read or refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from made_sources import MadeSource, alike, quantization_of, save_model
from manifest_reader import read_expert
from safetensors.torch import load_file, save_file
from torch import Tensor

from moeq import pipeline
from moeq.artifacts.losses import WHOLE
from moeq.conversion import convert
from moeq.errors import ArtifactError, FormatError, RecipeError
from moeq.exporters import write
from moeq.exporters.foreign import WriteOptions
from moeq.exporters.readers import open_packed
from moeq.inspection import inspect
from moeq.models.source import INDEX
from moeq.progress import Reporter
from moeq.recipe import load_recipe
from moeq.stages import assign, evaluate, export
from moeq.stages.context import Context
from moeq.stages.needs import Sizes
from moeq.stages.replicas import load_losses
from moeq.verification.reference import streamed
from moeq.verification.verify import Options, verify
from moeq_kernels.packed import packed_bytes
from moeq_kernels.widths import FULL, Encoding

QUIET = Reporter(quiet=True)
CODEBOOKS = ("nvfp4", "mxfp4")
SIZES = {
    "hidden_size": 128, "moe_intermediate_size": 64, "num_experts": 2, "num_experts_per_tok": 1, "num_hidden_layers": 3,
}  # fmt: skip
SMALL = (
    "dtype=float32", "corpus.sequences=8", "corpus.sequence_length=32", "losses.bits=[4,8]", "assign.method=optimal",
    "assign.target=vllm-cuda", "assign.bits_per_weight=7.2",
    "eval.perplexity.sequences=2", "eval.perplexity.sequence_length=32", "eval.compare=[]", "eval.tasks=[]",
    "estimate.grid.inputs=[128]", "export.formats=[vllm-cuda]",
)  # fmt: skip


def recipe(codebook: str, *more: str) -> Any:
    return load_recipe(None, [*SMALL, f"losses.methods=[{codebook}]", f"assign.quantizer={codebook}", *more])


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model") / "qwen", "qwen3_moe", **SIZES)


@pytest.fixture(scope="module", params=CODEBOOKS)
def run(model: Path, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Context]:
    """A whole run; experts of a layer are in 4 or in 8 bits."""
    out = tmp_path_factory.mktemp(request.param)
    context = Context(recipe=recipe(request.param), model_name=str(model), out=out, reporter=QUIET)
    pipeline.run(context)
    return context


def exported(run: Context) -> Path:
    return run.out / "checkpoint-vllm-cuda"


def encoding(run: Context) -> Encoding:
    return Encoding.floating(run.recipe.losses.methods[0])


def decompressed(block: dict[str, Any], module: str, tensors: dict[str, Tensor]) -> Tensor:
    """A matrix as compressed-tensors itself has it, of its group's format."""
    package = pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors import BaseCompressor

    scheme = next(
        scheme
        for scheme in package.quantization.QuantizationConfig.model_validate(block).config_groups.values()
        if any(package.utils.match_name(module, target) for target in scheme.targets)
    )
    own = {part: tensors[f"{module}.{part}"] for part in PARTS if f"{module}.{part}" in tensors}
    found = BaseCompressor.get_value_from_registry(scheme.format).decompress(own, scheme)
    value: Tensor = found["weight"]
    return value.float()


PARTS = ("weight", "weight_packed", "weight_scale", "weight_global_scale")


def all_tensors(folder: Path) -> dict[str, Tensor]:
    files = sorted(folder.glob("model-experts-*.safetensors"))
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


def test_a_plan_foretells_its_bytes(run: Context, tmp_path: Path) -> None:
    fresh = Sizes(Context(recipe=run.recipe, model_name=run.model_name, out=tmp_path))
    size, folder = export.needs(fresh).files[f"../{exported(run).name}"], exported(run)
    assert size == pytest.approx(sum(path.stat().st_size for path in folder.iterdir()), rel=0.005)


@pytest.mark.full
def test_one_knapsack_over_4_and_8_bits(run: Context) -> None:
    """All experts of a layer have one width; rows of the table state the bytes that are stored."""
    layer, own = run.model.layers[0], encoding(run)
    wanted = {bits: sum(packed_bytes(*layer.shape(name), bits, own) for name in layer.projections) for bits in (4, 8)}
    weights = sum(rows * inputs for rows, inputs in map(layer.shape, layer.projections))
    more = 3 * 4 if own.codebook == "nvfp4" else 0
    assert wanted[4] == weights // 2 + weights // own.group_size + more
    assert wanted[8] == weights + 2 * sum(layer.shape(name)[0] for name in layer.projections)
    rows = [row for row in load_losses(run).rows() if row["projection"] == WHOLE]
    assert {(row["bits"], row["bytes"]) for row in rows} == set(wanted.items())
    mean = [np.mean([row["loss"] for row in rows if row["bits"] == bits]) for bits in (4, 8)]
    assert mean[0] > 10 * mean[1] > 0
    assignment = assign.load(run)
    assert assignment.encoding == own
    widths = assignment.expert_widths()
    assert all(width == layer[0] for layer in widths for width in layer)
    assert {layer[0] for layer in widths} == {4, 8}


@pytest.mark.cases(1)
def test_what_is_written_is_what_was_measured(run: Context, model: Path) -> None:
    assert evaluate.load(run).export_logit_error < 1e-5
    assert not verify(run.directory("export"), Options(against=str(model)), QUIET).problems
    units, compared = set(), 0
    for layer, expert, name, matrix in alike(run.directory("export"), exported(run)):
        compared += 1
        values = matrix.dequantize()
        assert torch.equal(values, values.bfloat16().float())
        if matrix.unit is not None and name != "down_proj":
            units.add((layer, expert, float(matrix.unit)))
    assert compared > 0
    assert len(units) == len({unit[:2] for unit in units})  # gate and up share it


def test_readers_that_know_no_moeq_have_the_same_values(run: Context) -> None:
    """compressed-tensors itself, and a reader of the native format, to the bit."""
    block, tensors = quantization_of(exported(run)), all_tensors(exported(run))
    folder = run.directory("export")
    manifest = json.loads((folder / "placement.json").read_text())
    seen = set()
    for placed in manifest["layers"]:
        replica = next(one for one in placed["experts"][1]["replicas"] if one["placed"])
        native = read_expert(folder, placed, replica, manifest["layout"])
        seen.add(replica["bits"])
        for name in ("gate_proj", "down_proj"):
            found = decompressed(block, f"{placed['name']}.1.{name}", tensors)
            assert np.array_equal(found.numpy(), native[name].astype(np.float32))
    assert seen == {4, 8}


def test_config_json_says_the_format_of_every_layer(run: Context) -> None:
    block, codebook = quantization_of(exported(run)), encoding(run).codebook
    assert block["format"] == "mixed-precision"
    groups = {group["format"]: group for group in block["config_groups"].values()}
    assert set(groups) == {"float-quantized", f"{codebook}-pack-quantized"}
    four, eight = groups[f"{codebook}-pack-quantized"], groups["float-quantized"]
    assert four["input_activations"] is None
    assert (four["weights"]["num_bits"], four["weights"]["group_size"]) == (4, {"nvfp4": 16, "mxfp4": 32}[codebook])
    assert eight["weights"]["strategy"] == "channel"
    assert (eight["input_activations"]["strategy"], eight["input_activations"]["dynamic"]) == ("token", True)
    assert inspect(run.directory("export"))["float_codes"] == codebook


@pytest.mark.cases(1)
def test_it_goes_to_plain_weights_and_nowhere_else(run: Context, tmp_path: Path) -> None:
    convert(exported(run), "dequantized", tmp_path / "plain")
    convert(run.directory("export"), "vllm-cuda", tmp_path / "again")
    assert all(
        torch.equal(one, all_tensors(exported(run))[key]) for key, one in all_tensors(tmp_path / "again").items()
    )
    assert inspect(tmp_path / "again")["kind"].startswith("packed checkpoint (compressed-tensors")
    named = encoding(run).codebook.upper()
    for target in ("gptqmodel", "transformers", "auto-round"):
        with pytest.raises(FormatError, match=f"{named}; {target} has none"):
            convert(exported(run), target, tmp_path / target)
    with pytest.raises(FormatError, match=f"{named}; moeq writes it in the native format from a run alone"):
        convert(exported(run), "native", tmp_path / "native")


def test_scales_of_others_are_read_as_values(run: Context, tmp_path: Path) -> None:
    """As llm-compressor writes them: numbers that are no powers of two. To compressed-tensors' bits."""
    convert(run.directory("export"), "vllm-cuda", tmp_path / "made")
    found = None
    for file in sorted((tmp_path / "made").glob("model-experts-*.safetensors")):
        tensors = load_file(file)
        for key in [key for key in tensors if key.endswith((".weight_global_scale", ".weight_scale"))]:
            if tensors[key].dtype in (torch.float32, torch.bfloat16):
                tensors[key] = (tensors[key].float() * 1.7).to(torch.float32)
                found = key.rpartition(".")[0]
        save_file(tensors, file, {"format": "pt"})
    (tmp_path / "made" / "SHA256SUMS").unlink()
    assert found is not None
    opened = open_packed(tmp_path / "made", as_values=True)
    layer = next(layer for layer in opened.layers if found.startswith(layer.name + "."))
    expert, name = found.removeprefix(layer.name + ".").split(".")
    value = opened.expert(layer, int(expert))[0][name]
    assert isinstance(value, Tensor)
    assert torch.equal(value, decompressed(quantization_of(tmp_path / "made"), found, all_tensors(tmp_path / "made")))
    with pytest.raises(ArtifactError, match="packs no such codes"):
        open_packed(tmp_path / "made").expert(layer, int(expert))


def test_how_others_round_activations_is_left_behind(model: Path, tmp_path: Path) -> None:
    """As llm-compressor writes W4A4 with a key-value cache in FP8: tensors that are no part of the weights."""
    write("vllm-cuda", MadeSource(model, lambda *place: 4, floats="nvfp4"), tmp_path / "made", WriteOptions())
    shutil.copytree(tmp_path / "made", tmp_path / "more")
    (tmp_path / "more" / "SHA256SUMS").unlink()
    index = json.loads((tmp_path / "more" / INDEX).read_text("utf-8"))
    modules = [key.rpartition(".")[0] for key in index["weight_map"] if key.endswith(".weight_packed")]
    scales = {f"{module}.input_global_scale": torch.ones(1) for module in modules}
    scales |= {f"model.layers.0.self_attn.{part}_scale": torch.ones(1) for part in "kv"}
    save_file(scales, tmp_path / "more" / "scales.safetensors", {"format": "pt"})
    index["weight_map"] |= dict.fromkeys(scales, "scales.safetensors")
    (tmp_path / "more" / INDEX).write_text(json.dumps(index), "utf-8")
    convert(tmp_path / "made", "dequantized", tmp_path / "plain")
    said = convert(tmp_path / "more", "dequantized", tmp_path / "same")["notes"]
    what = f"{len(scales)} tensors (input_global_scale, k_scale, v_scale)"
    assert f"left out: how activations or the key-value cache are rounded, {what}" in said
    plain, same = all_tensors(tmp_path / "plain"), all_tensors(tmp_path / "same")
    assert plain.keys() == same.keys()
    assert all(torch.equal(tensor, same[key]) for key, tensor in plain.items())
    model_of_others = streamed(open_packed(tmp_path / "more", as_values=True), torch.float32).model
    with torch.no_grad():
        assert torch.isfinite(model_of_others(input_ids=torch.arange(3, 11)[None]).logits).all()


@pytest.mark.parametrize("codebook", CODEBOOKS)
def test_what_vllm_would_not_load_as_it_is_meant_is_refused(codebook: str, model: Path, tmp_path: Path) -> None:
    source = MadeSource(model, lambda layer, expert, part: 8 if expert else 4, floats=codebook)
    with pytest.raises(FormatError, match=r"8 bits beside 4 bits|8 bits; .* one width|takes one scheme"):
        write("vllm-cuda", source, tmp_path / "out", WriteOptions())
    odd = save_model(tmp_path / "odd", "qwen3_moe", **SIZES | {"moe_intermediate_size": 40})
    with pytest.raises(FormatError, match=r"40 inputs in groups of|40 rows; vllm-cuda packs multiples of 32"):
        write("vllm-cuda", MadeSource(odd, lambda *place: 4, floats=codebook), tmp_path / "out", WriteOptions())


@pytest.mark.parametrize("codebook", CODEBOOKS)
def test_layers_in_16_bits_are_ignored(codebook: str, model: Path, tmp_path: Path) -> None:
    source = MadeSource(model, lambda layer, expert, part: (4, 8, FULL)[layer], floats=codebook)
    write("vllm-cuda", source, tmp_path / "out", WriteOptions())
    ignored = quantization_of(tmp_path / "out")["ignore"]
    assert [name for name in ignored if "layers" in name] == [r"re:.*model\.layers\.2\.mlp\.experts\..*"]
    assert not any("layers.2" in key and "scale" in key for key in all_tensors(tmp_path / "out"))


def test_gate_and_up_of_other_units_are_refused(model: Path, tmp_path: Path) -> None:
    """vLLM takes the first's for both."""

    class Apart(MadeSource):
        def expert(self, layer: Any, expert: int) -> Any:
            found, biases = super().expert(layer, expert)
            found["up_proj"].unit.mul_(2)  # type: ignore[union-attr]
            return found, biases

    with pytest.raises(FormatError, match=r"experts.0.up_proj.*|counted in"):
        write("vllm-cuda", Apart(model, lambda *place: 4, floats="nvfp4"), tmp_path / "out", WriteOptions())


def test_numbers_that_are_none_are_refused(model: Path, tmp_path: Path) -> None:
    for codebook, bits, part, value in (
        ("nvfp4", 4, "scales", 0x7F), ("mxfp4", 4, "scales", 0xFF), ("nvfp4", 8, "codes", 0xFF),
    ):  # fmt: skip

        class Spoiled(MadeSource):
            def expert(self, layer: Any, expert: int) -> Any:
                found, biases = super().expert(layer, expert)
                getattr(found["up_proj"], part)[3, 0] = value  # noqa: B023
                return found, biases

        source = Spoiled(model, lambda *place, bits=bits: bits, floats=codebook)
        with pytest.raises(ArtifactError, match="scales that are not finite"):
            write("vllm-cuda", source, tmp_path / f"{codebook}-{bits}", WriteOptions())


@pytest.mark.parametrize(
    ("more", "why"),
    [
        (["losses.methods=[gptq,nvfp4]"], "methods: nvfp4 stores other codes"),
        (["losses.bits=[2,4]"], "bits: nvfp4 makes no codes of 2 bits"),
        (["quantize.tune={}"], "nvfp4 cannot go with quantize.refine and quantize.tune"),
    ],
)
def test_what_does_not_go_together(more: list[str], why: str) -> None:
    with pytest.raises(RecipeError, match=why):
        recipe("nvfp4", *more)
