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
from moeq.kernels.gpu.programs import grouped

widths, dtype, how, fine, tail = sys.argv[1].split("+"), sys.argv[2], sys.argv[3], sys.argv[4] == "fine", sys.argv[5]
dot = how != "rows"
fixed = dict(
    FIRST=0, SECOND=1, ACTIVATION="silu", ROUTING=how, EXPERTS=128, WIDTHS=sum(1 << int(w) for w in widths), FINE=fine,
    TAIL=tail == "tail", DTYPE={"fp16": tl.float16, "bf16": tl.bfloat16}[dtype], DOT=dot, SPLITS=1, BLOCK_N=32,
    BLOCK_M=16 if dot else 1,
)
kinds = dict(
    words="*i32", shorts="*i16", halves="*fp16", octets="*u8", dense="*bf16", singles="*fp32", table="*i64",
    grids="*fp32", x="*" + dtype, index="*i64", order="*i32", starts="*i32", out="*" + dtype,
)
names = grouped.arg_names
signature = {name: "constexpr" if name in fixed else kinds.get(name, "i32") for name in names}
even = {*kinds, "rows", "inputs"}
aligned = {(place,): [["tt.divisibility", 16]] for place, name in enumerate(names) if name in even}
source = ASTSource(
    fn=grouped, signature=signature, constexprs={(names.index(name),): value for name, value in fixed.items()},
    attrs=aligned,
)
made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4, "num_stages": 2})
assert made.asm["cubin"]
assert made.metadata.shared <= 227 * 1024
assert ("wgmma" in made.asm["ptx"] or "mma.sync" in made.asm["ptx"]) == dot, "tensor cores"
"""
CASES = [("3+16", "bf16", "sorted", "whole groups", "tail")]
LONG = [
    ("2+3+4", "fp16", "sorted", "whole groups", ""), ("1+8", "bf16", "one", "fine", "tail"),
    ("2+3+4", "bf16", "rows", "whole groups", ""), ("5+6+7", "fp16", "rows", "fine", "tail"),
]  # fmt: skip


@pytest.mark.parametrize("case", [*CASES, *(pytest.param(one, marks=pytest.mark.full) for one in LONG)], ids=" ".join)
def test_it_compiles_for_a_gpu_that_is_not_here(case: tuple[str, ...], tmp_path: object) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path)}
    found = subprocess.run([sys.executable, "-c", SCRIPT, *case], env=environment, capture_output=True, text=True)
    assert found.returncode == 0, found.stderr[-2000:]
