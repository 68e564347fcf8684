"""exl3 from the recipe to the checkpoint: measured, assigned for exllamav3, written, read, refused elsewhere."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from exl3_reader import read
from greedy_walks import walks
from made_sources import MadeSource, alike, save_model
from manifest_reader import read_expert
from safetensors.torch import load_file, save_file

from moeq import pipeline
from moeq.artifacts.losses import WHOLE
from moeq.conversion import convert
from moeq.errors import ArtifactError, EvaluationError, FormatError, RecipeError
from moeq.exporters import write
from moeq.exporters.foreign import WriteOptions
from moeq.exporters.readers import open_packed
from moeq.inspection import inspect
from moeq.numerics import trellis
from moeq.progress import Reporter
from moeq.recipe import load_recipe
from moeq.stages import assign, evaluate, export
from moeq.stages.context import Context
from moeq.stages.needs import Sizes
from moeq.stages.replicas import load_losses
from moeq.verification.reference import values
from moeq.verification.verify import Options, verify
from moeq.verification.written import check_written
from moeq_kernels.packed import packed_bytes
from moeq_kernels.widths import Encoding

pytestmark = pytest.mark.full

QUIET = Reporter(quiet=True)
SIZES = {
    "hidden_size": 256, "moe_intermediate_size": 128, "num_experts": 2, "num_experts_per_tok": 1,
    "num_hidden_layers": 2,
}  # fmt: skip
SMALL = (
    "dtype=float32", "corpus.sequences=8", "corpus.sequence_length=32", "losses.bits=[2,3]", "losses.methods=[exl3]",
    "assign.quantizer=exl3", "assign.method=optimal", "assign.target=exl3", "assign.granularity=projection",
    "assign.bits_per_weight=2.6", "eval.perplexity.sequences=2", "eval.perplexity.sequence_length=32",
    "eval.compare=[]", "eval.tasks=[]", "estimate.grid.inputs=[128]", "export.formats=[exl3]",
)  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model") / "qwen", "qwen3_moe", **SIZES)


@pytest.fixture(scope="module")
def run(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Context]:
    """A whole run, with walks that are not the best."""
    out = tmp_path_factory.mktemp("exl3")
    context = Context(recipe=load_recipe(None, SMALL), model_name=str(model), out=out, reporter=QUIET)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trellis, "walks", walks)
        pipeline.run(context)
    return context


def exported(run: Context) -> Path:
    return run.out / "checkpoint-exl3"


def test_it_is_measured_and_assigned_as_exllamav3_takes_it(run: Context) -> None:
    """Each projection of a layer has one width; rows of the table state the bytes that are stored."""
    layer = run.model.layers[0]
    wanted = {
        bits: sum(packed_bytes(*layer.shape(name), bits, Encoding.exl3()) for name in layer.projections)
        for bits in (2, 3)
    }
    rows = [row for row in load_losses(run).rows() if row["projection"] == WHOLE]
    assert {(row["bits"], row["bytes"]) for row in rows} == set(wanted.items())
    mean = [np.mean([row["loss"] for row in rows if row["bits"] == bits]) for bits in (2, 3)]
    assert mean == sorted(mean, reverse=True)
    assignment = assign.load(run)
    assert assignment.encoding == Encoding.exl3()
    widths = assignment.expert_widths()
    assert all(width == layer[0] for layer in widths for width in layer)
    assert any(not isinstance(layer[0], int) for layer in widths)


def test_what_is_written_is_what_was_measured(run: Context, model: Path) -> None:
    assert evaluate.load(run).export_logit_error < 1e-5
    assert not verify(run.directory("export"), Options(against=str(model)), QUIET).problems
    assert len(list(alike(run.directory("export"), exported(run)))) > 0


def test_a_plan_foretells_its_bytes(run: Context, tmp_path: Path) -> None:
    fresh = Sizes(Context(recipe=run.recipe, model_name=run.model_name, out=tmp_path))
    size, folder = export.needs(fresh).files[f"../{exported(run).name}"], exported(run)
    assert size == pytest.approx(sum(path.stat().st_size for path in folder.iterdir()), rel=0.005)


def test_readers_that_know_no_moeq_have_the_same_values(run: Context) -> None:
    """One expert of EXL3's layout and of the native one, to the bit."""
    tensors = load_file(exported(run) / "model-experts-001.safetensors")
    folder = run.directory("export")
    manifest = json.loads((folder / "placement.json").read_text())
    placed = manifest["layers"][1]
    replica = next(one for one in placed["experts"][1]["replicas"] if one["placed"])
    native = read_expert(folder, placed, replica, manifest["layout"])
    for name in ("gate_proj", "down_proj"):
        parts = [tensors[f"{placed['name']}.1.{name}.{part}"].numpy() for part in ("trellis", "suh", "svh")]
        assert np.array_equal(read(*parts, "mul1")[1], native[name].astype(np.float32))


def test_config_json_says_what_exllamav3s_converter_says(run: Context) -> None:
    config = json.loads((exported(run) / "config.json").read_text())
    block = config["quantization_config"]
    assert (block["quant_method"], block["codebook"], block["head_bits"]) == ("exl3", "mul1", 16)
    assert 2 < block["bits"] < 3
    tensors = {
        name: tensor
        for file in exported(run).glob("model-experts-*.safetensors")
        for name, tensor in load_file(file).items()
    }
    for name in ("quantization_config.json", "quantize_config.json"):
        storage = json.loads((exported(run) / name).read_text())["tensor_storage"]
        listed = {key: one for module in storage.values() for key, one in module["stored_tensors"].items()}
        assert {key: (one["shape"], one["n_bytes"], one["dtype"]) for key, one in listed.items()} == {
            key: (list(tensor.shape), tensor.nbytes, str(tensor.dtype)) for key, tensor in tensors.items()
        }
    assert inspect(run.directory("export"))["exl3_codebook"] == "mul1"


