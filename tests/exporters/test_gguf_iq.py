"""i-quants of a run in GGUF, and in the native format: the same values, whoever reads them.

Skipped where gguf, or llama-cpp-python, is not installed.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import peers
import pytest
import torch
from gguf_read import ROUNDED, check_stacks, llama_logits, tensors_of, typical
from made_sources import Choose, MadeSource, reference_logits, save_model

from moeq.artifacts.targets import Grid, refuse_stack, target_of
from moeq.errors import FormatError
from moeq.exporters import write
from moeq.exporters.foreign import WriteOptions
from moeq.exporters.gguf import FILE
from moeq.exporters.readers import open_packed
from moeq_kernels.iq_types import SETS, stored_bits
from moeq_kernels.packed import PackedWeight

WIDE = {"hidden_size": 256, "head_dim": 64, "moe_intermediate_size": 512, "intermediate_size": 512}


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


@pytest.mark.cases(2)
@pytest.mark.parametrize("codebook", list(SETS))
@pytest.mark.parametrize("widen", [False, True])
def test_gguf_itself_reads_the_dequantized_values(codebook: str, widen: bool, wide: Path, tmp_path: Path) -> None:
    source = MadeSource(wide, by_stack, iq=codebook)
    out = exported(source, tmp_path / "out", widen=widen)
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
