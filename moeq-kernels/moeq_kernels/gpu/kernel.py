"""The Triton kernel: layers of packed experts and single matrices on a GPU, or in Triton's interpreter.

TRITON_INTERPRET=1, set before Triton is imported, runs the same programs on CPU tensors, slowly; there bfloat16 is
computed in float32, since the interpreter's products of bfloat16 are wrong.

Letters: E experts, T tokens, k experts a token, P = T*k rows, N rows and K inputs of a matrix, H hidden size,
I intermediate size.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import torch
from torch import Tensor

from moeq_kernels.description import DOWN, LayerOfExperts, Matrix
from moeq_kernels.gpu import unpacked
from moeq_kernels.gpu.settings import Settings, Shape, choose, rows_to_unpack
from moeq_kernels.gpu.stored import Stored, in_order, shapes_of
from moeq_kernels.gpu.swizzle import FRAGMENT, TILE
from moeq_kernels.names import interpreted
from moeq_kernels.streams import launching_on

ACTIVATIONS = {  # in one pass with the products; names as in transformers
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "quick_gelu": "quick_gelu",
    "relu": "relu",
    "relu2": "relu2",
}
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
MOST_COMPARED = 4096  # rows that are sorted by comparing each with all


@cache
def has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def too_old() -> str | None:
    """What is said of a Triton that does not know what the programs are written with, None of any other."""
    import triton

    if hasattr(triton, "constexpr_function"):
        return None
    return f"Triton {triton.__version__} is too old, 3.5 or later is wanted"


@cache
def _device_name(index: int | None) -> str | None:
    return None if index is None else torch.cuda.get_device_name(index)


@cache
def _multiprocessors(index: int | None) -> int:
    return int(torch.cuda.get_device_properties(index).multi_processor_count)


class Stack:
    """Matrices of the experts of a layer in one buffer, and products of rows with them."""

    def __init__(self, stored: Stored) -> None:
        self.stored = stored
        self.device = stored.buffer.device
        self.experts = len(stored.places)
        self.multiprocessors = _multiprocessors(self.device.index) if self.device.type == "cuda" else 1
        views = (torch.int32, torch.int16, torch.float16, stored.dense or torch.float16)
        self.pointers = [*(stored.view(dtype) for dtype in views), stored.singles(), stored.table, stored.grids]
        self._costs: dict[tuple[int, ...], Tensor] = {}
        self._fitting: dict[tuple[object, ...], Settings] = {}  # in place of those that need more than the GPU has
        for slots in stored.launches():
            self.costs(slots)  # here, since a graph that is captured cannot copy from the host

    def elsewhere(self) -> Stack:
        """The same in another place of the device's memory."""
        return Stack(self.stored.copy())

    def settings(self, slots: Sequence[int], pairs: int) -> Settings:
        """Settings of a launch, by its shape."""
        chosen = choose(self.shape(slots, pairs), self.name)
        if self.stored.step(slots) < TILE:  # the parts of a tile are brought apart, each by code of its own
            chosen = replace(chosen, stages=min(chosen.stages, 3))
        return chosen

    def shape(self, slots: Sequence[int], pairs: int) -> Shape:
        """What settings of a launch depend on."""
        rows, inputs = self.stored.shapes[slots[0]]
        return Shape(
            experts=self.experts, rows=rows, inputs=inputs, widths=self.stored.widths(slots), pairs=pairs,
            two=len(slots) > 1, near=self.stored.values_near(2) > 0,
        )  # fmt: skip

    @property
    def name(self) -> str | None:
        """The device's, None in the interpreter."""
        return _device_name(self.device.index) if self.device.type == "cuda" else None

    def product(
        self,
        x: Tensor,
        slots: Sequence[int],
        pairs: int,
        each: int,
        routing: tuple[str, Tensor, Tensor, Tensor],
        settings: Settings,
        activation: str = "",
        dtype: torch.dtype = torch.float32,
    ) -> Tensor:
        """[splits, P, N] of x [P / each, K]: slots' one matrix, or act(first) * second; rows by `routing`."""
        from triton.runtime.errors import OutOfResources

        given = tuple(slots), routing[0], activation, x.dtype, settings
        while True:
            try:
                return self._launched(
                    x, slots, pairs, each, routing, self._fitting.get(given, settings), activation, dtype
                )
            except OutOfResources as error:  # found before anything is launched
                smaller = self._fitting.get(given, settings).smaller()
                if smaller is None:
                    raise ValueError(f"this GPU has no room for the kernel: {error}") from None
                self._fitting[given] = smaller

    def _launched(
        self,
        x: Tensor,
        slots: Sequence[int],
        pairs: int,
        each: int,
        routing: tuple[str, Tensor, Tensor, Tensor],
        settings: Settings,
        activation: str,
        dtype: torch.dtype,
    ) -> Tensor:
        """The same with these settings, whether or not they fit the GPU."""
        import triton
        import triton.language as tl

        from moeq_kernels.gpu.programs import grouped

        rows, inputs = self.stored.shapes[slots[0]]
        if not settings.fits(inputs):
            parts = f"{settings.splits} splits of {settings.parts} parts of whole tiles"
            raise ValueError(f"{inputs} inputs have no {parts}")
        how, index, order, starts = routing
        out = torch.empty((settings.splits, pairs, rows), dtype=dtype, device=x.device)
        owners = {"rows": pairs, "sorted": self.experts, "one": 1}[how]
        grid: tuple[int, ...] = (settings.persistent * self.multiprocessors,)
        if not settings.persistent:
            blocks = pairs if how == "rows" else pairs // settings.block_m + min(owners, pairs)
            owners = 1 if how == "rows" else owners  # a program is told its row: one for any number of them
            grid = (triton.cdiv(rows, settings.block_n), blocks, settings.splits)
        computed = x.dtype if not (interpreted() and x.dtype == torch.bfloat16) else torch.float32
        names = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}
        grouped[grid](
            *self.pointers, x, index, order, starts, self.costs(tuple(slots)), out, pairs, self.experts,
            len(self.stored.shapes), rows, inputs, x.stride(0), each, settings.splits,
            FIRST=slots[0], SECOND=slots[1] if len(slots) > 1 else -1, ACTIVATION=activation, ROUTING=how,
            OWNERS=triton.next_power_of_2(owners), WIDTHS=self.stored.widths(slots), STEP=self.stored.step(slots),
            TAIL=inputs % TILE != 0, NESTED=self.stored.nested(slots), VALUES=self.stored.values_near(settings.warps),
            AHEAD=settings.ahead, FRAGMENTS=rows % FRAGMENT == 0,
            DTYPE=names[computed], ASM=not interpreted(), PERSISTENT=settings.persistent > 0,
            TILES=settings.tiles, BLOCK_N=settings.block_n, BLOCK_M=settings.block_m, PARTS=settings.parts,
            num_warps=settings.warps, num_stages=settings.stages,
        )  # fmt: skip
        return out

    def unpacked(self, slot: int, experts: Tensor, dtype: torch.dtype) -> Tensor:
        """One projection of some experts [e], int32, as dense matrices [e, N, K]; each weight is rounded once."""
        import triton
        import triton.language as tl

        from moeq_kernels.gpu.programs import unpack

        rows, inputs = self.stored.shapes[slot]
        out = torch.empty((len(experts), rows, inputs), dtype=dtype, device=self.device)
        computed = dtype if not (interpreted() and dtype == torch.bfloat16) else torch.float32
        names = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}
        block, tiles, warps = 64, 4, 4
        grid = (triton.cdiv(rows, block), triton.cdiv(inputs, tiles * TILE), len(experts))
        unpack[grid](
            *self.pointers[:4], self.stored.table, self.stored.grids, experts, out, len(self.stored.shapes), rows,
            inputs, SLOT=slot, WIDTHS=self.stored.widths((slot,)), STEP=self.stored.step((slot,)),
            TAIL=inputs % TILE != 0, NESTED=self.stored.nested((slot,)), VALUES=self.stored.values_near(warps),
            FRAGMENTS=rows % FRAGMENT == 0, DTYPE=names[computed], ASM=not interpreted(), BLOCK_N=block, TILES=tiles,
            num_warps=warps,
        )  # fmt: skip
        return out

    def costs(self, slots: tuple[int, ...]) -> Tensor:
        """Bytes of a row of some projections of each expert, int32 [E]: what persistent programs divide work by."""
        slots = tuple(sorted(slots))
        if slots not in self._costs:
            self._costs[slots] = torch.tensor(self.stored.costs(slots), dtype=torch.int32, device=self.device)
        return self._costs[slots]


