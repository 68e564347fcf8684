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
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from moeq.artifacts.targets import ANY_GRID, Grid, Target
from moeq.errors import FormatError
from moeq.exporters.exporter import TRANSFORMERS, Exporter, Loader, later
from moeq_kernels.widths import FULL

if TYPE_CHECKING:
    from torch import Tensor

    from moeq.exporters.foreign import Draft
    from moeq.models.experts import ExpertLayer
    from moeq_kernels.packed import PackedWeight

NAME, VERSION = "compressed-tensors", "0.20.0"
CONFIG_VERSION = "0.19.0"  # of the package whose config.json this is; 0.20.0 reads it
PARTS = ("weight_packed", "weight_scale", "weight_shape", "weight")
LAYERS_EXPERTS = r"\.experts\..*"  # the end of a pattern of a layer's experts
BESIDE = r"re:^(?!.*\.experts(\.|$))"  # every module that is not below one called experts
VLLM = Loader(name="vllm", packages={"vllm": "pip install vllm"}, load=None)


def loader_of(source: Any) -> Loader:
    """vLLM where schemes differ: transformers would load such a checkpoint without an error, and wrongly."""
    declared = source.source.config.get("quantization_config") or {}
    return TRANSFORMERS if len(declared.get("config_groups") or {}) < 2 and not _plain(declared) else VLLM


def _plain(declared: Any) -> list[str]:
    """Patterns of layers whose experts are in full precision."""
    return [name for name in declared.get("ignore") or () if name.endswith(LAYERS_EXPERTS)]


def write(draft: Draft) -> None:
    """FormatError for what the runtime would not load as it is meant."""

    for name in draft.source.other_names():
        raise FormatError(
            "modules outside of the experts are loaded in full precision only",
            where=f"for {draft.runtime.name}: {name}",
            do="run without `others`, or write it for auto-round or gptqmodel",
        )
    whole, widen, layers = draft.target.granularity == "model", draft.options.widen, draft.source.layers
    scheme, bits = Scheme(draft), common_width(draft, layers) if whole and widen else None
    for layer in layers:
        if not whole:
            scheme, bits = Scheme(draft), common_width(draft, [layer]) if widen else None
        draft.write_experts(layer, draft.expert_keys(layer), PARTS, scheme.tensors, bits)
    draft.finish(_config(draft))


class Scheme:
    """What all experts of a layer, or of the model, share: what the first of their matrices has."""

    def __init__(self, draft: Draft) -> None:
        self._draft = draft
        self._first: tuple[str, Grid | None] | None = None  # None: full precision

    def tensors(self, name: str, matrix: PackedWeight | Tensor) -> dict[str, Tensor]:
        """The parts of a matrix; FormatError where it differs from the first in what one scheme says."""
        from torch import Tensor

        plain = isinstance(matrix, Tensor)
        if plain and FULL not in self._draft.target.widths:
            raise self._mixed(name, "full precision", "packed experts")
        grid = None if plain else self._draft.grids[name]
        first_name, first = self._first = self._first or (name, grid)
        if isinstance(matrix, Tensor):
            if first is not None:
                raise self._mixed(name, "full precision", f"{first.bits} bits of {first_name}")
            return {"weight": matrix}
        assert grid is not None
        if first is None:
            raise self._mixed(name, f"{grid.bits} bits", f"full precision of {first_name}")
        if grid.bits != first.bits:
            raise self._mixed(name, f"{grid.bits} bits", f"{first.bits} bits of {first_name}")
        if grid.group_size != first.group_size:
            raise self._mixed(name, f"groups of {grid.group_size}", f"groups of {first.group_size} of {first_name}")
        if _overflows(matrix):
            what = "values beyond float16, in which codes are multiplied by scales"
            raise FormatError(what, where=f"for {self._draft.runtime.name}: {name}", do=ANY_GRID)
        return linear_tensors(matrix)

    def _mixed(self, name: str, what: str, other: str) -> FormatError:
        target = self._draft.target
        of = "all experts of the model" if target.granularity == "model" else "all experts of a layer"
        return FormatError(
            f"{what} beside {other}; {target.name} takes one scheme for {of}",
            where=f"for {target.name}: {name}",
            do=f"assign one width (assign.target: {target.name}), or store all codes in one wider grid "
            "(export.widen: true, --widen)",
        )


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


def common_width(draft: Draft, layers: Sequence[ExpertLayer]) -> int | None:
    """The least width of symmetric codes that holds every expert's of some layers, None where none is packed.

    All of these experts are read for it.
    """
    from moeq_kernels.packed import PackedWeight, symmetric_bits

    widths = [
        symmetric_bits(matrix)
        for layer in layers
        for expert in range(layer.num_experts)
        for matrix in draft.source.expert(layer, expert)[0].values()
        if isinstance(matrix, PackedWeight)
    ]
    if not widths:
        return None
    return min((width for width in draft.target.widths if max(widths) <= width < FULL), default=max(widths))


def _overflows(weight: PackedWeight) -> bool:
    """Whether codes times float16 scales are infinite in float16."""
    import torch

    largest = torch.finfo(torch.float16).max
    near = bool((weight.scales.float() * 2 ** (weight.bits - 1) > largest).any())
    return near and weight.scales.dtype == torch.float16 and bool((weight.dequantize().abs() > largest).any())


def _config(draft: Draft) -> dict[str, Any]:
    """quantization_config: one group for the experts of the model, or one for the layers of each grid."""
    stems = {key.removesuffix(".weight_packed") for key in draft.where if key.endswith("_packed")}
    if any("experts" not in stem for stem in stems):
        raise FormatError(
            "experts are not below a module called experts",
            where=f"for {draft.runtime.name}",
            do="write it for another runtime",
        )
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
    """(patterns of layers' experts, their grid) of every grid, and patterns of the layers in full precision."""
    groups: dict[tuple[int, int], tuple[list[str], Grid]] = {}
    plain = []
    for layer in draft.source.layers:
        names = draft.expert_keys(layer)
        key = names[0, layer.projections[0]]
        pattern = f"re:.*{re.escape(key[: key.index('.experts.')])}{LAYERS_EXPERTS}"
        grid = draft.grids.get(f"{layer.name}.0.{layer.projections[0]}")
        if grid is None:
            plain.append(pattern)
        else:
            groups.setdefault((grid.bits, grid.group_size), ([], grid))[0].append(pattern)
    return list(groups.values()), plain


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
            widths=(2, 4, 8, FULL),
            granularity="layer",
            symmetric_only=True,
            others=False,
            reads="the scheme of expert 0 is taken for its whole fused layer; symmetric grids only",
            multiple=32,
            proof="read in its source, not loaded",
            called="vLLM, which reads compressed-tensors",
            snippet="""from vllm import LLM  # pip install vllm
model = LLM("THIS_DIRECTORY")""",
        ),
    ),
    separate=True,
    layout=later("moeq.exporters.readers.compressed:CompressedTensors"),
    loaders=(TRANSFORMERS, VLLM),
    loader_of=loader_of,
    needs={"compressed_tensors": "pip install compressed-tensors"},
)
