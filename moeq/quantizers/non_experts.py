"""Modules outside of the routed experts: what they are given, their packed weights, and what each costs.

A linear needs no rows, only sums over them: H = sum x x^T over calibration rows for GPTQ, and the same over held-out
rows, from which the error of its output follows: sum |dW x|^2 = tr(dW H dW^T). Linears that are given the same tensor
(q, k and v) share both, and one factor.

Letters: B sequences of a batch, S tokens of a sequence, T rows of all batches, N output rows, K inputs.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from moeq.errors import QuantizationError
from moeq.models.non_experts import OtherModule
from moeq.models.walk import Batch, current_batch
from moeq.numerics import storing
from moeq.numerics.factor import Factor, factorize
from moeq.quantizers.stored import stored_as
from moeq.registry import QUANTIZERS
from moeq_kernels.grids import beyond_float16
from moeq_kernels.packed import PackedWeight, joined
from moeq_kernels.widths import Encoding

ROUNDING = "rtn"  # what quantizes embeddings, and linears of whose inputs too little is known
ROWS_AT_ONCE = 4096  # output rows of a large matrix that are quantized and measured together
NOT_ROWS, UNEVEN = "not_one_row_a_token", "inputs_vary"


@dataclass(eq=False, kw_only=True)
class InputSums:
    """Sums of x x^T [K, K] over calibration and over held-out rows, with their numbers of rows.

    additions: tensors that were added; members: the linears that share the sums; problem: why they do not tell what a
    linear was given: NOT_ROWS, rows that cannot be told apart by sequence, or UNEVEN, some came to other linears only.
    """

    calibration: Tensor
    heldout: Tensor
    calibration_rows: int = 0
    heldout_rows: int = 0
    additions: int = 0
    members: list[str] = field(default_factory=list)
    problem: str = ""

    @classmethod
    def of(cls, inputs: int, device: torch.device) -> InputSums:
        """Nothing seen yet."""
        calibration, heldout = (torch.zeros(inputs, inputs, device=device) for _ in range(2))
        return cls(calibration=calibration, heldout=heldout)

    def add(self, rows: tuple[Tensor, Tensor] | None) -> None:
        """Add calibration rows and held-out rows [T, K]."""
        self.additions += 1
        if rows is None:
            self.problem = NOT_ROWS
            return
        calibration, heldout = (part.float() for part in rows)
        self.calibration.addmm_(calibration.mT, calibration)
        self.heldout.addmm_(heldout.mT, heldout)
        self.calibration_rows += len(calibration)
        self.heldout_rows += len(heldout)

    def hessian(self) -> Tensor:
        """Mean of x x^T over calibration rows, [1, K, K]."""
        return (self.calibration / max(1, self.calibration_rows)).unsqueeze(0)


def split_rows(inputs: Tensor, batch: Batch, heldout: Tensor) -> tuple[Tensor, Tensor] | None:
    """Calibration rows and held-out rows [T, K] of a linear's inputs, pads taken out; None when no shape fits.

    inputs: [B, ..., S, ..., K], [B*S, ..., K] or, in a batch without pads, [B, ..., K]; heldout: bool, by the numbers
    of all sequences.
    """
    rows, length = batch.mask.shape
    if inputs.dim() >= 4 and inputs.shape[0] == rows and length in inputs.shape[1:-1]:
        inputs = inputs.movedim(1 + inputs.shape[1:-1].index(length), 1)
    keep, held = batch.mask.bool(), heldout[batch.sequences].unsqueeze(1).expand_as(batch.mask)
    if inputs.dim() >= 3 and tuple(inputs.shape[:2]) == (rows, length):
        pass
    elif inputs.dim() >= 2 and inputs.shape[0] == rows * length:
        keep, held = keep.reshape(-1), held.reshape(-1)
    elif inputs.dim() >= 3 and inputs.shape[0] == rows and bool(keep.all()):
        keep, held = keep[:, 0], held[:, 0]
    else:
        return None
    sides = ((keep & ~held).to(inputs.device), (keep & held).to(inputs.device))
    return tuple(inputs[side].reshape(-1, inputs.shape[-1]) for side in sides)  # type: ignore[return-value]


def _joined_sums(parts: Sequence[InputSums]) -> InputSums:
    """Sums over what linears were given at each visit to their block as one."""
    if len(parts) == 1:
        return parts[0]
    return InputSums(
        calibration=torch.stack([part.calibration for part in parts]).sum(0),
        heldout=torch.stack([part.heldout for part in parts]).sum(0),
        calibration_rows=sum(part.calibration_rows for part in parts),
        heldout_rows=sum(part.heldout_rows for part in parts),
        problem=next((part.problem for part in parts if part.problem), ""),
    )


class Listener:
    """Hooks that sum up the inputs of linears during a walk; the sums of a layer are taken when it is done.

    Of a layer in a loop each visit has sums of its own until then: which linears share their inputs differs among them.
    """

    def __init__(self, model: nn.Module, modules: Iterable[OtherModule], heldout: Tensor) -> None:
        """heldout: [sequences] bool, which sequences are kept for measuring."""
        self.model, self.heldout = model, heldout
        self.modules = {module.name: module for module in modules}
        self._sums: dict[tuple[str, int], InputSums] = {}  # of every linear at each visit to its block
        self._given = Counter[tuple[str, int]]()  # how many tensors it was given
        self._visits = Counter[tuple[int, str]]()  # of every batch to every block
        self._recent: dict[int, list[tuple[weakref.ref[Tensor], int, InputSums]]] = {}
        self._hooks = [
            model.get_submodule(name).register_forward_pre_hook(lambda _, given, at=name: self._see(at, given))
            for name in self.modules
        ]
        self._hooks += [
            model.get_submodule(block).register_forward_pre_hook(lambda *_, at=block: self._enter(at))
            for block in {module.block for module in self.modules.values()} - {""}
        ]

    def remove(self) -> None:
        """Take the hooks off."""
        for hook in self._hooks:
            hook.remove()

    def take(self, block: str) -> dict[str, InputSums]:
        """The sums of a block's linears, which are forgotten here."""
        self._recent.clear()
        parts: dict[str, list[InputSums]] = {}
        for key in [key for key in self._sums if self.modules[key[0]].block == block]:
            sums = self._sums.pop(key)
            even = self._given.pop(key) == sums.additions
            parts.setdefault(key[0], []).append(sums if even else replace(sums, problem=UNEVEN))
        together = {tuple(map(id, each)): each for each in parts.values()}
        joined = {ids: _joined_sums(each) for ids, each in together.items()}
        return {name: joined[tuple(map(id, each))] for name, each in parts.items()}

    def _enter(self, block: str) -> None:
        """A batch comes to a block."""
        self._visits[id(current_batch()), block] += 1

    def _see(self, name: str, given: tuple[Any, ...]) -> None:
        """Add up one call's inputs; a linear that is given what another was given before shares that one's sums."""
        inputs: Tensor = given[0]
        seen = self._recent.setdefault(id(current_batch()), [])
        seen[:] = [(ref, version, sums) for ref, version, sums in seen if ref() is not None]
        match = next((sums for ref, version, sums in seen if ref() is inputs and version == inputs._version), None)
        key = name, self._visits[id(current_batch()), self.modules[name].block]
        sums = self._sums.get(key)
        if sums is None:
            sums = self._sums[key] = match or InputSums.of(inputs.shape[-1], inputs.device)
            sums.members.append(name)
        elif sums is not match and name != sums.members[0]:
            sums = self._sums[key] = self._apart(name, sums)
        self._given[key] += 1
        if sums is not match:
            sums.add(split_rows(inputs.detach(), current_batch(), self.heldout))
            seen.append((weakref.ref(inputs), inputs._version, sums))

    def _apart(self, name: str, sums: InputSums) -> InputSums:
        """Sums of its own for a linear that shared another's and is now given something else."""
        sums.members.remove(name)
        return replace(sums, calibration=sums.calibration.clone(), heldout=sums.heldout.clone(), members=[name])


