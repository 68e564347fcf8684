"""The programs compile for a Hopper GPU, machine code and all: Triton brings the assembler, a GPU is not needed."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
from fork_server import ForkServer, shared

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
DISASSEMBLER = """
import re
import subprocess
import tempfile
from pathlib import Path
import triton.backends.nvidia


def instructions(made):
    '''Of a thread in the loop with the products of tensor cores, the innermost one.'''
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(made.asm["cubin"])
        file.flush()
        disassembler = Path(triton.backends.nvidia.__file__).parent / "bin" / "nvdisasm"
        text = subprocess.run([disassembler, "-c", file.name], capture_output=True, text=True, check=True).stdout
    labels, found, lengths = {}, [], []
    for line in text.splitlines():
        if label := re.match(r"(\\.L_x_\\d+):", line.strip()):
            labels[label[1]] = len(found)
        elif one := re.search(r"/\\*[0-9a-f]{4,}\\*/ +(.*?);", line):
            found.append(one[1])
            back = re.search(r"BRA.*(\\.L_x_\\d+)", one[1])
            if back and back[1] in labels:
                some = found[labels[back[1]] :]
                if any("MMA" in each for each in some):
                    lengths.append(len(some))
    return min(lengths)
"""
SCRIPT = """
import sys
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from moeq_kernels.gpu import programs, sums
from moeq_kernels.gpu.strips import kind_of

widths, dtype, how, step, shape = sys.argv[1].split("+"), sys.argv[2], sys.argv[3], int(sys.argv[4]), sys.argv[5]
kinds = dict(
    words="*i32", shorts="*i16", halves="*fp16", dense="*bf16", singles="*fp32", table="*i64", grids="*fp32",
    x="*" + dtype, index="*i64", order="*i32", starts="*i32", costs="*i32", out="*" + dtype, weights="*fp32",
    which="*i32",
)
single = dict(experts=1, slots=1, each=1) | (dict(rows=1) if shape == "one row" else {}) if how == "one" else {}
BLOCK_N, BLOCK_M, WARPS = 64, 16 if how == "sorted" else 8, 2
if "parts" in shape:
    BLOCK_N, WARPS = 32, int(shape[0])
TAIL, STAGES = shape in ("tail", "deep tail"), 6 if shape == "deep tail" else 3


def compiled(function, kinds, **fixed):
    names = function.arg_names
    fixed = {name: value for name, value in (single | fixed).items() if name in names and name not in kinds}
    signature = {name: "constexpr" if name in fixed else kinds.get(name, "i32") for name in names}
    even = {*kinds, "rows", "inputs", "x_step"} - {*fixed}
    aligned = {(at,): [["tt.divisibility", 16]] for at, name in enumerate(names) if name in even}
    constants = {(names.index(name),): value for name, value in fixed.items()}
    source = ASTSource(fn=function, signature=signature, constexprs=constants, attrs=aligned)
    options = {"num_warps": WARPS, "num_stages": STAGES}
    made = triton.compile(source, target=GPUTarget("cuda", int(sys.argv[6]), 32), options=options)
    assert made.asm["cubin"]
    assert made.metadata.shared <= 164 * 1024
    return made


common = dict(
    WIDTHS=sum(1 << (kind_of(int(w[1:])) if w[0] in "tcm" else int(w)) for w in widths), NESTED=shape == "nested",
    AHEAD=True, VALUES={"c": -1, "m": 0}.get(widths[0][0], 8),  # c2: trellis codes of 2 bits, values computed; t2: near
    FRAGMENTS=True, ASM=True, BLOCK_N=BLOCK_N,
    DTYPE={"fp16": tl.float16, "bf16": tl.bfloat16, "fp32": tl.float32}[dtype],
)
PARTS = int(shape[0]) if "parts" in shape else 1
made = compiled(
    programs.grouped, kinds, FIRST=0, SECOND=1 if shape == "tail" else -1, ACTIVATION="silu" if shape == "tail" else "",
    ROUTING=how, OWNERS=128, STEP=step, TAIL=TAIL, PERSISTENT=shape == "persistent", BLOCK_M=BLOCK_M,
    TILES=2 if shape == "steps" else 1, PARTS=PARTS,
    **common,
)
assert dtype == "fp32" or "wgmma" in made.asm["ptx"] or "mma.sync" in made.asm["ptx"], "tensor cores"
if shape.endswith("count"):
    print(instructions(made) * 32 * WARPS / (BLOCK_N * 128 * PARTS))
