"""Stored tensors as vLLM and SGLang hand them over, one at a time, until a matrix, or a layer's experts, are complete.

They find the place of a tensor by the name of a parameter; those of packed weights are empty, and their loaders keep
what comes. Letters: N output rows, K inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from moeq_kernels.checkpoint import DENSE
from moeq_kernels.choice import policy, prepared_layer, prepared_linear
from moeq_kernels.description import DOWN, Gate, LayerOfExperts, Matrix, PreparedLayer, PreparedLinear
from moeq_kernels.freed import return_memory
from moeq_kernels.packed import PackedWeight, row_range, some_inputs
from moeq_kernels.widths import DROPPED, FULL, PARTS, Encoding, Width, width_of

GATE, UP = "gate_proj", "up_proj"
PLACES: dict[Any, int] = {None: 0, "q": 0, "k": 1, "v": 2}  # of matrices in a fused layer, by the runtimes' names
GUARD = "weight"  # of a packed module in the checkpoint; the weight itself where the module is dense
ALL = slice(None)
ALL_PARTS = (*PARTS, DENSE)
Loader = Callable[..., Any]


class Parts:
    """What came of one matrix [rows, inputs] of `bits` bits, of which a device has the rows and inputs `mine`."""

    def __init__(
        self, bits: int, encoding: Encoding, rows: int, inputs: int, mine: tuple[slice, slice], biased: bool = False
    ) -> None:
        self.bits, self.encoding, self.rows, self.inputs, self.mine = bits, encoding, rows, inputs, mine
        self.wanted = {*((DENSE,) if bits == FULL else encoding.parts(bits)), *(("bias",) if biased else ())}
        self.found: dict[str, Tensor] = {}

    def take(self, part: str, tensor: Tensor, name: str) -> None:
        """Keep one part; ValueError for one that a matrix of this width has not."""
        if part not in self.wanted:
            raise ValueError(f"moeq: {name} is no part of a matrix of {self.bits} bits; export the checkpoint again")
        self.found[part] = tensor

    @property
    def complete(self) -> bool:
        return self.wanted == self.found.keys()

    def matrix(self, dtype: torch.dtype, name: str) -> Matrix:
        """What the device has of it; ValueError where parts are missing, have other shapes than config.json says, or
        where the device's inputs are neither whole groups of the grid nor all in one."""
        if not self.complete:
            missing = ", ".join(sorted(self.wanted - self.found.keys()))
            raise ValueError(f"moeq: {name}: {missing} did not come with the checkpoint; export it again")
        rows, inputs = self.mine
        self._check_plain(name)
        if self.bits == FULL:
            return self.found[DENSE].to(dtype)[rows, inputs].contiguous()
        try:
            weight = PackedWeight.of(self.found, self.bits, self.inputs, self.encoding)
            weight.check()
        except ValueError as error:
            raise ValueError(f"moeq: {name}: {error}; export the checkpoint again") from None
        if weight.scales.shape[0] != self.rows:
            raise ValueError(f"moeq: {name} has {weight.scales.shape[0]} rows, not {self.rows}; export it again")
        top, bottom, _ = rows.indices(self.rows)
        first, end, _ = inputs.indices(self.inputs)
        try:
            weight = row_range(weight, top, bottom - top)
            return weight if (first, end) == (0, self.inputs) else some_inputs(weight, first, end - first)
        except ValueError as error:
            raise ValueError(
                f"moeq: {name} cannot be divided among these devices ({error}); take fewer; "
                "--enable-expert-parallel leaves experts whole"
            ) from None

    def _check_plain(self, name: str) -> None:
        """ValueError where what is not packed, which would be cut to what the device has, has another shape."""
        for part, shape in ((DENSE, (self.rows, self.inputs)), ("bias", (self.rows,))):
            found = self.found.get(part)
            if found is not None and found.shape != shape:
                what = f"{name}: {part} is {list(found.shape)}, not {list(shape)}"
                raise ValueError(f"moeq: {what}; export the checkpoint again")


