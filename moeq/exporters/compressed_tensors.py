"""For transformers with compressed-tensors (pack-quantized): one symmetric width and group size for all experts.

transformers takes one scheme for all experts whatever config.json says of each, and ignores zero points: other mixes
would load without an error and compute something else, so they are refused. With options.widen all codes go into the
least common width. N output rows, K inputs, b bits.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moeq.artifacts.targets import LOADED_BY, Grid
from moeq.errors import PlanError
from moeq.exporters.foreign import Draft, WriteOptions, card, drafting, layer_file
from moeq.exporters.packed_source import PackedSource
from moeq.numerics.layouts import row_words
from moeq.numerics.packed import PackedWeight, symmetric_bits

NAME = "compressed-tensors"
VERSION = "0.19.0"
PARTS = ("weight_packed", "weight_scale", "weight_shape")
LOADING = """from transformers import AutoModelForCausalLM  # pip install compressed-tensors
model = AutoModelForCausalLM.from_pretrained("THIS_DIRECTORY")"""


def linear_tensors(weight: PackedWeight) -> dict[str, Tensor]:
    """weight_packed int32 [N, ceil(K*b/32)], weight_scale [N, G] in the scales' own type, weight_shape int64 [2]."""
    rows = weight.codes.shape[-2]
    return {
        "weight_packed": row_words(weight.codes),
        "weight_scale": weight.scales.contiguous(),
        "weight_shape": torch.tensor([rows, weight.inputs]),
    }


def write(source: PackedSource, directory: Path, options: WriteOptions) -> None:
    """Build the checkpoint; PlanError for what transformers would not load as it is meant."""
    for name in source.other_names():
        raise PlanError(
            "modules outside of the experts are loaded in full precision only",
            where=f"format {NAME}: {name}",
            do="run without `others`, or use the formats auto-round or gptq",
        )
    with drafting(source, LOADED_BY[NAME], directory, options) as draft:
        bits = common_width(source) if options.widen else None
        first: tuple[str, Grid] | None = None
        for layer in source.layers:
            keys = draft.expert_keys(layer)
            stems = {which: key.removesuffix("weight") for which, key in keys.items()}
            names = [f"{stem}{part}" for stem in stems.values() for part in PARTS]
            with draft.file(layer_file(layer.index), names) as add:
                for expert in range(layer.num_experts):
                    for projection, matrix in source.expert(layer, expert)[0].items():
                        name = f"{layer.name}.{expert}.{projection}"
                        if isinstance(matrix, Tensor):
                            raise _mixed(name, "full precision", "packed experts")
                        weight = draft.loadable(name, matrix, bits)
                        first = first or (name, draft.grids[name])
                        _check_equal(name, draft.grids[name], *first)
                        for part, tensor in linear_tensors(weight).items():
                            add(f"{stems[expert, projection]}{part}", tensor)
        draft.finish(_config(draft), card(draft, f"transformers with compressed-tensors {VERSION}", LOADING))


def common_width(source: PackedSource) -> int:
    """The least width of symmetric codes that holds every expert's; all experts are read for it."""
    widths = LOADED_BY[NAME].widths
    least = max(
        symmetric_bits(matrix)
        for layer in source.layers
        for expert in range(layer.num_experts)
        for matrix in source.expert(layer, expert)[0].values()
        if isinstance(matrix, PackedWeight)
    )
    return min((width for width in widths if width >= least), default=least)


def _check_equal(name: str, grid: Grid, first_name: str, first: Grid) -> None:
    """PlanError where a matrix differs from the first in what one scheme says."""
    if grid.bits != first.bits:
        raise _mixed(name, f"{grid.bits} bits", f"{first.bits} bits of {first_name}")
    if grid.group_size != first.group_size:
        raise _mixed(name, f"groups of {grid.group_size}", f"groups of {first.group_size} of {first_name}")


def _mixed(name: str, found: str, other: str) -> PlanError:
    return PlanError(
        f"{found} beside {other}; transformers takes one scheme for all experts of the model",
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
            "experts are not below a module called experts", where=f"format {NAME}", do="use another format"
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
        "version": VERSION,
    }
