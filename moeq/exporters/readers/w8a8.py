"""W8A8 of compressed-tensors (int-quantized): codes and scales of every linear, as `moeq.exporters.w8a8` writes them.

N outputs, K inputs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from moeq.errors import ArtifactError
from moeq.exporters.readers.layout import CHECKED, FLOATS, expect
from moeq.models.declared import quantization_of
from moeq.models.source import CONFIG, ModelSource, TensorHeader

if TYPE_CHECKING:  # headers are looked at without torch
    from torch import Tensor

FORMAT = "int-quantized"
WEIGHT, SCALE, INPUT = "weight", "weight_scale", "input_scale"
AGAIN = "make or download the checkpoint again"
EIGHT = {"num_bits": 8, "type": "int", "symmetric": True}


@dataclass(frozen=True, kw_only=True)
class Int8Matrix:
    """codes int8 [N, K]; scale [N, 1]; input_scale [1] of what goes in, None: taken of every token as it comes."""

    codes: Tensor
    scale: Tensor
    input_scale: Tensor | None


def is_w8a8(config: dict[str, Any]) -> bool:
    """Whether a configuration declares this format."""
    return quantization_of(config).get("format") == FORMAT


class Int8Checkpoint:
    """A checkpoint whose headers are as its configuration says; modules: names of its int8 linears on disk."""

    def __init__(self, source: ModelSource) -> None:
        """ArtifactError for a configuration of another kind, and for a tensor of another type or shape."""
        self._source = source
        forms = self._forms(quantization_of(source.config))
        self._parts: dict[str, dict[str, TensorHeader]] = {}
        for key in source.tensors:
            module, _, part = key.rpartition(".")
            if part == SCALE:
                self._parts[module] = self._checked(module, forms)
        self.modules = tuple(self._parts)
        self.static = sum(INPUT in parts for parts in self._parts.values())
        self.bytes = sum(header.bytes for parts in self._parts.values() for header in parts.values())

    def _forms(self, declared: Mapping[str, Any]) -> set[bool]:
        """Whether inputs are scaled statically, of every group that config.json declares."""
        forms = set()
        try:
            for group in dict(declared["config_groups"]).values():
                weights, inputs = dict(group["weights"]), dict(group["input_activations"])
                static = inputs["strategy"] == "tensor"
                wanted = EIGHT | {"strategy": "tensor" if static else "token", "dynamic": not static}
                if not _says(weights, EIGHT | {"strategy": "channel", "dynamic": False}) or not _says(inputs, wanted):
                    raise ValueError("no symmetric int8 by channels, with inputs by one scale or by tokens")
                forms.add(static)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ArtifactError(
                f"{FORMAT} with {error if isinstance(error, ValueError) else repr(error)}",
                where=str(self._source.path / CONFIG),
                do="moeq reads what `reparam.w8a8` writes",
            ) from None
        return forms

    def _checked(self, module: str, forms: set[bool]) -> dict[str, TensorHeader]:
        names = {part: f"{module}.{part}" for part in (WEIGHT, SCALE, INPUT)}
        parts = {part: self._source.tensors[key] for part, key in names.items() if key in self._source.tensors}
        try:
            shape = parts[WEIGHT].shape if WEIGHT in parts else ()
            if len(shape) != 2:
                raise ValueError("it has scales, and no matrix")
            expect(parts, WEIGHT, ("I8",), shape)
            expect(parts, SCALE, FLOATS, (shape[0], 1))
            if INPUT in parts:
                expect(parts, INPUT, FLOATS, (1,))
            if (INPUT in parts) not in forms:
                raise ValueError(f"config.json and {INPUT} differ in how its inputs are scaled")
        except ValueError as error:
            where = str(self._source.tensors[names[SCALE]].file)
            raise ArtifactError(f"{module}: {error}", where=where, do=AGAIN) from None
        return parts

    def read(self, module: str) -> Int8Matrix:
        """Codes and scales of one linear; ArtifactError for a scale that is not a positive number."""
        import torch

        from moeq.models.remote_source import tensor_of

        found = {part: tensor_of(header, f"{module}.{part}") for part, header in self._parts[module].items()}
        for part in (SCALE, INPUT):
            if part in found and not bool((torch.isfinite(found[part]) & (found[part] > 0)).all()):
                where = str(self._parts[module][part].file)
                raise ArtifactError(f"{module}.{part} is not a positive number", where=where, do=AGAIN)
        return Int8Matrix(codes=found[WEIGHT], scale=found[SCALE], input_scale=found.get(INPUT))

    def described(self) -> dict[str, Any]:
        """What `moeq inspect` says of it."""
        every = sum(header.bytes for header in self._source.tensors.values())
        return {
            "kind": "language model in W8A8 (compressed-tensors, int-quantized)",
            "model_type": self._source.config["model_type"],
            "linears_with_static_inputs": self.static,
            "matrices_with_inputs_by_token": len(self.modules) - self.static,
            "int8_bytes": self.bytes,
            "plain_bytes": every - self.bytes,
            "check": CHECKED,
            "loaded_by": "vLLM" + (", int8 experts on a GPU" if self.static < len(self.modules) else ""),
        }


def _says(values: Mapping[str, Any], wanted: Mapping[str, Any]) -> bool:
    return all(key in values and values[key] == value for key, value in wanted.items())
