"""Budgets of a run in grids for a runtime with blocks of its own limit what its file takes, to the byte.

Skipped where gguf is not installed.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import peers
import pytest
from made_sources import save_model

from moeq import pipeline
from moeq.artifacts.stage import read_record
from moeq.artifacts.targets import ANY_GRID, Grid, refuse_matrix, target_of
from moeq.exporters.gguf import FILE
from moeq.folders import bytes_in
from moeq.numerics.ggml_types import NEAREST, TYPES
from moeq.options import BudgetOptions
from moeq.stages.export import format_directory
from moeq.starting import context_of

LESS = (
    "losses.methods=[rtn]", "assign.quantizer=rtn", "corpus.sequences=4", "corpus.sequence_length=24",
    "losses.bits=[2, 3, 4, 8]", "losses.clip=minmax", "losses.layer_effects=null", "assign.layer_weighting=null",
    "eval.perplexity.sequences=2", "eval.perplexity.sequence_length=24", "eval.compare=[]",
)  # fmt: skip
WIDE = {"hidden_size": 256, "moe_intermediate_size": 512, "head_dim": 64, "norm_topk_prob": True}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    peers.module("gguf")
    return save_model(tmp_path_factory.mktemp("wide") / "model", "qwen3_moe", **WIDE)


def ran(model: Path, out: Path, **given: str) -> tuple[Path, dict[str, Any]]:
    """What is written for llama.cpp, and what assign says."""
    asked = BudgetOptions(for_="llama.cpp", what=str(model), out=out, set_=[*LESS], verify=False, quiet=True, **given)
    context = context_of(asked, "run")
    pipeline.run(context, ("profile", "losses", "assign", "quantize", "export"))
    assert context.recipe.losses.group_size == 32
    return format_directory(out, "llama.cpp-refit"), read_record(out / "assign", "assign").summary


def bits_of_experts(file: Path) -> float:
    """What gguf's own reader counts for a weight of the experts."""
    tensors = [tensor for tensor in peers.module("gguf").GGUFReader(file).tensors if "_exps" in tensor.name]
    return float(8 * sum(int(one.n_bytes) for one in tensors) / sum(int(one.n_elements) for one in tensors))


@pytest.mark.cases(1)
@pytest.mark.parametrize("budget", ["2.75", "3.5"])
def test_the_budget_is_that_of_the_file(model: Path, tmp_path: Path, budget: str) -> None:
    folder, assigned = ran(model, tmp_path / "run", bits=budget)
    bits = bits_of_experts(folder / FILE)
    assert assigned["bits_per_weight_for"] == {"llama.cpp-refit": pytest.approx(bits)}
    assert float(budget) - 0.5 < bits <= float(budget)
    assert assigned["loads_in"]["llama.cpp-refit"] is None


@pytest.mark.full
def test_a_size_is_that_of_the_files_directory(model: Path, tmp_path: Path) -> None:
    plenty, _ = ran(model, tmp_path / "plenty", bits="8.5")
    size = round(0.8 * bytes_in(plenty))
    folder, _ = ran(model, tmp_path / "run", size=str(size))
    assert 0.5 * size < bytes_in(folder) <= size


@pytest.mark.parametrize("name", ["llama.cpp", "llama.cpp-refit"])
@pytest.mark.parametrize(("bits", "symmetric"), NEAREST)
def test_a_matrix_takes_whole_blocks(name: str, bits: int, symmetric: bool) -> None:
    target, block = target_of(name), TYPES[NEAREST[bits, symmetric]]
    grid = Grid(rows=3, inputs=512, bits=bits, group_size=256, symmetric=symmetric)
    found = target.matrix_bytes(grid)
    assert found == (3 * block.row_bytes(512) if (bits, symmetric) in (target.blocks or {}) else None)
    assert target.matrix_bytes(Grid(rows=3, inputs=80, bits=bits, group_size=16, symmetric=symmetric)) is None
    assert target_of("auto-round").matrix_bytes(grid) is None, "as the native format has it"


def test_what_no_setting_mends_is_told_first() -> None:
    """Who had changed groups and zero points as told met the rows next."""
    grid = Grid(rows=24, inputs=80, bits=4, group_size=16, symmetric=False)
    assert refuse_matrix(target_of("vllm-cuda"), grid) == ("24 rows; vllm-cuda packs multiples of 32", ANY_GRID)


@pytest.mark.parametrize(("bits", "size"), [("2", 128), ("2.7", 32)])
def test_where_no_block_of_two_bits_fits_there_is_one_bit(model: Path, tmp_path: Path, bits: str, size: int) -> None:
    grids = ["losses.methods=[gptq]", "assign.quantizer=gptq"]
    asked = BudgetOptions(for_="llama.cpp", what=str(model), out=tmp_path / "run", bits=bits, set_=grids, quiet=True)
    recipe = context_of(asked, "plan").recipe
    assert recipe.losses.group_size == size
    assert recipe.assign.target == "llama.cpp-refit"
