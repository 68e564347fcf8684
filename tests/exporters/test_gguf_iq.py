"""i-quants of a run in GGUF, and in the native format: the same values, whoever reads them.

Skipped where gguf, or llama-cpp-python, is not installed.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import peers
import pytest
import torch
from gguf_read import ROUNDED, check_stacks, llama_logits, tensors_of
from made_sources import IDS, Choose, MadeSource, reference_logits, save_model
from manifest_reader import read_expert

from moeq import pipeline
from moeq.artifacts.assignment import read_assignment
from moeq.artifacts.stage import read_record
from moeq.artifacts.targets import Grid, refuse_stack, target_of
from moeq.cli.runs import context_of
from moeq.conversion import convert
from moeq.errors import FormatError
from moeq.exporters import write
from moeq.exporters.foreign import WriteOptions
from moeq.exporters.gguf import FILE
from moeq.exporters.readers import open_packed
from moeq.folders import bytes_in
from moeq.options import BudgetOptions
from moeq.stages.export import format_directory
from moeq.verification.logits import typical
from moeq_kernels.iq_types import SETS, stored_bits
from moeq_kernels.packed import PackedWeight

WIDE = {"hidden_size": 256, "head_dim": 64, "moe_intermediate_size": 512, "intermediate_size": 512}
LESS = (
    "corpus.sequences=4", "corpus.sequence_length=24", "losses.layer_effects=null", "assign.layer_weighting=null",
    "eval.perplexity.sequences=2", "eval.perplexity.sequence_length=24", "eval.compare=[]", "losses.bits=[1, 2, 4, 8]",
)  # fmt: skip


def by_stack(layer: int, expert: int, projection: str) -> int:
    """Every width of a set, one a stack."""
    widths = {"gate_proj": (1, 4), "up_proj": (2, 8), "down_proj": (3, 16)}
    return widths[projection][layer % 2]


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    peers.module("gguf")
    return save_model(tmp_path_factory.mktemp("wide") / "model", "qwen3_moe", norm_topk_prob=True, **WIDE)


def exported(source: MadeSource, out: Path, **options: Any) -> Path:
    write("llama.cpp", source, out, WriteOptions(**options))
    return out


@pytest.mark.cases(1)
@pytest.mark.parametrize("codebook", list(SETS))
def test_gguf_itself_reads_the_dequantized_values(codebook: str, wide: Path, tmp_path: Path) -> None:
    source = MadeSource(wide, by_stack, iq=codebook)
    out = exported(source, tmp_path / "out")
    check_stacks(source, tensors_of(out))
    kinds = Counter(
        one.tensor_type.name for one in peers.module("gguf").GGUFReader(out / FILE).tensors if "_exps" in one.name
    )
    assert kinds == Counter(dict.fromkeys(SETS[codebook].values(), 1) | {"BF16": 1})
    found = open_packed(out, as_values=True)
    for layer in source.layers:
        wanted, there = (one.expert(layer, 1)[0]["gate_proj"] for one in (source, found))
        assert isinstance(wanted, PackedWeight)
        assert torch.equal(there, wanted.dequantize())


@pytest.mark.parametrize("codebook", list(SETS))
def test_llama_cpp_computes_every_type(codebook: str, wide: Path, tmp_path: Path) -> None:
    peers.interpreter("llama-cpp-python")
    for bits in SETS[codebook]:
        source = MadeSource(wide, lambda layer, expert, projection: bits, iq=codebook)  # noqa: B023
        logits = llama_logits(exported(source, tmp_path / f"{bits}"), tmp_path)
        assert not isinstance(logits, str), logits
        assert typical(logits, reference_logits(source)) < ROUNDED


def ran(model: Path, out: Path, **given: str) -> tuple[Any, Path]:
    """The context of a run for llama.cpp, and what is written for it."""
    asked = BudgetOptions(for_="llama.cpp", what=str(model), out=out, set_=[*LESS], verify=False, quiet=True, **given)
    context = context_of(asked, "run")
    pipeline.run(context, ("profile", "losses", "assign", "quantize", "export"))
    return context, format_directory(out, "llama.cpp")


@pytest.fixture(scope="module")
def run(wide: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A run by default, and what it wrote for llama.cpp."""
    out = tmp_path_factory.mktemp("run") / "out"
    context, folder = ran(wide, out, bits="2.6")
    assert context.recipe.losses.methods == ["iq"]
    assert context.recipe.losses.iq_set == "s"
    return out, folder


