"""For gptqmodel: AutoGPTQ's layout with `dynamic`, a rule for every width beside the common one.

Symmetric grids are written in the first format (checkpoint_format gptq); grids with zero points in the second
(gptq_v2), which stores them as they are: in the first a zero point of 0 carries into its neighbour when it is loaded.
Tensors are called as they are in memory, since gptqmodel does not rename them. It rounds scales to the type that the
model is loaded in: float16 keeps them.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from moeq.artifacts.targets import LOADED_BY
from moeq.exporters.foreign import Draft, WriteOptions, card, drafting
from moeq.exporters.gptq_layout import Layout, beside, common_grid, in_one_of, left_patterns, write_linears
from moeq.exporters.packed_source import PackedSource

NAME = "gptq"
VERSION = "7.6.0"
FIRST, SECOND = "gptq", "gptq_v2"
LOADING = """import torch
from gptqmodel import GPTQModel  # pip install gptqmodel
model = GPTQModel.load("THIS_DIRECTORY", dtype=torch.float16)  # bfloat16 would round the scales"""


def write(source: PackedSource, directory: Path, options: WriteOptions) -> None:
    """Build the checkpoint; PlanError for what gptqmodel would not load as it is meant."""
    in_one_of(partial(_write, source, directory, options), FIRST, SECOND)


def _write(source: PackedSource, directory: Path, options: WriteOptions, version: str) -> None:
    with drafting(source, LOADED_BY[NAME], directory, options) as draft:
        write_linears(draft, Layout(less_one=version == FIRST, ordered=True, key_of=str))
        renamed = {key: draft.names.in_memory(key) for key in source.rest()}
        draft.finish(_config(draft, version), card(draft, f"gptqmodel {VERSION}", LOADING), renamed)


def _config(draft: Draft, version: str) -> dict[str, Any]:
    common = common_grid(draft.grids)
    dynamic: dict[str, Any] = {f"-:{pattern}": {} for pattern in left_patterns(draft)}
    for bits, group_size, names in beside(draft, common):
        dynamic |= {f"+:{pattern}": {"bits": bits, "group_size": group_size} for pattern in names}
    return {
        "quant_method": "gptq",
        "checkpoint_format": version,
        "bits": common.bits,
        "group_size": common.group_size,
        "sym": version == FIRST,
        "desc_act": False,
        "lm_head": False,
        "dynamic": dynamic,
    }
