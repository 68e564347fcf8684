"""For auto-round: transformers loads it where the package auto-round is installed.

GPTQ's layout, `extra_config` for every width beside the common one and for matrices in full precision. Symmetric grids
are packed as `auto_round:auto_gptq`, which most kernels read; grids with zero points as `auto_round`, which stores them
as they are: the first stores them less one and its kernels give a zero point of 0 back as 2**b.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from moeq.artifacts.targets import Target
from moeq.exporters.exporter import TRANSFORMERS, Exporter, Loader, as_autogptq, later
from moeq_kernels.widths import FULL

if TYPE_CHECKING:
    from moeq.exporters.foreign import Draft
    from moeq.exporters.gptq_layout import Modules

VERSION = "0.16.1"
PLAIN = {"bits": FULL, "data_type": "float"}
ON_DISK = {"w1", "w2", "w3"}  # Mixtral's names of matrices, as older versions left them


def write(draft: Draft) -> None:
    """FormatError for what auto-round would not load as it is meant."""
    from moeq.exporters.foreign import check_whole
    from moeq.exporters.gptq_layout import write_gptq

    check_whole(draft.source.source, draft.model)
    write_gptq(draft, configuration)


def configuration(modules: Modules) -> dict[str, Any]:
    """quantization_config: the common grid, and patterns of what differs."""
    extra: dict[str, Any] = dict.fromkeys(modules.plain, PLAIN)
    for bits, group_size, patterns in modules.others:
        rule = {"bits": bits, "group_size": group_size, "sym": modules.first}
        extra |= dict.fromkeys(patterns, rule)
    return {
        "quant_method": "auto-round",
        "packing_format": "auto_round:auto_gptq" if modules.first else "auto_round",
        "autoround_version": VERSION,
        "bits": modules.bits,
        "group_size": modules.group_size,
        "sym": modules.first,
        "data_type": "int",
        "block_name_to_quantize": ",".join(modules.blocks),
        "extra_config": extra,
    }


def misread(packed: Any) -> str | None:
    """What of a checkpoint, which another tool may have written, auto-round fails at or computes otherwise; all of it
    was run."""
    from moeq.models.declared import quantization_of
    from moeq.models.support import TURNS, gate_and_up_in_turns, matrices_one_by_one

    declared = quantization_of(packed.source.config)
    kind = str(declared.get("packing_format", "auto_round:auto_gptq")).partition(":")[2]
    if kind == "auto_awq":
        return "AWQ's layout, without gptqmodel beside it"
    if kind in ("auto_gptq", "gptq") and not declared.get("sym", True):
        return "zero points that are stored less one"
    if matrices_one_by_one(packed.source) & ON_DISK:
        return "experts that are called w1, w2 and w3"
    return TURNS if gate_and_up_in_turns(packed.source) else None


EXPORTER = Exporter(
    name="auto-round",
    label="auto-round",
    help="GPTQ's layout with a width for every matrix, with or without zero points",
    write=write,
    check=later("moeq.exporters.foreign:check_whole"),
    refuse_other=later("moeq.exporters.gptq_layout:refuse_table"),
    runtime=f"auto-round {VERSION}",
    snippet="""import auto_round  # pip install auto-round
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained("THIS_DIRECTORY")""",
    targets=(
        Target(
            name="auto-round",
            widths=(2, 3, 4, 5, 6, 7, 8, FULL),
            reads="extra_config, a pattern a layer and width; zero points as packing_format auto_round has them",
            multiple=32,
            tables=False,
            proof=f"tests/exporters/test_peers.py, auto-round {VERSION}",
        ),
    ),
    size=as_autogptq,
    separate=True,
    methods=("auto-round", "intel/auto-round"),
    layout=later("moeq.exporters.readers.awq:of_auto_round"),
    loaders=(
        Loader(
            name="auto-round",
            packages={**TRANSFORMERS.packages, "auto_round": f"pip install auto-round=={VERSION}"},
            load="auto_round_model",
        ),
    ),
    misread=misread,
)
