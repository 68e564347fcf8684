"""W8A8 as compressed-tensors has it (int-quantized): a folded language model whose linears compute in int8, for vLLM.

Of a linear: weight int8 [N, K], symmetric by output channel; weight_scale float32 [N, 1]; input_scale float32 [1], one
static symmetric scale. Of a routed expert, where they are quantized: weight and weight_scale alone, since vLLM's
kernels of experts (CompressedTensorsW8A8Int8MoEMethod) take no static scale of inputs, but one of every token as it
comes. All else is as the folded checkpoint has it.
N outputs, K inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from moeq.artifacts.sums import write_sums
from moeq.errors import FormatError, QuantizationError
from moeq.exporters.compressed_tensors import CONFIG_VERSION
from moeq.exporters.folded import ChangedCheckpoint
from moeq.exporters.front_matter import front_matter, markdown, read_origin
from moeq.models.disk_names import DiskNames, Names
from moeq.models.experts import ExpertLayer
from moeq.models.source import ModelSource
from moeq.runtimes import W8A8
from moeq.version import __version__

FORMAT = "int-quantized"
BITS = 8
EXPERT = r"re:.*\.experts\.\d+\.[^.]+$"  # matrices of routed experts; vLLM asks by names that are not all families'
EXPERTS = r"re:.*\.experts($|\..*)"  # all that lies in or below a module of experts
HEAD = "lm_head"
PLAIN = "write them as they are: reparam.w8a8.experts: plain"
Rounding = Callable[[Tensor], tuple[Tensor, Tensor]]  # of [N, K]: whole numbers [N, K], scales [N, 1]


def expert_names(model: nn.Module, layers: Iterable[ExpertLayer], family: str | None) -> dict[str, Names]:
    """{layer: {(expert, projection): key}}; FormatError where vLLM would not find what becomes int8."""
    disk, found = DiskNames(model), {}
    for layer in layers:
        names = None if layer.biased else disk.experts(layer)
        if names is None or not all(".experts." in key for key in names.values()):
            why = "has biases" if layer.biased else "does not keep every matrix of an expert below a module `experts`"
            raise FormatError(f"experts of model_type {family}: it {why}", where=W8A8, do=PLAIN)
        found[layer.name] = names
    return found


@dataclass(frozen=True, kw_only=True)
class Int8Parts:
    """linears: weights that become int8; layers: whose experts do; scales: of the inputs of linears, by weight, float32
    numbers; rounded: gives codes and scales of a matrix."""

    linears: frozenset[str]
    layers: tuple[ExpertLayer, ...]
    scales: Mapping[str, float]
    rounded: Rounding


class W8A8Checkpoint(ChangedCheckpoint):
    """An unfinished checkpoint beside its source; `add` writes the blocks of a folded model as they become known."""

    def __init__(
        self,
        source: ModelSource,
        reader: Any,
        structure: nn.Module,
        directory: Path,
        changed: Iterable[str],
        *,
        parts: Int8Parts,
        **settings: Any,
    ) -> None:
        """As a `ChangedCheckpoint`; parts: what becomes int8."""
        self._parts, self._structure = parts, structure
        self._layers = {layer.name: layer for layer in parts.layers}
        self._experts = {f"{name}.{own}": name for name, layer in self._layers.items() for own in layer.parameters}
        self._keys = expert_names(structure, parts.layers, source.config.get("model_type"))
        every = {*changed, *parts.linears, *self._experts}
        super().__init__(source, reader, structure, directory, every, **settings)

    def _tensors(self, changed: Iterable[str]) -> dict[str, Tensor]:
        names = set(changed)
        tensors = super()._tensors(sorted(names - self._parts.linears - set(self._experts)))
        model: Any = self._reader.model
        for name in sorted(names & self._parts.linears):
            stem = self._names.renamed(name).removesuffix("weight")
            tensors |= self._matrix(stem, model.get_parameter(name).detach())
            tensors[f"{stem}input_scale"] = torch.tensor([self._scale(name)], dtype=torch.float32)
        for name in sorted({self._experts[name] for name in names & set(self._experts)}):
            layer, module = self._layers[name], model.get_submodule(name)
            for expert in range(layer.num_experts):
                for projection, view in layer.kind.views(module, expert).items():
                    stem = self._keys[name][expert, projection].removesuffix("weight")
                    tensors |= self._matrix(stem, view.detach())
        return tensors

    def _matrix(self, stem: str, weight: Tensor) -> dict[str, Tensor]:
        codes, scale = self._parts.rounded(weight)
        return {f"{stem}weight": codes.to("cpu", torch.int8), f"{stem}weight_scale": scale.to("cpu", torch.float32)}

    def _scale(self, name: str) -> float:
        scale = self._parts.scales.get(name, 0.0)
        if scale < torch.finfo(torch.float32).tiny:
            raise QuantizationError(
                "calibration saw no input of this linear but zeros, it has no scale",
                where=name,
                do="calibrate on more samples (reparam.samples)",
            )
        return scale

    def finish(self) -> None:
        """As a `ChangedCheckpoint`, with the digests of all files."""
        super().finish()
        write_sums(self._directory)

    def _config(self) -> dict[str, Any]:
        return super()._config() | {"quantization_config": self._declared()}

    def _declared(self) -> dict[str, Any]:
        """quantization_config: all linears but those that are named, and experts as a group of their own."""
        groups = {"group_0": _group(["Linear"], {"strategy": "tensor", "dynamic": False})}
        if self._layers:
            groups["group_1"] = _group([EXPERT], {"strategy": "token", "dynamic": True})
        return {
            "quant_method": "compressed-tensors",
            "format": FORMAT,
            "quantization_status": "compressed",
            "config_groups": groups,
            "ignore": self._ignored(),
            "kv_cache_scheme": None,
            "version": CONFIG_VERSION,
        }

    def _ignored(self) -> list[str]:
        """Linears that stay as they are, by their names in memory and on disk; routed experts by a pattern.

        Routers are among them, which are linears in vLLM, whatever they are in transformers.
        """
        left = [
            name.removesuffix(".weight")
            for name, weight in self._structure.named_parameters()
            if name.endswith(".weight") and weight.dim() == 2 and name not in self._parts.linears | self._looked_up()
        ]
        disk = [self._names.renamed(f"{name}.weight").removesuffix(".weight") for name in left]
        return [*dict.fromkeys([HEAD, *left, *disk]), *([] if self._layers else [EXPERTS])]

    def _looked_up(self) -> set[str]:
        """Weights of embeddings."""
        return {
            f"{name}.weight" for name, module in self._structure.named_modules() if isinstance(module, nn.Embedding)
        }

    def _card(self) -> str:
        name = markdown(self._source.name)
        how = "int8, their inputs scaled token by token" if self._layers else "as they were"
        return "\n".join(
            [
                *front_matter(self._source.name, "transformers", read_origin(self._source.path)),
                f"# {name} in W8A8, norms folded",
                "",
                f"Written by moeq {__version__} for vLLM (compressed-tensors, {FORMAT}): linears in int8, weights by",
                f"output channel, one static scale for what goes in; routed experts, where there are any: {how}.",
                "",
                "```python",
                "from vllm import LLM",
                'model = LLM("THIS_DIRECTORY", dtype="bfloat16")',
                "```",
                "",
            ]
        )


def _group(targets: list[str], inputs: dict[str, Any]) -> dict[str, Any]:
    whole = {"num_bits": BITS, "type": "int", "symmetric": True}
    return {
        "targets": targets,
        "weights": whole | {"strategy": "channel", "dynamic": False},
        "input_activations": whole | inputs,
        "output_activations": None,
        "format": FORMAT,
    }