else:
    compiled(sums.sort_rows, kinds, BLOCK=64, EVERY=64)
    compiled(sums.weighted_sum, kinds | {"rows": "*fp32"}, BLOCK=256)
    compiled(programs.unpack, kinds, SLOT=0, STEP=step, TAIL=TAIL, **common)
"""
VERSIONS = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from moeq_kernels.gpu import version_programs

kinds = dict(
    high="*i32", low="*i32", wide="*i32", index="*i64", weights="*bf16", held="*fp32", share="fp32", kept="fp32",
    gain="fp32",
)
for name, fixed in dict(
    join_planes=dict(BLOCK=1024), part_planes=dict(BLOCK=1024), add_choices=dict(BLOCK=16, EVERY=128)
).items():
    function = getattr(version_programs, name)
    signature = {one: "constexpr" if one in fixed else kinds.get(one, "i32") for one in function.arg_names}
    constants = {(function.arg_names.index(one),): value for one, value in fixed.items()}
    source = ASTSource(fn=function, signature=signature, constexprs=constants)
    print(name, len(triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["cubin"]))
"""
ACTIVATED = """
import re
import sys
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from moeq_kernels.gpu.codes import activated


@triton.jit
def alone(given, out, NAME: tl.constexpr):
    at = tl.arange(0, 32)
    tl.store(out + at, activated(tl.load(given + at), NAME))


signature = dict(given="*fp32", out="*fp32", NAME="constexpr")
source = ASTSource(fn=alone, signature=signature, constexprs={(2,): sys.argv[1]})
print(*re.findall(r"(?:max|min)\\S*f32", triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["ptx"]))
"""
WALKS = """
import sys
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from moeq.numerics import device_walks

function, states, bits = device_walks._walk, 1 << int(sys.argv[1]), int(sys.argv[2])
kinds = dict(
    tiles="*fp32", roots="*fp32", table="*fp32", back="*i32", codes="*u8", nearest="*fp32", first="i32", each="i32"
)
fixed = dict(
    K=bits, W=1 << bits, M=states >> 2 * bits, IN_WORD=32 >> (bits - 1).bit_length(), STEPS=256, SEAM=64, FAR=1e30
)
names = function.arg_names
constants = {(names.index(name),): value for name, value in fixed.items()}
even = [name for name, kind in kinds.items() if kind[0] == "*" and name != "table"]  # as it is launched
aligned = {(names.index(name),): [["tt.divisibility", 16]] for name in even}
source = ASTSource(
    fn=function, signature={name: kinds.get(name, "constexpr") for name in names}, constexprs=constants, attrs=aligned
)
options = {"num_warps": device_walks.warps(states, bits)}
made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
print(len(made.asm["cubin"]), made.metadata.shared)
"""
CASES = [  # the assembler works for a minute or two on each of the others
    ("4", "fp16", "one", "128", "one row", "80"), ("4", "fp32", "rows", "128", "deep tail", "90"),
]  # fmt: skip
LONG = [
    ("3+16", "bf16", "sorted", "128", "tail", "90"), ("t3+t8+4", "bf16", "sorted", "128", "tail", "90"),
    ("2+3+4", "fp16", "sorted", "128", "persistent", "90"), ("1+8", "bf16", "sorted", "0", "tail", "90"),
    ("t1+t2+t4", "fp16", "sorted", "128", "persistent", "90"), ("c1+c2+c3+c4", "bf16", "rows", "0", "tail", "80"),
    ("2+3+4", "bf16", "rows", "32", "nested", "90"), ("5+6+7", "fp16", "rows", "64", "tail", "80"),
    ("2+4", "bf16", "rows", "128", "steps", "90"), ("2+t2+16", "bf16", "rows", "128", "4 parts", "90"),
]  # fmt: skip
MOST = {
    "1": 3.2,
    "2": 3.0,
    "3": 3.4,
    "4": 3.1,
    "t2": 4.0,
    "t4": 4.4,
    "m2": 7.0,
    "c2": 8.0,
}  # instructions of a thread for each code


