"""For llama.cpp: one file, model.gguf, with the experts of a layer stacked by projection, one type a stack.

config.json and the tokenizer's files lie beside it for `moeq verify` and transformers; llama.cpp reads model.gguf
alone.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from moeq.artifacts.targets import Grid, Target, loadable_grid, widest_of
from moeq.exporters.exporter import TRANSFORMERS, Exporter, ExportSizes, Loader, later
from moeq.folders import GGUF
from moeq.numerics.ggml_types import LENGTHS, NEAREST, NEAREST_BYTES, NEAREST_LENGTHS, RUNS, TYPES
from moeq_kernels.iq_types import stored_bits
from moeq_kernels.widths import FULL

VERSION = "0.19.0"
FILE = GGUF
STACKS = {"gate_proj": "ffn_gate_exps", "up_proj": "ffn_up_exps", "down_proj": "ffn_down_exps"}
REFIT = "llama.cpp-refit"
ERRORS = "moeq.refit."  # before a tensor's name: a key of the relative error that rounding its scales made, by expert
FAMILIES = (  # as gguf_known has them
    "mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "deepseek_v3", "glm4_moe", "ernie4_5_moe", "gpt_oss", "qwen3_next",
    "minimax_m2", "dots1", "hunyuan_v1_moe", "qwen3_5_moe_text", "lfm2_moe", "granitemoe", "granitemoeshared",
    "deepseek_v2", "glm4_moe_lite", "solar_open", "hy_v3", "exaone_moe", "afmoe", "mellum", "laguna",
    "granitemoehybrid", "nemotron_h", "mimo_v2_flash", "mistral4", "cohere2_moe", "qwen3_5_moe", "qwen3_vl_moe",
    "gemma4", "gemma4_text", "llama4", "llama4_text",
)  # fmt: skip
LLAMA_CPP = Loader(
    name="llama.cpp",
    packages={"llama_cpp": "pip install llama-cpp-python"},
    load="llama_logits",
    logits_only=True,
    rounding=0.05,
)


def loader_of(source: Any) -> Loader:
    """transformers where it knows the family and gguf all types, which shows every layer."""
    return TRANSFORMERS if source.by_transformers else LLAMA_CPP


def size(sizes: ExportSizes) -> int:
    """Of what no type holds, which is refused, in full precision."""
    target = next((one for one in EXPORTER.targets if one.name == sizes.target), EXPORTER.targets[0])
    bits = (weights * _stack_bits(target, grids, full, sizes.widen) for weights, grids, full in sizes.stacks)
    return sizes.rest + sizes.packed + sum(int(stack / 8) for stack in bits)


def _stack_bits(target: Target, grids: tuple[Grid, ...], full: bool, widen: bool) -> float:
    """Bits a weight of one matrix of a layer's experts, scales included."""
    if not grids or full:
        return FULL
    bits, symmetric = grids[0].bits, grids[0].symmetric
    if grids[0].codebook:
        return stored_bits(bits, grids[0].codebook)
    if len(grids) > 1:
        bits, symmetric = widest_of(target, grids) or FULL, True
    elif widen:
        wide = loadable_grid(target, grids[0])
        bits, symmetric = wide.bits, wide.symmetric
    held = NEAREST.get((bits, symmetric))
    return FULL if held is None else 8 * TYPES[held].bytes / TYPES[held].length


EXPORTER = Exporter(
    name="gguf",
    label="GGUF",
    help="one file for llama.cpp and what is built on it",
    write=later("moeq.exporters.gguf_writer:write"),
    check=later("moeq.exporters.gguf_writer:check"),
    refuse_other=later("moeq.exporters.gguf_writer:refuse_other"),
    runtime=f"llama.cpp, with gguf {VERSION}",
    snippet=f"""from llama_cpp import Llama  # pip install llama-cpp-python, or llama-cli -m {FILE}
model = Llama("THIS_DIRECTORY/{FILE}")""",
    library="gguf",
    targets=(
        Target(
            name="llama.cpp",
            widths=(1, 2, 3, 4, 5, 6, 8, FULL),
            granularity="layer",
            reads="one type a stack of a layer's experts: 4, 5, 8 bits symmetric in groups of 32 and more, 1 bit of "
            "128, 2, 3, 6 bits and zero points of 4, 5 bits of 256 (numerics.ggml_types); i-quants (iq_types)",
            short_groups=True,
            stacks=True,
            blocks=LENGTHS,
            block_bytes=NEAREST_BYTES,
            rounded=REFIT,
            codes=("iq", "grid"),
            proof=f"tests/exporters/test_gguf.py, test_gguf_iq.py, gguf {VERSION}, transformers 5.23, "
            "llama-cpp-python 0.3.36",
        ),
        Target(
            name=REFIT,
            widths=(1, 2, 3, 4, 5, 6, 8, FULL),
            granularity="layer",
            reads="as llama.cpp; of groups shorter than the 256 of a block (16 and more of 2, 3 and 6 bits, 32 and "
            "more of 4, 5 and 8) the scales, and zero points of 3, 6 and 8 bits, are rounded to what the type has "
            "(numerics.ggml_refit)",
            short_groups=True,
            stacks=True,
            blocks=NEAREST_LENGTHS,
            block_bytes=NEAREST_BYTES,
            runs=RUNS,
            codes=("grid", "iq"),
            called=f"llama.cpp, scales rounded to its blocks, with gguf {VERSION}",
            proof=f"tests/exporters/test_gguf_refit.py, gguf {VERSION}, llama-cpp-python 0.3.36",
        ),
    ),
    size=size,
    families=FAMILIES,
    file=FILE,
    opened=later("moeq.exporters.readers.gguf:opened"),
    described=later("moeq.exporters.readers.described:gguf"),
    loaders=(TRANSFORMERS, LLAMA_CPP, replace(LLAMA_CPP, name=REFIT)),
    loader_of=loader_of,
    needs={"gguf": f"pip install gguf=={VERSION}"},
    loading={"gguf_file": FILE},
)
