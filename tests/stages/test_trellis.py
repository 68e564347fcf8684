"""trellis from the recipe to the checkpoint: measured, assigned, written, read by others, refused elsewhere."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from manifest_reader import read_expert
from packed_layers import matrix_of
from typer.testing import CliRunner

from moeq import cli, pipeline
from moeq.artifacts.losses import WHOLE
from moeq.artifacts.manifest import read_manifest
from moeq.conversion import convert
from moeq.errors import ArtifactError, FormatError, RecipeError
from moeq.estimator import load_hardware
from moeq.estimator.terms import expert_seconds
from moeq.progress import Reporter
from moeq.recipe import load_recipe
from moeq.runtime.packed_experts import PackedExperts
from moeq.stages import assign, evaluate
from moeq.stages.context import Context
from moeq.stages.replicas import load_losses
from moeq.verification.verify import Options, verify
from moeq_kernels.packed import PackedWeight, packed_bytes
from moeq_kernels.parts import Parts
from moeq_kernels.widths import Encoding

STATES = 9  # bits
SMALL = (
    "corpus.sequences=8", "corpus.sequence_length=48", "losses.bits=[1,2,3,4,8]", "losses.methods=[trellis]",
    f"losses.trellis_states={1 << STATES}", "assign.method=optimal", "assign.granularity=projection",
    "assign.bits_per_weight=2.6", "eval.perplexity.sequences=4", "eval.perplexity.sequence_length=48",
    "eval.compare=[{name: uniform-2, method: uniform, bits: 2}]", "eval.tasks=[]", "estimate.grid.inputs=[128]",
)  # fmt: skip


@pytest.fixture(scope="module")
def run(tiny_mixtral: Path, tmp_path_factory: pytest.TempPathFactory) -> Context:
    out = tmp_path_factory.mktemp("trellis")
    context = Context(
        recipe=load_recipe(None, SMALL), model_name=str(tiny_mixtral), out=out, reporter=Reporter(quiet=True)
    )
    pipeline.run(context)
    return context


def test_it_is_measured_and_assigned_by_the_bytes_that_it_takes(run: Context) -> None:
    layer = run.model.layers[0]
    wanted = {
        bits: sum(packed_bytes(*layer.shape(name), bits, Encoding.trellis(STATES)) for name in layer.projections)
        for bits in (1, 2, 3, 4, 8)
    }
    rows = [row for row in load_losses(run).rows() if row["projection"] == WHOLE]
    assert {(row["bits"], row["bytes"]) for row in rows} == set(wanted.items())
    mean = [np.mean([row["loss"] for row in rows if row["bits"] == bits]) for bits in (1, 2, 3, 4, 8)]
    assert mean == sorted(mean, reverse=True)
    assignment = assign.load(run)
    assert assignment.encoding == Encoding.trellis(STATES)
    assert assignment.is_mixed


def test_near_data_reads_what_they_take_and_no_scales_of_groups(run: Context) -> None:
    """Codes and a scale a row; the recipe's groups of 128 and zero points are those of grids."""
    section, layer, name = run.recipe.assign, run.model.layers[0], "h100-ndp-cxl"
    asked = section.model_copy(update={"hardware": name})
    found = assign.ndp_seconds(run, asked, (1, 2, 3, 4, 16))[0]
    times = expert_seconds(
        layer.parameters_per_expert, [1, 2, 3, 4, 16], load_hardware(name), group_size=layer.hidden_size,
        zero_points=False,
    )  # fmt: skip
    assert [found[bits] for bits in (1, 2, 3, 4, 16)] == times.tolist()


def test_what_is_written_is_what_was_measured(run: Context, tiny_mixtral: Path) -> None:
    assert evaluate.load(run).export_logit_error < 1e-5
    verdict = verify(run.directory("export"), Options(against=str(tiny_mixtral)), Reporter(quiet=True))
    assert not verdict.problems


def test_inspect_says_how_many_states(run: Context) -> None:
    shown = CliRunner().invoke(cli.app, ["inspect", str(run.directory("export")), "--json"])
    assert json.loads(shown.output)["trellis_states"] == 1 << STATES


@pytest.mark.full
def test_another_reader_has_the_same_values(run: Context) -> None:
    import moeq

    folder = run.directory("export")
    model = moeq.load(str(folder), dtype="float32")
    manifest = json.loads((folder / "placement.json").read_text())
    for placed in manifest["layers"]:
        experts = model.get_submodule(placed["name"])
        assert isinstance(experts, PackedExperts)
        for expert in placed["experts"]:
            replica = next(one for one in expert["replicas"] if one["placed"])
            values = read_expert(folder, placed, replica, manifest["layout"])
            for name, wanted in values.items():
                stored = experts.get_submodule(f"{expert['expert']}.{name}").stored()
                assert isinstance(stored, PackedWeight)
                assert torch.equal(stored.dequantize().double(), torch.from_numpy(wanted))


def test_values_of_states_that_are_others_are_refused(run: Context, tmp_path: Path) -> None:
    manifest = json.loads((run.directory("export") / "placement.json").read_text())
    manifest["layout"]["values"]["2"] = "AAAA"
    (tmp_path / "placement.json").write_text(json.dumps(manifest))
    with pytest.raises(ArtifactError, match="stand for other values"):
        read_manifest(tmp_path)


def test_only_plain_weights_go_elsewhere(run: Context, tmp_path: Path) -> None:
    with pytest.raises(FormatError, match="trellis codes; gptqmodel has none"):
        convert(run.directory("export"), "gptq", tmp_path / "gptq")
    convert(run.directory("export"), "dequantized", tmp_path / "plain")
    assert (tmp_path / "plain" / "config.json").is_file()


@pytest.mark.parametrize(
    "mine", [(slice(16, 32), slice(None)), (slice(None), slice(16, 48)), (slice(32, 40), slice(32, 52))]
)
def test_runtimes_take_the_tiles_of_a_device(mine: tuple[slice, slice]) -> None:
    """40 rows and 52 inputs, whose last tiles are filled up."""
    whole = matrix_of(40, 52, 3, state_bits=STATES)
    assert isinstance(whole, PackedWeight)
    parts = Parts(3, whole.encoding, 40, 52, mine)
    for name, part in whole.parts().items():
        parts.take(name, part, name)
    found = parts.matrix(torch.float32, "experts.0.up_proj")
    assert isinstance(found, PackedWeight)
    assert torch.equal(found.dequantize(), whole.dequantize()[mine])


def test_runtimes_refuse_parts_of_tiles() -> None:
    whole = matrix_of(40, 52, 3, state_bits=STATES)
    assert isinstance(whole, PackedWeight)
    parts = Parts(3, whole.encoding, 40, 52, (slice(None), slice(8, 32)))
    for name, part in whole.parts().items():
        parts.take(name, part, name)
    with pytest.raises(ValueError, match="inputs 8 to 31 are no whole tiles of 16"):
        parts.matrix(torch.float32, "experts.0.up_proj")


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (["losses.methods=[gptq,trellis]"], "methods: trellis stores other codes"),
        (["losses.trellis_states=300"], "300 is no power of 2"),
    ],
)
def test_what_it_cannot_go_with(change: list[str], why: str) -> None:
    with pytest.raises(RecipeError, match=why):
        load_recipe(None, [*SMALL, *change])