@pytest.fixture(scope="module")
def server() -> ForkServer:
    """A process that has imported Triton without the interpreter, and forks for every case."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("TRITON_INTERPRET", raising=False)
        return shared("triton.backends.compiler", "triton.compiler", "moeq_kernels.gpu.programs")


def compiled(case: tuple[str, ...], server: ForkServer, folder: Path, script: str = DISASSEMBLER + SCRIPT) -> str:
    """What the script prints of a case in a process without the interpreter."""
    program = folder / "compiles.py"
    program.write_text(script)
    running = server.start(*case, program=program, env={"TRITON_CACHE_DIR": str(folder / "cache")})
    found = running.wait(deadline=600)  # the assembler works for long
    assert found.code == 0, found.stderr[-2000:]
    return found.stdout


@pytest.mark.cases(0)
@pytest.mark.parametrize("case", [*CASES, *(pytest.param(one, marks=pytest.mark.full) for one in LONG)], ids=" ".join)
def test_it_compiles_for_a_gpu_that_is_not_here(case: tuple[str, ...], server: ForkServer, tmp_path: Path) -> None:
    compiled(case, server, tmp_path)


@pytest.mark.cases(0)
def test_the_programs_of_versions_compile_too(server: ForkServer, tmp_path: Path) -> None:
    found = compiled((), server, tmp_path, VERSIONS).split()
    assert found[::2] == ["join_planes", "part_planes", "add_choices"]
    assert all(int(size) > 0 for size in found[1::2])


@pytest.mark.cases(1)
@pytest.mark.parametrize("name", ["relu", "relu2"])
def test_what_is_no_number_stays_so(name: str, server: ForkServer, tmp_path: Path) -> None:
    """A GPU's max.f32, and min.f32, leave it out."""
    assert compiled((name,), server, tmp_path, ACTIVATED).split() == []


@pytest.mark.cases(1)
@pytest.mark.parametrize("shape", ["count", "4 parts count"])
@pytest.mark.parametrize("bits", MOST)
def test_few_instructions_a_code(bits: str, shape: str, server: ForkServer, tmp_path: Path) -> None:
    """In the machine code of the decode form: at 60 % of an H200's memory 2 bits leave room for three, 4 for six.

    No more where four parts of the inputs have a warp each. Trellis codes take more: two columns' values from shared
    memory take three, five of a look-up in memory are its address and itself, seven of a computed value are arithmetic.
    """
    assert float(compiled((bits, "bf16", "rows", "128", shape, "90"), server, tmp_path)) <= MOST[bits]


@pytest.mark.cases(0)
@pytest.mark.parametrize("case", [("8", "4"), ("10", "3"), ("12", "2"), ("14", "1"), ("14", "7")], ids=" ".join)
def test_the_walks_of_trellis_codes_compile_too(case: tuple[str, ...], server: ForkServer, tmp_path: Path) -> None:
    size, shared_bytes = map(int, compiled(case, server, tmp_path, WALKS).split())
    assert size > 0
    assert shared_bytes <= 8 << (int(case[0]) - int(case[1]))  # a cost and a word of each p: what a step exchanges
