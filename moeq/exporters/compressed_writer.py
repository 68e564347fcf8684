"""compressed-tensors' pack-quantized tensors, all of one scheme.

N output rows, K inputs, G groups of inputs, b bits.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moeq.errors import PlanError
from moeq.exporters.exporter import Exporter
from moeq.exporters.foreign import Draft, WriteOptions, drafting
from moeq.exporters.packed_source import PackedSource
from moeq.numerics.layouts import row_words
from moeq.numerics.packed import PackedWeight, symmetric_bits

CONFIG_VERSION = "0.19.0"  # of the package whose config.json this is; 0.20.0 reads it
PARTS = ("weight_packed", "weight_scale", "weight_shape")


def linear_tensors(weight: PackedWeight) -> dict[str, Tensor]:
    """weight_packed int32 [N, ceil(K*b/32)], weight_scale [N, G] in the scales' own type, weight_shape int64 [2]."""
    rows = weight.codes.shape[-2]
    return {
        "weight_packed": row_words(weight.codes),
        "weight_scale": weight.scales.contiguous(),
        "weight_shape": torch.tensor([rows, weight.inputs]),
    }


def write_compressed(exporter: Exporter, source: PackedSource, directory: Path, options: WriteOptions) -> None:
    """Build a checkpoint; PlanError for what transformers would not load as it is meant."""
    for name in source.other_names():
        raise PlanError(
            "modules outside of the experts are loaded in full precision only",
            where=f"format {exporter.name}: {name}",
            do="run without `others`, or use the formats auto-round or gptq",
        )
    with drafting(exporter, source, directory, options) as draft:
        bits = common_width(source, draft.target.widths) if options.widen else None

        def tensors(name: str, matrix: PackedWeight | Tensor) -> dict[str, Tensor]:
            if isinstance(matrix, Tensor):
                raise _mixed(draft, name, "full precision", "packed experts")
            _check_equal(draft, name)
            return linear_tensors(matrix)

        for layer in source.layers:
            draft.write_experts(layer, draft.expert_keys(layer), PARTS, tensors, bits)
        draft.finish(_config(draft))


def common_width(source: PackedSource, widths: Sequence[int]) -> int:
    """The least of the widths of symmetric codes that holds every expert's; all experts are read for it."""
    least = max(
        symmetric_bits(matrix)
        for layer in source.layers
        for expert in range(layer.num_experts)
        for matrix in source.expert(layer, expert)[0].values()
        if isinstance(matrix, PackedWeight)
    )
    return min((width for width in widths if width >= least), default=least)


def _check_equal(draft: Draft, name: str) -> None:
    """PlanError where a matrix differs from the first in what one scheme says."""
    grid = draft.grids[name]
    first_name, first = next(iter(draft.grids.items()))
    if grid.bits != first.bits:
        raise _mixed(draft, name, f"{grid.bits} bits", f"{first.bits} bits of {first_name}")
    if grid.group_size != first.group_size:
        raise _mixed(draft, name, f"groups of {grid.group_size}", f"groups of {first.group_size} of {first_name}")


def _mixed(draft: Draft, name: str, what: str, other: str) -> PlanError:
    return PlanError(
        f"{what} beside {other}; transformers takes one scheme for all experts of the model",
        where=f"format {draft.exporter.name}: {name}",
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
            where=f"format {draft.exporter.name}",
            do="use another format",
        )
    return {
        "quant_method": draft.exporter.name,
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