@dataclass(frozen=True, kw_only=True)
class Grid:
    """How a module is to be quantized."""

    method: str
    bits: int
    group_size: int
    symmetric: bool
    damping: float

    @property
    def encoding(self) -> Encoding:
        """How its codes stand for values."""
        return Encoding(group_size=self.group_size, symmetric=self.symmetric)

    @property
    def needs_factor(self) -> bool:
        """Whether the method asks for the factor of what a linear is given."""
        return bool(QUANTIZERS.get(self.method).needs == "hessians")


@dataclass(frozen=True, kw_only=True)
class Result:
    """A packed weight [1, N, ...] and its row of the table, but for what only the caller knows."""

    packed: PackedWeight
    row: dict[str, Any]


@torch.no_grad()
def quantize_linears(
    modules: Iterable[tuple[OtherModule, Grid]], sums: dict[str, InputSums], weight: Callable[[str], Tensor]
) -> Iterator[tuple[OtherModule, Result]]:
    """Quantize linears; those that share their inputs come one after the other and share one factor.

    weight: a module's weight [N, K]. Raises QuantizationError when weights or inputs are not finite.
    """
    order = {id(group): place for place, group in enumerate(sums.values())}
    last: tuple[InputSums, float, Factor] | None = None
    for module, grid in sorted(modules, key=lambda pair: order.get(id(sums.get(pair[0].name)), -1)):
        group = sums.get(module.name)
        _check_finite(module.name, weight(module.name), group)
        factor = None
        if grid.needs_factor and group is not None and group.calibration_rows and not group.problem:
            if last is None or last[0] is not group or last[1] != grid.damping:
                last = (group, grid.damping, factorize(group.hessian(), grid.damping, of_many=False))
            factor = last[2]
        yield module, _linear(module.name, weight(module.name), group, factor, grid)