class LayerParts:
    """What came of a layer's experts on one device; a kernel arranges them as soon as the last tensor has come.

    widths: of every expert; count: the experts that the runtime has; sizes: hidden and intermediate, of whole matrices;
    gate and activation: as of LayerOfExperts; mine: rows of gate and up, and inputs of down, that the device has;
    local: the number of an expert on it, below 0 where it is another's; leads: whether this device, of those whose
    outputs are added, is the one that adds down's biases. ValueError for another number of experts.
    """

    def __init__(
        self,
        name: str,
        encoding: Encoding,
        widths: Sequence[Width],
        count: int,
        sizes: tuple[int, int],
        dtype: torch.dtype,
        gate: Gate,
        activation: str | None,
        *,
        mine: slice = ALL,
        local: Callable[[int], int] = int,
        biased: bool = False,
        leads: bool = True,
    ) -> None:
        if len(widths) != count:
            do = "serve without redundant experts, or export the checkpoint again"
            raise ValueError(f"moeq: {name}: {len(widths)} widths for {count} experts; {do}")
        (hidden, whole), inner = sizes, (mine, ALL)
        shapes = {GATE: (whole, hidden, inner), UP: (whole, hidden, inner), DOWN: (hidden, whole, inner[::-1])}
        self.name, self.dtype, self.gate, self.activation = name, dtype, gate, activation
        self.local, self.biased, self.leads = local, biased, leads
        self.parts = {
            (local(expert), projection): Parts(width_of(width, projection), encoding, *shape, biased)
            for expert, width in enumerate(widths)
            for projection, shape in shapes.items()
            if local(expert) >= 0 and width != DROPPED
        }
        self.experts = sum(local(expert) >= 0 for expert in range(count))
        self.complete, self.device = 0, torch.get_default_device()
        self.prepared: PreparedLayer | None = None

    def take(self, expert: int, projection: str, part: str, tensor: Tensor) -> bool:
        """One tensor of a matrix of an expert, a guard is passed over; whether the expert is on this device."""
        place, name = (self.local(expert), projection), f"{self.name}.{expert}.{projection}.{part}"
        if place[0] >= 0 and part != GUARD:
            if self.prepared is not None:
                raise _again(self.name)
            if place not in self.parts:
                raise ValueError(f"moeq: {name}: the expert is dropped, says config.json; export the checkpoint again")
            self.parts[place].take(part, tensor.to(self.device), name)
            self.complete += self.parts[place].complete
            if self.complete == len(self.parts):
                self._prepare()
        return place[0] >= 0

    def finish(self) -> PreparedLayer:
        """The layer as its kernel has it; ValueError where a tensor never came."""
        return self.prepared or self._prepare()  # which names what is missing

    def _prepare(self) -> PreparedLayer:
        """Have a kernel take the layer; what was loaded is let go."""
        given = self._layer()
        self.parts = {}
        self.prepared, why = prepared_layer(given, self.device, policy())
        del given
        return_memory()
        if self.prepared is None:
            raise ValueError(f"moeq: {self.name}: no kernel takes it: {why}")
        return self.prepared

    def _layer(self) -> LayerOfExperts:
        """All of it, as kernels take it; ValueError where tensors never came or have other shapes."""
        matrices: list[dict[str, Matrix]] = [{} for _ in range(self.experts)]
        biases: list[dict[str, Tensor]] = [{} for _ in range(self.experts)]
        for (expert, projection), parts in self.parts.items():
            matrices[expert][projection] = parts.matrix(self.dtype, f"{self.name}.{expert}.{projection}")
            if "bias" in parts.found:
                bias = parts.found["bias"].to(self.dtype)[parts.mine[0]].contiguous()
                biases[expert][projection] = bias if projection != DOWN or self.leads else torch.zeros_like(bias)
        return LayerOfExperts(matrices=matrices, biases=biases, gate=self.gate, activation=self.activation)


class LinearParts:
    """What came of the matrices side by side in a layer.

    bits: {module of the checkpoint: width}, in order, 16 for one that is dense; rows: those that a device has of each;
    share: of a matrix's name and those rows, all that it has and which of them they are; mine: the inputs that the
    device has. ValueError where the layer has another number of matrices.
    """

    def __init__(
        self,
        layer: str,
        encoding: Encoding,
        bits: Mapping[str, int],
        rows: Sequence[int],
        inputs: int,
        dtype: torch.dtype,
        share: Callable[[str, int], tuple[int, slice]] = lambda _, own: (own, ALL),
        mine: slice = ALL,
    ) -> None:
        if len(rows) != len(bits):
            what = f"{len(rows)} matrices, the checkpoint {len(bits)}: {', '.join(bits)}"
            raise ValueError(f"moeq: {layer} has {what}; this kind of layer is not served packed")
        self.layer, self.dtype, self.parts = layer, dtype, dict[str, Parts]()
        for (name, width), own in zip(bits.items(), rows, strict=True):
            every, some = share(name, own)
            self.parts[name] = Parts(width, encoding, every, inputs, (some, mine))

    def place(self, layer: nn.Module) -> None:
        """Give a runtime's layer the parameters by whose names it looks for a loader."""
        for part in (*ALL_PARTS, GUARD):
            self.device = placeholder(layer, part, partial(self.take, part))

    def take(self, part: str, param: Tensor, loaded_weight: Tensor, shard: Any = None) -> None:
        """One tensor of a matrix, by its number or q, k, v; the guard of a packed module is passed over, one that is
        dense has its weight under it."""
        if not self.parts:
            raise _again(self.layer)
        name = list(self.parts)[PLACES.get(shard, shard)]
        parts = self.parts[name]
        if part != GUARD or parts.bits == FULL:
            parts.take(DENSE if part == GUARD else part, loaded_weight.to(param.device), f"{name}.{part}")

    def finish(self, layer: nn.Module) -> tuple[PreparedLinear, ...]:
        """The matrices as their kernels have them, placeholders taken away; ValueError where a tensor never came."""
        arranged = []
        for name, parts in self.parts.items():
            prepared, why = prepared_linear(parts.matrix(self.dtype, name), None, self.device, policy())
            if prepared is None:
                raise ValueError(f"moeq: {name}: no kernel takes it: {why}")
            arranged.append(prepared)
        self.parts = {}
        for part in (*ALL_PARTS, GUARD):
            delattr(layer, part)
        return tuple(arranged)


def _again(name: str) -> ValueError:
    """The error for a tensor that comes after all had come, as where a running server is to have other weights."""
    what = "packed weights are arranged as they are loaded, and not replaced in a model that runs"
    return ValueError(f"moeq: {name}: {what}; start the server again, with the other checkpoint")


def products(matrices: Sequence[PreparedLinear], rows: Tensor) -> Tensor:
    """rows [T, K] -> [T, N], of all matrices one after the other."""
    found = [matrix(rows) for matrix in matrices]
    return found[0] if len(found) == 1 else torch.cat(found, -1)


def placeholder(layer: nn.Module, name: str, loader: Loader) -> torch.device:
    """An empty parameter under a name by which a tensor's place is looked up; the device that it is on."""
    parameter = nn.Parameter(torch.empty(0), requires_grad=False)
    parameter.weight_loader = loader  # type: ignore[attr-defined]
    layer.register_parameter(name, parameter)
    return parameter.device
