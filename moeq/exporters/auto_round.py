"""For auto-round: transformers loads it where the package auto-round is installed.

GPTQ's layout, `extra_config` for every width beside the common one and for matrices in full precision. Symmetric grids
are packed as `auto_round:auto_gptq`, which most kernels read; grids with zero points as `auto_round`, which stores them
as they are: the first stores them less one and its kernels give a zero point of 0 back as 2**b.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from moeq.artifacts.targets import LOADED_BY
from moeq.exporters.foreign import Draft, WriteOptions, card, drafting
from moeq.exporters.gptq_layout import Layout, beside, blocks, common_grid, in_one_of, left_patterns, write_linears
from moeq.exporters.packed_source import PackedSource

NAME = "auto-round"
VERSION = "0.16.1"
FIRST, SECOND = "auto_round:auto_gptq", "auto_round"
FULL = {"bits": 16, "data_type": "float"}
LOADING = """import auto_round  # pip install auto-round
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained("THIS_DIRECTORY")"""


def write(source: PackedSource, directory: Path, options: WriteOptions) -> None:
    """Build the checkpoint; PlanError for what auto-round would not load as it is meant."""
    in_one_of(partial(_write, source, directory, options), FIRST, SECOND)


def _write(source: PackedSource, directory: Path, options: WriteOptions, packing: str) -> None:
    with drafting(source, LOADED_BY[NAME], directory, options) as draft:
        write_linears(draft, Layout(less_one=packing == FIRST, ordered=False, key_of=draft.names.renamed))
        draft.finish(_config(draft, packing), card(draft, f"auto-round {VERSION}", LOADING))


def _config(draft: Draft, packing: str) -> dict[str, Any]:
    common = common_grid(draft.grids)
    symmetric = packing == FIRST
    extra: dict[str, Any] = dict.fromkeys(left_patterns(draft), FULL)
    for bits, group_size, names in beside(draft, common):
        rule = {"bits": bits, "group_size": group_size, "sym": symmetric}
        extra |= dict.fromkeys(names, rule)
    return {
        "quant_method": "auto-round",
        "packing_format": packing,
        "autoround_version": VERSION,
        "bits": common.bits,
        "group_size": common.group_size,
        "sym": symmetric,
        "data_type": "int",
        "block_name_to_quantize": ",".join(blocks(draft)),
        "extra_config": extra,
    }