def _check_finite(name: str, weight: Tensor, group: InputSums | None) -> None:
    for what, tensor in (("weights", weight), ("inputs", None if group is None else group.calibration)):
        if tensor is not None and not bool(torch.isfinite(tensor).all()):
            raise QuantizationError(
                f"{what} are not finite", where=name, do="use dtype: float32, or check the checkpoint's weights"
            )


def _linear(name: str, weight: Tensor, group: InputSums | None, factor: Factor | None, grid: Grid) -> Result:
    def energy(part: Tensor, rows: slice) -> float:
        return float(((part @ group.heldout) * part).sum(dtype=torch.float64)) if group is not None else 0.0

    row = {
        "calibration_rows": 0 if group is None else group.calibration_rows,
        "heldout_rows": 0 if group is None else group.heldout_rows,
        "fallback": _fallback(group, factor, grid),
    }
    measured = group is not None and group.heldout_rows > 0 and not group.problem
    return _quantized(name, weight, factor, grid, row, energy if measured else None)


def _quantized(
    name: str,
    weight: Tensor,
    factor: Factor | None,
    grid: Grid,
    row: dict[str, Any],
    energy: Callable[[Tensor, slice], float] | None,
) -> Result:
    """A weight packed some rows at a time; what the scales lack is added to the row's fallback.

    energy: of the outputs of some rows' weights, or of their errors [n, K], and which rows these are; None: not known.
    """
    parts, error, total = [], 0.0, 0.0
    for start in range(0, len(weight), ROWS_AT_ONCE):
        rows = slice(start, start + ROWS_AT_ONCE)
        exact = weight[rows].float()
        packed = _packed(name, exact, factor, grid)
        parts.append(packed.map(lambda part: part.cpu()))
        if energy is not None:
            error += energy(packed.dequantize()[0] - exact, rows)
            total += energy(exact, rows)
    whole = joined(parts, 1)
    beyond = beyond_float16(whole.scales)
    if beyond:
        row["fallback"] = "+".join([name for name in [row["fallback"]] if name != "none"] + beyond)
    return Result(packed=whole, row={"relative_error": error / total if total > 0 else None, **row})


def _fallback(group: InputSums | None, factor: Factor | None, grid: Grid) -> str:
    """What stood in for the method: none, rounded (with why), or what the factorization came to."""
    if not grid.needs_factor:
        return "none"
    if group is not None and group.problem:
        return f"rounded+{group.problem}"
    if factor is None:
        return "rounded+no_tokens"
    return "+".join(name for name, so in factor.fallbacks(0, grid.damping).items() if so) or "none"


def _packed(name: str, weight: Tensor, factor: Factor | None, grid: Grid) -> PackedWeight:
    """Some rows [N, K] as a packed stack of one."""
    method = ROUNDING if factor is None and grid.needs_factor else grid.method
    with QUANTIZERS.blaming(method, lambda: name), stored_as(grid.method, lambda _: name):
        made = QUANTIZERS.get(method).linear(weight, factor, grid)
        return storing.packed_of(made, grid.bits, grid.symmetric)


@torch.no_grad()
def quantize_embedding(name: str, weight: Tensor, looked_up: Tensor, grid: Grid) -> Result:
    """Min-max rounding of an embedding [N, K], row by row; looked_up: [N] how often held-out text looks a row up.

    Raises QuantizationError when weights are not finite.
    """
    _check_finite(name, weight, None)

    def energy(part: Tensor, rows: slice) -> float:
        times = looked_up[rows].to(part.device, torch.float64)
        return float(part.square().sum(1, dtype=torch.float64) @ times)

    row = {"calibration_rows": 0, "heldout_rows": int(looked_up.sum()), "fallback": "none"}
    return _quantized(name, weight, None, grid, row, energy)