def test_a_run_for_llama_cpp_makes_them_within_its_budget(run: tuple[Path, Path]) -> None:
    out, folder = run
    tensors = [one for one in peers.module("gguf").GGUFReader(folder / FILE).tensors if "_exps" in one.name]
    assert {one.tensor_type.name for one in tensors} <= {*SETS["iq-s"].values()}
    bits = float(8 * sum(int(one.n_bytes) for one in tensors) / sum(int(one.n_elements) for one in tensors))
    assert 2.2 < bits <= 2.6
    said = read_record(out / "assign", "assign").summary
    assert said["loads_in"]["llama.cpp"] is None
    assert read_assignment(out / "assign" / "assignment.json").encoding.codebook == "iq-s"


def test_the_native_checkpoint_beside_it_has_the_same_values(run: tuple[Path, Path], tmp_path: Path) -> None:
    """And the same bytes of experts; transformers runs it, and it converts to what the run wrote."""
    out, folder = run
    from transformers import AutoConfig, AutoModelForCausalLM

    native, other = open_packed(out / "checkpoint"), open_packed(folder, as_values=True)
    for layer, theirs in zip(native.layers, other.layers, strict=True):
        for expert in range(layer.num_experts):
            there = other.expert(theirs, expert)[0]
            for name, matrix in native.expert(layer, expert)[0].items():
                assert isinstance(matrix, PackedWeight)
                assert torch.equal(there[name], matrix.dequantize())
    with torch.no_grad():
        logits = AutoModelForCausalLM.from_pretrained(out / "checkpoint", dtype=torch.float32)(input_ids=IDS).logits
    convert(out / "checkpoint", "llama.cpp", tmp_path / "again")
    assert (tmp_path / "again" / FILE).read_bytes() == (folder / FILE).read_bytes()
    config = AutoConfig.from_pretrained(folder)
    plain = AutoModelForCausalLM.from_pretrained(folder, gguf_file=FILE, config=config, dtype=torch.float32)
    with torch.no_grad():
        wanted = plain.eval()(input_ids=IDS).logits
    assert float((logits - wanted).norm() / wanted.norm()) < 1e-3


def test_the_manifest_says_how_to_read_them(run: tuple[Path, Path]) -> None:
    checkpoint = run[0] / "checkpoint"
    manifest = json.loads((checkpoint / "placement.json").read_text("utf-8"))
    native = open_packed(checkpoint)
    for layer, placed in zip(native.layers, manifest["layers"], strict=True):
        (replica,) = placed["experts"][2]["replicas"]
        read = read_expert(checkpoint, placed, replica, manifest["layout"])
        for name, matrix in native.expert(layer, 2)[0].items():
            assert isinstance(matrix, PackedWeight)
            assert np.array_equal(read[name], matrix.dequantize().numpy())


@pytest.mark.full
@pytest.mark.parametrize(("bits", "name"), [("2.4", "xs"), ("2.1", "xxs"), ("1.8", "xxs")])
def test_small_budgets_have_the_set_that_fits(bits: str, name: str, wide: Path, tmp_path: Path) -> None:
    context, folder = ran(wide, tmp_path / "run", bits=bits)
    assert context.recipe.losses.iq_set == name
    tensors = [one for one in peers.module("gguf").GGUFReader(folder / FILE).tensors if "_exps" in one.name]
    assert sum(int(one.n_bytes) * 8 for one in tensors) <= float(bits) * sum(int(one.n_elements) for one in tensors)


@pytest.mark.full
def test_a_size_is_that_of_the_files_directory(wide: Path, tmp_path: Path) -> None:
    _, plenty = ran(wide, tmp_path / "plenty", bits="8.5")
    size = round(0.8 * bytes_in(plenty))
    _, folder = ran(wide, tmp_path / "run", size=str(size))
    assert 0.5 * size < bytes_in(folder) <= size


def test_what_llama_cpp_cannot_hold_is_refused(wide: Path, tmp_path: Path) -> None:
    choose: Choose = lambda layer, expert, projection: 2 + expert % 2  # noqa: E731
    for widen in (False, True):
        with pytest.raises(FormatError, match="2, 3 bits"):
            exported(MadeSource(wide, choose, iq="iq-s"), tmp_path / "out", widen=widen)
    assert not list(tmp_path.iterdir()), "nothing is left behind"
    with pytest.raises(FormatError, match="i-quants; auto-round has none"):
        write("auto-round", MadeSource(wide, by_stack, iq="iq-s"), tmp_path / "out", WriteOptions())


@pytest.mark.parametrize("name", ["llama.cpp", "llama.cpp-refit"])
def test_a_matrix_takes_what_the_native_format_has(name: str) -> None:
    for codebook, widths in SETS.items():
        for bits in widths:
            size = 32 if bits == 8 else 256
            grid = Grid(rows=3, inputs=512, bits=bits, group_size=size, symmetric=True, codebook=codebook)
            assert target_of(name).matrix_bytes(grid) is None
            assert refuse_stack(target_of(name), [grid], full=False, widen=False) is None
            assert 1.5 < stored_bits(bits, codebook) < 8.6
