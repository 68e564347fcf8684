"""For transformers with compressed-tensors (pack-quantized): one symmetric width and group size for all experts.

transformers takes one scheme for all experts whatever config.json says of each, and ignores zero points: other mixes
would load without an error and compute something else, so they are refused. With options.widen all codes go into the
least common width. It multiplies codes by scales in the scales' own type: values are rounded to float16, and what lies
beyond its largest number is refused. vLLM reads the format too, and takes a scheme a layer.
N output rows, K inputs, G groups of inputs, b bits.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from moeq.artifacts.targets import ANY_GRID, Target
from moeq.errors import PlanError
from moeq.exporters.exporter import TRANSFORMERS, Exporter, later
from moeq.numerics.widths import FULL

if TYPE_CHECKING:
    from torch import Tensor

    from moeq.exporters.foreign import Draft
    from moeq.exporters.packed_source import PackedSource
    from moeq.numerics.packed import PackedWeight

NAME, VERSION = "compressed-tensors", "0.20.0"
CONFIG_VERSION = "0.19.0"  # of the package whose config.json this is; 0.20.0 reads it
PARTS = ("weight_packed", "weight_scale", "weight_shape")


def write(draft: Draft) -> None:
    """PlanError for what transformers would not load as it is meant."""
    from torch import Tensor

    for name in draft.source.other_names():
        raise PlanError(
            "modules outside of the experts are loaded in full precision only",
            where=f"format {NAME}: {name}",
            do="run without `others`, or use the formats auto-round or gptq",
        )
    bits = common_width(draft.source) if draft.options.widen else None

    def tensors(name: str, matrix: PackedWeight | Tensor) -> dict[str, Tensor]:
        if isinstance(matrix, Tensor):
            raise _mixed(name, "full precision", "packed experts")
        _check_equal(draft, name)
        if _overflows(matrix):
            raise PlanError(
                "values beyond float16, in which transformers multiplies codes by scales",
                where=f"format {NAME}: {name}",
                do=ANY_GRID,
            )
        return linear_tensors(matrix)

    for layer in draft.source.layers:
        draft.write_experts(layer, draft.expert_keys(layer), PARTS, tensors, bits)
    draft.finish(_config(draft))


def linear_tensors(weight: PackedWeight) -> dict[str, Tensor]:
    """weight_packed int32 [N, ceil(K*b/32)], weight_scale [N, G] in the scales' own type, weight_shape int64 [2]."""
    import torch

    from moeq.numerics.layouts import row_words

    rows = weight.codes.shape[-2]
    return {
        "weight_packed": row_words(weight.codes),
        "weight_scale": weight.scales.contiguous(),
        "weight_shape": torch.tensor([rows, weight.inputs]),
    }


def common_width(source: PackedSource) -> int:
    """The least width of symmetric codes that holds every expert's; all experts are read for it."""
    from moeq.numerics.packed import PackedWeight, symmetric_bits

    least = max(
        symmetric_bits(matrix)
        for layer in source.layers
        for expert in range(layer.num_experts)
        for matrix in source.expert(layer, expert)[0].values()
        if isinstance(matrix, PackedWeight)
    )
    return min((width for width in EXPORTER.targets[0].widths if width >= least), default=least)


def _check_equal(draft: Draft, name: str) -> None:
    """PlanError where a matrix differs from the first in what one scheme says."""
    grid = draft.grids[name]
    first_name, first = next(iter(draft.grids.items()))
    if grid.bits != first.bits:
        raise _mixed(name, f"{grid.bits} bits", f"{first.bits} bits of {first_name}")
    if grid.group_size != first.group_size:
        raise _mixed(name, f"groups of {grid.group_size}", f"groups of {first.group_size} of {first_name}")


def _overflows(weight: PackedWeight) -> bool:
    """Whether codes times float16 scales are infinite in float16."""
    import torch

    largest = torch.finfo(torch.float16).max
    near = bool((weight.scales.float() * 2 ** (weight.bits - 1) > largest).any())
    return near and weight.scales.dtype == torch.float16 and bool((weight.dequantize().abs() > largest).any())


def _mixed(name: str, what: str, other: str) -> PlanError:
    return PlanError(
        f"{what} beside {other}; transformers takes one scheme for all experts of the model",
        where=f"format {NAME}: {name}",
        do="assign one width (assign.target: transformers), or store all codes in one wider grid "
        "(export.widen: true, --widen)",
    )


def _config(draft: Draft) -> dict[str, Any]:
    grid = next(iter(draft.grids.values()))
    whole = grid.group_size == -1
    weights = {
        "num_bits": grid.bits,
        "type": "int",
        "symmetric": True,
        "strategy": "channel" if whole else "group",
        "group_size": None if whole else grid.group_size,
        "dynamic": False,
    }
    stems = {key.removesuffix(".weight_packed") for key in draft.where if key.endswith("_packed")}
    leaves = sorted({stem.rpartition(".")[2] for stem in stems})
    target = rf"re:.*\.experts\.\d+\.({'|'.join(re.escape(leaf) for leaf in leaves)})$"
    if any("experts" not in stem for stem in stems):
        raise PlanError(
            "experts are not below a module called experts",
            where=f"format {NAME}",
            do="use another format",
        )
    return {
        "quant_method": NAME,
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {
            "group_0": {
                "targets": [target],
                "weights": weights,
                "input_activations": None,
                "output_activations": None,
                "format": "pack-quantized",
            }
        },
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
        "version": CONFIG_VERSION,
    }


EXPORTER = Exporter(
    name=NAME,
    label="compressed-tensors (pack-quantized)",
    help="one symmetric width for all experts, for transformers itself and vLLM",
    write=write,
    runtime=f"transformers with compressed-tensors {VERSION}",
    snippet="""from transformers import AutoModelForCausalLM  # pip install compressed-tensors
model = AutoModelForCausalLM.from_pretrained("THIS_DIRECTORY")""",
    targets=(
        Target(
            name="transformers",
            widths=(2, 3, 4, 5, 6, 7, 8),
            granularity="model",
            symmetric_only=True,
            reads="compressed-tensors without a peer's package: one scheme for all experts, zero points are ignored",
            proof=f"tests/exporters/test_peers.py, compressed-tensors {VERSION}",
        ),
        Target(
            name="vllm",
            widths=(2, 4, 8, FULL),
            granularity="layer",
            reads="the scheme of expert 0 is taken for its whole fused layer",
            multiple=32,
            proof="read in its source, not loaded",
        ),
    ),
    separate=True,
    layout=later("moeq.exporters.readers.compressed:CompressedTensors"),
    loaders=(TRANSFORMERS,),
    needs={"compressed_tensors": "pip install compressed-tensors"},
)
