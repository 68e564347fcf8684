"""For gptqmodel: AutoGPTQ's layout with `dynamic`, a rule for every width beside the common one.

Symmetric grids are written in the first format (checkpoint_format gptq); grids with zero points in the second
(gptq_v2), which stores them as they are: in the first a zero point of 0 carries into its neighbour when it is loaded.
Tensors are called as they are in memory, since gptqmodel does not rename them. It rounds scales to the type that the
model is loaded in: float16 keeps them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from moeq.artifacts.targets import Target
from moeq.exporters.exporter import Exporter, Loader, later
from moeq_kernels.widths import FULL

if TYPE_CHECKING:
    from moeq.exporters.foreign import Draft
    from moeq.exporters.gptq_layout import Modules

VERSION = "7.6.0"


def write(draft: Draft) -> None:
    """FormatError for what gptqmodel would not load as it is meant."""
    from moeq.exporters.gptq_layout import write_gptq

    write_gptq(draft, configuration, ordered=True, as_in_memory=True)


def configuration(modules: Modules) -> dict[str, Any]:
    """quantization_config: the common grid, and rules for what differs."""
    dynamic: dict[str, Any] = {f"-:{pattern}": {} for pattern in modules.plain}
    for bits, group_size, patterns in modules.others:
        dynamic |= {f"+:{pattern}": {"bits": bits, "group_size": group_size} for pattern in patterns}
    return {
        "quant_method": "gptq",
        "checkpoint_format": "gptq" if modules.first else "gptq_v2",
        "bits": modules.bits,
        "group_size": modules.group_size,
        "sym": modules.first,
        "desc_act": False,
        "lm_head": False,
        "dynamic": dynamic,
    }


EXPORTER = Exporter(
    name="gptq",
    label="gptq",
    help="AutoGPTQ's layout with a width for every matrix, with or without zero points",
    write=write,
    check=later("moeq.exporters.foreign:check_experts"),
    runtime=f"gptqmodel {VERSION}",
    snippet="""import torch
from gptqmodel import GPTQModel  # pip install gptqmodel
model = GPTQModel.load("THIS_DIRECTORY", dtype=torch.float16)  # bfloat16 would round the scales""",
    targets=(
        Target(
            name="gptqmodel",
            widths=(2, 3, 4, 8, FULL),
            reads="dynamic rules, a pattern a layer and width; experts are unfused; zero points as gptq_v2 has them",
            multiple=32,
            short_groups=True,
            proof=f"tests/exporters/test_peers.py, gptqmodel {VERSION}",
        ),
    ),
    separate=True,
    layout=later("moeq.exporters.readers.gptq:Gptq"),
    loaders=(
        Loader(name="gptqmodel", packages={"gptqmodel": f"pip install gptqmodel=={VERSION}"}, load="gptqmodel_model"),
    ),
)
