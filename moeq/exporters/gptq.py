"""For gptqmodel, and for vLLM: AutoGPTQ's layout with `dynamic`, a rule for every grid beside the common one.
Read back is AWQ's layout, too, which gptqmodel loads as well.

Symmetric grids are written in the first format (checkpoint_format gptq); grids with zero points in the second
(gptq_v2), which stores them as they are: in the first a zero point of 0 carries into its neighbour when it is loaded.
For gptqmodel tensors are called as they are in memory, since it does not rename them; for vLLM as the family has them
on disk. gptqmodel rounds scales to the type that the model is loaded in: float16 keeps them.
"""

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from moeq.artifacts.targets import Target
from moeq.exporters.compressed_tensors import VLLM_GROUPS, VLLM_PROOF, VLLM_SNIPPET
from moeq.exporters.exporter import VLLM, Exporter, Loader, as_autogptq, later
from moeq_kernels.widths import FULL

if TYPE_CHECKING:
    from moeq.exporters.foreign import Draft
    from moeq.exporters.gptq_layout import Modules

GPTQMODEL, VERSION = "gptqmodel", "7.6.0"
ON_DISK = re.compile(r"\.block_sparse_moe\.experts\.|\.experts\.\d+\.w[123]\.")  # Mixtral's, and of what is like it
VLLM_GPTQ = replace(VLLM, name="vllm-gptq")


def loader_of(source: Any) -> Loader:
    """vLLM where experts are called as no model has them in memory: gptqmodel does not find them."""
    on_disk = any(ON_DISK.search(key) for key in source.source.tensors)
    return VLLM_GPTQ if on_disk else EXPORTER.loaders[0]


def misread(packed: Any) -> str | None:
    """What gptqmodel computes otherwise than auto-round, which wrote it in this format, meant it."""
    from moeq.models.declared import quantization_of
    from moeq.models.support import TURNS, gate_and_up_in_turns

    by_auto_round = "autoround_version" in quantization_of(packed.source.config)
    return TURNS if by_auto_round and gate_and_up_in_turns(packed.source) else None


def write(draft: Draft) -> None:
    """FormatError for what the runtime would not load as it is meant."""
    from moeq.exporters.gptq_layout import write_gptq

    in_memory = draft.target.name == GPTQMODEL
    write_gptq(draft, configuration, ordered=True, naming="memory" if in_memory else "family")


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
    refuse_other=later("moeq.exporters.gptq_layout:refuse_table"),
    runtime=f"gptqmodel {VERSION}",
    snippet="""import torch
from gptqmodel import GPTQModel  # pip install gptqmodel
model = GPTQModel.load("THIS_DIRECTORY", dtype=torch.float16)  # bfloat16 would round the scales""",
    targets=(
        Target(
            name=GPTQMODEL,
            widths=(2, 3, 4, 8, FULL),
            reads="dynamic rules, a pattern a layer and width; experts are unfused; zero points as gptq_v2 has them",
            multiple=32,
            tables=False,
            short_groups=True,
            proof=f"tests/exporters/test_peers.py, gptqmodel {VERSION}",
        ),
        Target(
            name=VLLM_GPTQ.name,
            widths=(4, FULL),
            granularity="layer",
            symmetric_only=True,
            groups=VLLM_GROUPS,
            others=False,
            reads="AutoGPTQ's first format under the family's own names; dynamic rules of a layer's fused experts",
            multiple=32,
            proof=VLLM_PROOF,
            called="vLLM, which reads AutoGPTQ's layout",
            snippet=VLLM_SNIPPET,
        ),
    ),
    size=partial(as_autogptq, ordered=True),
    separate=True,
    methods=("gptq", "awq"),
    layout=later("moeq.exporters.readers.awq:of_gptqmodel"),
    loaders=(
        Loader(name=GPTQMODEL, packages={"gptqmodel": f"pip install gptqmodel=={VERSION}"}, load="gptqmodel_model"),
        VLLM_GPTQ,
    ),
    loader_of=loader_of,
    misread=misread,
)
