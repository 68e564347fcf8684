"""For vLLM and SGLang on a GPU, whose humming kernels have every width: a width for each layer, symmetric grids.

`dynamic` of quantization_config says what differs from the common grid, the narrowest, and what is not packed, by
patterns that the runtimes look up with the name of a layer's fused experts. Keys are those that mean weights alone:
what is called `dtype` or `group_size` would be read as the activations' too. Scales are loaded in the type that the
model runs in: float16 keeps them, bfloat16 rounds them.

Not here, for vLLM 0.32 loads neither: 1 bit, which its list of humming's types lacks (and whose two values are -s and
0, not -s and s), and zero points of experts, which its loader of weights refuses.
N output rows, K inputs, G groups of inputs, b bits.
"""

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from moeq.artifacts.targets import Grid, Target
from moeq.exporters.exporter import SGLANG, VLLM, Exporter, later
from moeq_kernels.widths import FULL

if TYPE_CHECKING:
    from torch import Tensor

    from moeq.exporters.foreign import Draft
    from moeq_kernels.packed import PackedWeight

NAME, VERSION = "humming", "0.1.19"
PARTS = ("weight", "weight_scale")
BESIDE = r"-:^(?!.*\.experts(\.|$))"  # every module that is not below one called experts
BELOW = r"(\..*)?$"  # the fused experts themselves, and each of them
PACKAGES = {"vllm": "pip install vllm", "humming": f"pip install 'humming-kernels[cu13]=={VERSION}'"}
UNUSED = Grid(rows=0, inputs=0, bits=4, group_size=128, symmetric=True)  # where all layers are in full precision
LOADER = replace(VLLM, name=NAME, packages=PACKAGES, environment={})


def write(draft: Draft) -> None:
    """FormatError for what the runtime would not load as it is meant."""
    from moeq.exporters.schemes import Scheme, common_width, refuse_others

    refuse_others(draft)
    for layer in draft.source.layers:
        bits = common_width(draft, [layer]) if draft.options.widen else None
        tensors = partial(Scheme(draft).tensors, linear_tensors)
        draft.write_experts(layer, draft.expert_keys(layer), PARTS, tensors, bits)
    draft.finish(_config(draft))


def linear_tensors(weight: PackedWeight) -> dict[str, Tensor]:
    """weight int32 [N, K*b/32], a row's codes as one little-endian bit stream; weight_scale [N, G], in its own type."""
    from moeq.numerics.layouts import row_words

    return {"weight": row_words(weight.codes), "weight_scale": weight.scales.contiguous()}


def _config(draft: Draft) -> dict[str, Any]:
    """quantization_config: the narrowest grid as the common one, and rules for the other layers."""
    from moeq.exporters.schemes import grids_by_layer

    layers = grids_by_layer(draft)
    packed = [grid for _, grid in layers if grid is not None] or [UNUSED]
    common = _grid(min(packed, key=lambda grid: (grid.bits, -grid.group_size)))
    rules: dict[str, dict[str, Any]] = {BESIDE: {}}
    for stem, grid in layers:
        pattern = f":.*{re.escape(stem)}{BELOW}"
        if grid is None:
            rules[f"-{pattern}"] = {}
        elif _grid(grid) != common:
            rules[f"+{pattern}"] = _grid(grid)
    return {"quant_method": NAME, **common, "dynamic": rules}


def _grid(grid: Grid) -> dict[str, Any]:
    """A grid in humming's words; a group of 0 is the whole row."""
    return {"b_dtype": f"uint{grid.bits}", "weight_scale_group_size": max(grid.group_size, 0)}


EXPORTER = Exporter(
    name=NAME,
    label=NAME,
    help="symmetric grids, one width of 2 to 8 bits for all experts of a layer, in humming's layout",
    write=write,
    check=later("moeq.exporters.foreign:check_experts"),
    runtime=f"vLLM on a GPU with humming-kernels {VERSION}",
    snippet="""from vllm import LLM  # pip install vllm 'humming-kernels[cu13]', or [cu12]
model = LLM("THIS_DIRECTORY", dtype="float16")  # bfloat16 would round the scales""",
    targets=(
        Target(
            name=NAME,
            widths=(2, 3, 4, 5, 6, 7, 8, FULL),
            granularity="layer",
            symmetric_only=True,
            groups=(32, 64, 128),
            others=False,
            reads="quant_method humming, a dynamic rule a layer; no zero points of experts, and no 1 bit",
            multiple=32,
            proof="loaded by vLLM 0.32, kernels not run",
        ),
    ),
    separate=True,
    layout=later("moeq.exporters.readers.humming:Humming"),
    loaders=(LOADER, SGLANG),
)