def test_tensors_alone_say_what_is_packed(run: Context, tmp_path: Path) -> None:
    """exllamav3 goes by their names, whatever config.json declares."""
    folder = tmp_path / "out"
    shutil.copytree(exported(run), folder)
    for name in ("SHA256SUMS", "stage.json"):
        (folder / name).unlink()
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    (folder / "config.json").write_text(json.dumps(config))
    assert inspect(folder)["kind"] == "packed checkpoint (EXL3)"
    mine, theirs = (open_packed(path, as_values=True) for path in (folder, exported(run)))
    for name, matrix in mine.expert(mine.layers[1], 1)[0].items():
        assert torch.equal(values(matrix), values(theirs.expert(theirs.layers[1], 1)[0][name]))


def test_a_checkpoint_that_has_other_values_is_not_kept(run: Context, tmp_path: Path) -> None:
    """A code, a scale and a sign that are others than the replicas'."""
    for part in ("trellis", "svh", "suh"):
        folder = tmp_path / part
        convert(run.directory("export"), "exl3", folder)
        file = folder / "model-experts-000.safetensors"
        tensors = load_file(file)
        one = tensors["model.layers.0.mlp.experts.1.up_proj." + part].flatten()
        one[7] = -one[7] if part != "trellis" else one[7] ^ 4
        save_file(tensors, file, {"format": "pt"})
        (folder / "SHA256SUMS").unlink()
        with pytest.raises(EvaluationError, match=r"experts, expert 1, up_proj|experts.1.up_proj"):
            check_written(folder, QUIET, against=run.directory("export"))


def test_it_goes_back_to_the_native_format_and_to_plain_weights(run: Context, tmp_path: Path) -> None:
    convert(run.directory("export"), "exl3", tmp_path / "made")
    assert inspect(tmp_path / "made")["kind"] == "packed checkpoint (EXL3)"
    convert(tmp_path / "made", "native", tmp_path / "native")
    convert(exported(run), "dequantized", tmp_path / "plain")
    with pytest.raises(FormatError, match="EXL3's codes; gptqmodel has none"):
        convert(exported(run), "gptqmodel", tmp_path / "gptq")


def test_what_is_no_code_of_moeqs_is_read_as_values(run: Context, tmp_path: Path) -> None:
    """As exllamav3's converter writes them, whose suh are scales."""
    convert(run.directory("export"), "exl3", tmp_path / "made")
    file = tmp_path / "made" / "model-experts-000.safetensors"
    tensors = load_file(file)
    key = "model.layers.0.mlp.experts.0.gate_proj"
    tensors[f"{key}.suh"] *= torch.linspace(0.5, 2, 256).half()
    save_file(tensors, file, {"format": "pt"})
    (tmp_path / "made" / "SHA256SUMS").unlink()
    found = open_packed(tmp_path / "made", as_values=True)
    value = found.expert(found.layers[0], 0)[0]["gate_proj"]
    assert isinstance(value, torch.Tensor)
    parts = [tensors[f"{key}.{part}"].numpy() for part in ("trellis", "suh", "svh")]
    assert np.array_equal(value.numpy(), read(*parts, "mul1")[1])
    with pytest.raises(ArtifactError, match="packs no such codes"):
        open_packed(tmp_path / "made").expert(found.layers[0], 0)


def test_one_width_for_each_matrix_of_a_layer(model: Path, tmp_path: Path) -> None:
    source = MadeSource(model, lambda layer, expert, part: 3 if (expert, part) == (1, "up_proj") else 2, exl3=True)
    with pytest.raises(FormatError, match=r"3 bits beside 2 bits of .*experts.0.up_proj; exl3 takes one width"):
        write("exl3", source, tmp_path / "out", WriteOptions())
    plain = MadeSource(model, lambda layer, expert, part: 16 if layer else 2, exl3=True)
    write("exl3", plain, tmp_path / "out", WriteOptions())
    assert sorted(load_file(tmp_path / "out" / "model-experts-001.safetensors"))[0].endswith(".weight")


def test_what_exllamav3_does_not_load_is_refused_before_anything_runs(tmp_path: Path) -> None:
    narrow = save_model(tmp_path / "narrow", "qwen3_moe", **SIZES | {"moe_intermediate_size": 64})
    other = save_model(tmp_path / "olmoe", "olmoe", hidden_size=128, intermediate_size=128, num_hidden_layers=1)
    for path, error, why in (
        (narrow, RecipeError, r"64 x 256 weights; exl3 takes multiples of 128 .*up_proj|64 x 256 weights"),
        (other, FormatError, "loads no model_type olmoe"),
    ):
        context = Context(recipe=load_recipe(None, SMALL), model_name=str(path), out=tmp_path / "run", reporter=QUIET)
        with pytest.raises(error, match=why):
            pipeline.run(context)
    with pytest.raises(FormatError, match="grids; exl3 has none"):
        write("exl3", MadeSource(narrow, lambda *place: 4), tmp_path / "out", WriteOptions())


def test_others_cannot_go_with_it() -> None:
    with pytest.raises(RecipeError, match="methods: exl3 stores other codes"):
        load_recipe(None, [*SMALL, "losses.methods=[gptq,exl3]"])