def sort_by_expert(index: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    """Rows [P] in the order of their experts, int32, and where each expert's begin, int32 [E + 1]; on the device.

    index: [P]; rows of E or more, and below 0, come last.
    """
    pairs = index.numel()
    if pairs > MOST_COMPARED:
        keys, order = torch.sort(unpacked.expert_of(index, experts), stable=True)
        bounds = torch.arange(experts + 1, device=index.device, dtype=keys.dtype)
        return order.to(torch.int32), torch.searchsorted(keys, bounds, out_int32=True)
    from moeq_kernels.gpu.sums import sort_rows

    order = torch.empty(pairs, dtype=torch.int32, device=index.device)
    starts = torch.empty(experts + 1, dtype=torch.int32, device=index.device)
    block = 64
    programs = -(-pairs // block) + -(-(experts + 1) // block)
    sort_rows[(programs,)](index, order, starts, pairs, experts, BLOCK=block, EVERY=64)
    return order, starts


def _captured(device: torch.device) -> bool:
    """Whether a CUDA graph is being captured."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


class TritonLayer:
    """A `PreparedLayer`. settings: of the launches before DOWN and of DOWN's, chosen by shape where None.

    unpack_rows: from so many rows an expert on average on, experts are unpacked first.
    """

    def __init__(self, layer: LayerOfExperts, stack: Stack | None = None) -> None:
        """stack: where the matrices lie already, whose names alone `layer` says then."""
        self.names = in_order(layer.matrices[0])
        self.gate, self.finish = layer.gate, layer.finish
        self.stack = stack or Stack(Stored(*_by_slot(layer, self.names)))
        self.activation = ACTIVATIONS.get(layer.activation or "")
        if {*self.names} not in ({"gate_proj", "up_proj", DOWN}, {"up_proj", DOWN}):
            self.activation = None
        self.settings: tuple[Settings | None, Settings | None] = (None, None)
        self.unpack_rows = rows_to_unpack(self.stack.name)

    @property
    def nbytes(self) -> int:
        return self.stack.stored.nbytes

    def matrix(self, expert: int, projection: str) -> Matrix:
        return self.stack.stored.matrix(expert, self.names.index(projection))

    def __call__(self, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        with launching_on(self.stack.device):
            return self._output(hidden, index, weights)

    def _output(self, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        tokens, each = index.shape
        pairs, down = tokens * each, len(self.names) - 1
        out = torch.empty((tokens, self.stack.stored.shapes[down][0]), dtype=hidden.dtype, device=hidden.device)
        if not pairs:
            return out.zero_()
        hidden, index, weights = hidden.contiguous(), index.contiguous(), weights.contiguous()
        if pairs >= self.unpack_rows * min(self.stack.experts, pairs) and not _captured(self.stack.device):
            rows = unpacked.rows_of_experts(self, hidden, index.view(-1), each)
            return self._summed(rows, index, weights, out, 1)
        slots = self._slots()
        chosen = [wanted or self.stack.settings(some, pairs) for some, wanted in slots]
        routing = self._routing(index.view(-1), pairs, chosen)
        inner = self._inner(hidden, pairs, each, [some for some, _ in slots[:-1]], chosen[0], routing)
        last = chosen[-1]
        rows = self.stack.product(inner, (down,), pairs, 1, routing[last.sort], last)
        splits = last.splits
        if self.finish is not None:
            rows, splits = self.finish(rows.sum(0).to(hidden.dtype)), 1
        return self._summed(rows, index, weights, out, splits)

    def _summed(self, rows: Tensor, index: Tensor, weights: Tensor, out: Tensor, splits: int) -> Tensor:
        """Rows [splits, P, H] weighted and summed by token: out [T, H]."""
        import triton

        from moeq_kernels.gpu.sums import weighted_sum

        block, (tokens, each) = 256, index.shape
        grid = (tokens, triton.cdiv(out.shape[1], block))
        weighted_sum[grid](
            rows, index, weights, out, tokens * each, self.stack.experts, each, out.shape[1], splits, BLOCK=block
        )
        return out

    def _slots(self) -> list[tuple[tuple[int, ...], Settings | None]]:
        """The projections of each launch with the settings that were asked for, DOWN last."""
        before = list(range(len(self.names) - 1))
        if self.activation:  # the gate first, whatever the order of the names
            first = [tuple(sorted(before, key=lambda slot: self.names[slot] != "gate_proj"))]
        else:
            first = [(slot,) for slot in before]
        return [*((one, self.settings[0]) for one in first), ((len(before),), self.settings[1])]

    def _routing(
        self, index: Tensor, pairs: int, chosen: Sequence[Settings]
    ) -> dict[bool, tuple[str, Tensor, Tensor, Tensor]]:
        """How programs find their rows, sorted (True) and one by one."""
        routing = {False: ("rows", index, index, index)}
        if any(one.sort for one in chosen):
            routing[True] = ("sorted", index, *sort_by_expert(index, self.stack.experts))
        return routing

    def _inner(
        self,
        hidden: Tensor,
        pairs: int,
        each: int,
        slots: Sequence[tuple[int, ...]],
        settings: Settings,
        routing: dict[bool, tuple[str, Tensor, Tensor, Tensor]],
    ) -> Tensor:
        """What DOWN is given, [P, I]: in one launch where the activation is known, else a launch a projection."""
        settings = replace(settings, splits=1)
        made = [
            self.stack.product(
                hidden, some, pairs, each, routing[settings.sort], settings, self.activation or "", hidden.dtype
            )[0]
            for some in slots
        ]
        if self.activation:
            return made[0]
        return self.gate({self.names[some[0]]: one for some, one in zip(slots, made, strict=True)}).contiguous()


def _by_slot(layer: LayerOfExperts, names: Sequence[str]) -> tuple[list[list[Matrix]], list[list[Tensor | None]]]:
    """Matrices and biases [E][S]."""
    biases = layer.biases or [{} for _ in layer.matrices]
    return (
        [[expert[name] for name in names] for expert in layer.matrices],
        [[expert.get(name) for name in names] for expert in biases],
    )


class TritonLinear:
    """A `PreparedLinear`."""

    def __init__(self, matrix: Matrix, bias: Tensor | None) -> None:
        self.stack = Stack(Stored([[matrix]], [[bias]]))
        self.settings: Settings | None = None

    @property
    def nbytes(self) -> int:
        return self.stack.stored.nbytes

    def matrix(self) -> Matrix:
        return self.stack.stored.matrix(0, 0)

    def some(self, rows: Tensor) -> Matrix:
        return self.stack.stored.matrix(0, 0, rows)

    def __call__(self, rows: Tensor) -> Tensor:
        if not len(rows):
            return rows.new_empty((0, self.stack.stored.shapes[0][0]))
        rows = rows.contiguous()
        settings = self.settings or self.stack.settings((0,), len(rows))
        none = self.stack.stored.table  # not read
        how, whole = ("one", none, none, none), settings.splits == 1
        dtype = rows.dtype if whole else torch.float32
        with launching_on(self.stack.device):
            made = self.stack.product(rows, (0,), len(rows), 1, how, settings, dtype=dtype)
        return made[0] if whole else made.sum(0).to(rows.dtype)


class TritonKernel:
    """Grouped products with any mix of widths, grids and trellis codes as they are stored, on one GPU."""

    name = "triton"

    def refusal(self, layer: LayerOfExperts) -> str | None:
        every = [one for expert in layer.matrices for one in expert.values()]
        try:
            shapes_of([[expert[name] for name in layer.matrices[0]] for expert in layer.matrices])
        except (KeyError, ValueError):
            return "its experts differ in shape"
        return refusal(every)

    def layer(self, layer: LayerOfExperts) -> TritonLayer:
        return TritonLayer(layer)

    def linear(self, matrix: Matrix, bias: Tensor | None = None) -> TritonLinear:
        why = refusal([matrix])
        if why is not None:
            raise ValueError(why)
        return TritonLinear(matrix, bias)


def refusal(matrices: Sequence[Matrix], device: torch.device | None = None) -> str | None:
    """Why these cannot be computed with on a device, where they lie if it is None; None if they can."""
    if not has_triton():
        return "Triton is not installed"
    devices = {one.device if isinstance(one, Tensor) else one.codes.device for one in matrices}
    if device is not None:
        devices = {device}
    if len(devices) > 1:
        return "they lie on several devices"
    if not interpreted() and next(iter(devices)).type != "cuda":
        return "they do not lie on a GPU" if torch.cuda.is_available() else "there is no CUDA device"
    kinds = {one.dtype for one in matrices if isinstance(one, Tensor)}
    if len(kinds) > 1 or not kinds <= set(DTYPES):
        return f"dense matrices are {' and '.join(sorted(str(kind) for kind in kinds))}"
    return too_old()
