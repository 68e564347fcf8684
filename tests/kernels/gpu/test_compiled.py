"""The programs compile for a Hopper GPU, machine code and all: Triton brings the assembler, a GPU is not needed."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
SCRIPT = """
import sys
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from moeq_kernels.gpu import programs

widths, dtype, how, fine, shape = sys.argv[1].split("+"), sys.argv[2], sys.argv[3], sys.argv[4] == "fine", sys.argv[5]
dot = how != "rows"
kinds = dict(
    words="*i32", shorts="*i16", halves="*fp16", octets="*u8", dense="*bf16", singles="*fp32", table="*i64",
    grids="*fp32", x="*" + dtype, index="*i64", order="*i32", starts="*i32", out="*" + dtype, weights="*fp32",
)
single = dict(experts=1, slots=1, each=1) | (dict(rows=1) if shape == "one row" else {}) if how == "one" else {}


def compiled(function, kinds, **fixed):
    names = function.arg_names
    fixed = {name: value for name, value in (single | fixed).items() if name in names and name not in kinds}
    signature = {name: "constexpr" if name in fixed else kinds.get(name, "i32") for name in names}
    even = {*kinds, "rows", "inputs"} - {*fixed}
    aligned = {(at,): [["tt.divisibility", 16]] for at, name in enumerate(names) if name in even}
    constants = {(names.index(name),): value for name, value in fixed.items()}
    source = ASTSource(fn=function, signature=signature, constexprs=constants, attrs=aligned)
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4, "num_stages": 2})
    assert made.asm["cubin"]
    assert made.metadata.shared <= 227 * 1024
    return made.asm["ptx"]


code = compiled(
    programs.grouped, kinds, FIRST=0, SECOND=1 if how != "one" else -1, ACTIVATION="silu" if how != "one" else "",
    ROUTING=how, EXPERTS=128, WIDTHS=sum(1 << int(w) for w in widths), FINE=fine, TAIL=shape != "",
    DTYPE={"fp16": tl.float16, "bf16": tl.bfloat16}[dtype], DOT=dot, SPLITS=1, BLOCK_N=32, BLOCK_M=16 if dot else 1,
)
assert ("wgmma" in code or "mma.sync" in code) == dot, "tensor cores"
compiled(programs.sort_rows, kinds, BLOCK=64, EVERY=64)
compiled(programs.weighted_sum, kinds | {"rows": "*fp32"}, SPLITS=2, BLOCK=256)
"""
CASES = [("3+16", "bf16", "sorted", "whole groups", "tail"), ("4", "fp16", "one", "whole groups", "one row")]
LONG = [
    ("2+3+4", "fp16", "sorted", "whole groups", ""), ("1+8", "bf16", "sorted", "fine", "tail"),
    ("2+3+4", "bf16", "rows", "whole groups", ""), ("5+6+7", "fp16", "rows", "fine", "tail"),
]  # fmt: skip


@pytest.mark.parametrize("case", [*CASES, *(pytest.param(one, marks=pytest.mark.full) for one in LONG)], ids=" ".join)
def test_it_compiles_for_a_gpu_that_is_not_here(case: tuple[str, ...], tmp_path: object) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path)}
    found = subprocess.run([sys.executable, "-c", SCRIPT, *case], env=environment, capture_output=True, text=True)
    assert found.returncode == 0, found.stderr[-2000:]
