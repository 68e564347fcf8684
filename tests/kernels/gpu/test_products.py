"""Products on the GPU, or in Triton's interpreter, against float64 of the dequantized matrices.

Tolerances, of the largest output: float32 1e-5, float16 2e-3, bfloat16 2e-2: the rounding of what lies between the two
products of an expert and of the result, and, where groups are no multiples of 128 inputs, of each weight.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from kernels.gpu.packed_matrices import Maker, Matrix, exact
from packed_layers import trellis_of
from second_device import CPU, DEVICE, SecondDevice

from moeq_kernels.description import DOWN, LayerOfExperts
from moeq_kernels.gpu import kernel, unpacked
from moeq_kernels.gpu.kernel import TritonKernel, TritonLayer, sort_by_expert
from moeq_kernels.gpu.settings import Settings, Shape, candidates, choose, rows_to_unpack, usual, variants, write
from moeq_kernels.gpu.stored import Stored
from moeq_kernels.packing import unpack
from moeq_kernels.streams import launching_on

# the interpreter's sigmoid of rows that are no token's
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning")
TOLERANCES = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}
ROWS = Settings(sort=False, block_n=64, block_m=8)
BLOCKS = Settings(sort=True, block_n=64, block_m=16)
PARTS = Settings(sort=False, block_n=32, block_m=8, warps=2, parts=2)
ACTIVATIONS = {
    "silu": torch.nn.functional.silu,
    "gelu": torch.nn.functional.gelu,
    "gelu_pytorch_tanh": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "relu": torch.relu,
    "relu2": lambda x: torch.relu(x) ** 2,
}
UNPACKED = [(1, torch.float32), (1, torch.bfloat16), (1 << 20, torch.float16)]  # the long form's
CASES = [  # bits, group, symmetric, nested
    (1, 128, False, False), (2, 128, False, False), (2, 128, True, False), (3, 128, False, False),
    (4, 128, False, False), (4, -1, True, False), (5, 128, False, False), (6, -1, False, False),
    (7, 128, True, False), (8, -1, True, False), (8, 128, False, False), (2, 128, False, True), (3, 32, False, True),
    (4, 24, False, False), (3, 64, True, False), (1, 16, False, False), (8, 24, False, False),
]  # fmt: skip


def error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """The largest difference, of the largest value."""
    assert found.shape == wanted.shape
    assert torch.isfinite(found).all()
    return float((found.double() - wanted).abs().max() / wanted.abs().max())


@pytest.fixture(autouse=True)
def _runs(place: str) -> None:
    """Triton is there."""


@pytest.mark.cases(2)
@pytest.mark.parametrize(("bits", "group", "symmetric", "nested"), CASES)
def test_a_matrix_alone(place: str, bits: int, group: int, symmetric: bool, nested: bool) -> None:
    maker = Maker(bits, place)
    for inputs, dtype, settings in (
        (256, torch.float16, BLOCKS), (200, torch.float32, ROWS), (384, torch.bfloat16, BLOCKS),
        (256, torch.float32, PARTS),
    ):  # fmt: skip
        matrix, bias = maker.packed(40, inputs, bits, group, symmetric, nested), maker.rows(40)
        linear = TritonKernel().linear(matrix, bias)
        linear.settings = settings
        rows = maker.rows(3, inputs, dtype=dtype)
        found = linear(rows)
        assert found.dtype == dtype
        assert error(found, rows.double() @ exact(matrix).T + bias.double()) < TOLERANCES[dtype]


def test_dense_matrices_and_splits(place: str) -> None:
    maker = Maker(0, place)
    for matrix in (maker.rows(40, 600, dtype=torch.bfloat16), maker.rows(40, 600), maker.packed(40, 600, 3, 128)):
        for settings in (BLOCKS, Settings(sort=True, block_n=64, block_m=16, splits=3)):
            linear = TritonKernel().linear(matrix, None)
            linear.settings = settings
            rows = maker.rows(17, 600)
            assert error(linear(rows), rows.double() @ exact(matrix).T) < TOLERANCES[torch.float32]
    assert linear(rows[:0]).shape == (0, 40)


def layer_of(matrices: list[dict[str, Matrix]], activation: str = "silu", named: bool = True) -> LayerOfExperts:
    """Experts with a gate; named: whether the kernel is told its activation."""
    act = ACTIVATIONS[activation]

    def gate(parts: dict[str, torch.Tensor]) -> torch.Tensor:
        up = parts["up_proj"]
        if "gate_proj" not in parts:
            return act(up.float()).to(up.dtype)
        return act(parts["gate_proj"].float()).to(up.dtype) * up

    return LayerOfExperts(matrices=matrices, biases=[], gate=gate, activation=activation if named else None)


def reference(layer: LayerOfExperts, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """The layer in float64."""
    out = torch.zeros_like(hidden, dtype=torch.float64)
    biases = layer.biases or [{} for _ in layer.matrices]
    for expert, (matrices, added) in enumerate(zip(layer.matrices, biases, strict=True)):
        for token, place in (index == expert).nonzero().tolist():
            row = hidden[token].double()
            product = {
                name: exact(matrix) @ row + (added[name].double() if name in added else 0.0)
                for name, matrix in matrices.items()
                if name != DOWN
            }
            inner = layer.gate({name: one.unsqueeze(0) for name, one in product.items()}).squeeze(0).double()
            made = exact(matrices[DOWN]) @ inner + (added[DOWN].double() if DOWN in added else 0.0)
            made = made if layer.finish is None else layer.finish(made)
            out[token] += weights[token, place].double() * made
    return out


def prepared(layer: LayerOfExperts, settings: Settings) -> TritonLayer:
    assert TritonKernel().refusal(layer) is None
    made = TritonKernel().layer(layer)
    made.settings = (settings, settings)
    return made


def check(
    layer: LayerOfExperts, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor, settings: Settings
) -> None:
    found = prepared(layer, settings)(hidden, index, weights)
    assert found.dtype == hidden.dtype
    assert error(found, reference(layer, hidden, index, weights)) < TOLERANCES[hidden.dtype]


def mixed(maker: Maker, hidden: int, inner: int, group: int = 128) -> list[dict[str, Matrix]]:
    """Five experts whose matrices have widths of their own, one dense."""
    widths = [(2, 3, 4), (8, 1, 2), (4, 4, 4), (16, 16, 16), (3, 16, 8)]

    def made(rows: int, inputs: int, bits: int) -> Matrix:
        if bits == 16:
            return 0.1 * maker.rows(rows, inputs, dtype=torch.float16)
        return maker.packed(rows, inputs, bits, group, symmetric=bits == 4)

    return [
        {"gate_proj": made(inner, hidden, a), "up_proj": made(inner, hidden, b), DOWN: made(hidden, inner, c)}
        for a, b, c in widths
    ]


def short(*cases: tuple[object, ...], of: Iterable[tuple[object, ...]]) -> list[Any]:
    """All of them, those that are not named in `make test-full` alone: the interpreter takes seconds for each."""
    return [
        pytest.param(*one, marks=[] if one in cases or torch.cuda.is_available() else pytest.mark.full) for one in of
    ]


ROUTINGS: dict[str, Callable[[torch.Generator], torch.Tensor]] = {
    "spread": lambda generator: torch.rand(6, 5, generator=generator).topk(2).indices,
    "one expert has all": lambda _: torch.full((18, 1), 3),
    "experts that are none": lambda generator: torch.tensor([[0, 5], [7, 2], [-1, 5], [1, -7]]),
    "one token": lambda _: torch.tensor([[4, 1]]),
}


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("routing", "dtype"),
    short(
        *((routing, torch.float32) for routing in ROUTINGS),
        ("spread", torch.float16), ("one token", torch.float16), ("one expert has all", torch.bfloat16),
        of=itertools.product(ROUTINGS, TOLERANCES),
    ),
)  # fmt: skip
def test_a_layer_of_mixed_widths(place: str, routing: str, dtype: torch.dtype) -> None:
    maker = Maker(3, place)
    hidden, inner, group = (128, 128, 128) if dtype != torch.float32 else (72, 40, 24)
    layer = layer_of(mixed(maker, hidden, inner, group))
    index = ROUTINGS[routing](maker.generator).to(place)
    rows, weights = maker.rows(len(index), hidden, dtype=dtype), maker.rows(*index.shape, dtype=dtype).abs()
    check(layer, rows, index, weights, ROWS if routing == "one token" else BLOCKS)


def grid() -> Iterator[tuple[int, int, Settings, torch.dtype]]:
    """Numbers of tokens, groups, settings and dtypes: all of them on a GPU; in the interpreter, where one takes up to
    minutes, every number with every group, settings and dtypes going round, so that every two of four meet."""
    cuts = (ROWS, BLOCKS, Settings(sort=True, block_n=32, block_m=32, splits=2))
    for i, tokens in enumerate((1, 2, 3, 15, 16, 17, 33, 64)):
        for j, group in enumerate((128, 64, 24, -1)):
            for k, settings in enumerate(cuts):
                for m, dtype in enumerate(TOLERANCES):
                    if torch.cuda.is_available() or (k == (i + j) % 3 and m == (i + 2 * j) % 3):
                        yield tokens, group, settings, dtype


@pytest.mark.full
@pytest.mark.parametrize(("tokens", "group", "settings", "dtype"), grid())
def test_many_tokens_groups_and_settings(
    place: str, tokens: int, group: int, settings: Settings, dtype: torch.dtype
) -> None:
    maker = Maker(tokens, place)
    layer = layer_of(mixed(maker, 200, 136, group))
    index = torch.rand(tokens, 7, generator=maker.generator).topk(3).indices.to(place)
    check(layer, maker.rows(tokens, 200, dtype=dtype), index, maker.rows(tokens, 3).abs(), settings)


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("activation", "gated"),
    short(*((one, True) for one in ACTIVATIONS), ("relu2", False), of=itertools.product(ACTIVATIONS, (True, False))),
)
def test_activations_in_the_same_pass(place: str, activation: str, gated: bool) -> None:
    maker = Maker(4, place)
    names = ["gate_proj", "up_proj"] if gated else ["up_proj"]
    matrices: list[dict[str, Matrix]] = [
        {DOWN: maker.packed(48, 32, 4, -1)} | {name: maker.packed(32, 48, 3, 16) for name in names} for _ in range(2)
    ]
    rows, index = 0.3 * maker.rows(2, 48), torch.tensor([[0], [1]], device=place)
    told, untold = layer_of(matrices, activation), layer_of(matrices, activation, named=False)
    assert prepared(told, ROWS).activation
    assert prepared(untold, ROWS).activation is None
    check(told, rows, index, torch.ones(2, 1, device=place), ROWS)
    check(untold, rows, index, torch.ones(2, 1, device=place), ROWS)


@pytest.mark.cases(0)
def test_biases_other_names_and_what_finishes_rows(place: str) -> None:
    maker = Maker(5, place)
    names = {"up_proj": (32, 48), "gate_proj": (32, 48), "third": (32, 48), DOWN: (48, 32)}
    matrices = [{name: maker.packed(*shape, 4, -1) for name, shape in names.items()} for _ in range(3)]
    biases = [{name: maker.rows(shape[0]) for name, shape in names.items()} for _ in range(3)]
    layer = LayerOfExperts(
        matrices=matrices,
        biases=biases,
        gate=lambda parts: torch.tanh(parts["gate_proj"]) * parts["up_proj"] + parts["third"],
        activation="silu",  # of two of three projections: not the kernel's
        finish=torch.sin,
    )
    index = torch.tensor([[0, 1], [2, 3], [1, 0]], device=place)
    for settings in (ROWS, BLOCKS):
        check(layer, 0.2 * maker.rows(3, 48), index, maker.rows(3, 2).abs(), settings)


def test_rows_that_are_looked_up_ask_a_device_for_nothing() -> None:
    """So that embeddings can be captured in a CUDA graph: no number of theirs is read, nothing comes from the CPU."""

    class Asked(SecondDevice):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            asked.append(str(func))
            return super().__torch_dispatch__(func, types, args, kwargs)

    asked: list[str] = []
    index = torch.tensor([5, 0, 31, 5])
    for bits, symmetric in ((4, False), (3, False), (8, True)):
        matrix = Maker(bits).packed(32, 144, bits, 16, symmetric)
        stored = Stored([[matrix]], [[None]])
        with Asked() as device:
            stored.buffer, there = stored.buffer.to(DEVICE), index.to(DEVICE)
            device.moves.clear()
            asked.clear()
            found = stored.matrix(0, 0, there).dequantize()
            assert not device.moves
            assert not [name for name in asked if "_local_scalar_dense" in name]
            assert torch.equal(found.to(CPU), matrix.dequantize()[index])


def test_no_tokens(place: str) -> None:
    maker = Maker(6, place)
    made = TritonKernel().layer(layer_of(mixed(maker, 64, 32)))
    none = torch.zeros((0, 2), dtype=torch.int64, device=place)
    assert made(maker.rows(0, 64), none, none.float()).shape == (0, 64)
    nowhere = torch.tensor([[5, -1], [-9, 2**40]], device=place)
    for settings in (ROWS, replace(ROWS, persistent=2), BLOCKS):
        made.settings = (settings, settings)
        assert not made(maker.rows(2, 64), nowhere, torch.ones(2, 2, device=place)).any()


@pytest.mark.parametrize("most", [0, 4096])
@pytest.mark.parametrize(("pairs", "experts"), [(1, 1), (70, 5), (200, 130)])
def test_sorting(place: str, most: int, pairs: int, experts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows by expert, in order within one; as torch sorts, by comparing (4096) and by torch's own sort (0)."""
    monkeypatch.setattr(kernel, "MOST_COMPARED", most)
    generator = torch.Generator().manual_seed(pairs)
    index = torch.randint(-2, experts + 3, (pairs,), generator=generator).to(place)
    order, starts = sort_by_expert(index, experts)
    keys = torch.where((index < 0) | (index > experts), experts, index)
    assert order.dtype == starts.dtype == torch.int32
    assert order.tolist() == torch.sort(keys, stable=True).indices.tolist()
    assert starts.tolist() == [int((keys < expert).sum()) for expert in range(experts + 1)]


class Recorded:
    """A Triton function whose launches are counted."""

    def __init__(self, function: object, launches: list[tuple[int, ...]]) -> None:
        self.function, self.launches = function, launches

    def __getitem__(self, grid: tuple[int, ...]) -> object:
        self.launches.append(tuple(grid))
        return self.function[grid]  # type: ignore[index]


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    from moeq_kernels.gpu import programs, sums

    found: list[tuple[int, ...]] = []
    for of, name in ((sums, "sort_rows"), (programs, "grouped"), (sums, "weighted_sum")):
        monkeypatch.setattr(of, name, Recorded(getattr(of, name), found))
    return found


def test_launches_follow_from_shapes_alone(
    place: str, launches: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four launches whatever the routing, as many programs; the routing's numbers are asked for nowhere."""
    maker = Maker(7, place)
    made = prepared(layer_of(mixed(maker, 64, 32)), BLOCKS)
    rows, weights = maker.rows(8, 64), torch.ones(8, 2, device=place)
    asked = []
    for name in ("item", "tolist", "nonzero", "__bool__", "__int__", "__index__", "__len__"):
        whole = getattr(torch.Tensor, name)
        monkeypatch.setattr(torch.Tensor, name, lambda *given, n=name, w=whole: (asked.append(n), w(*given))[1])
    seen = []
    for index in (torch.zeros((8, 2), dtype=torch.int64), torch.full((8, 2), 9), torch.arange(16).view(8, 2) % 5):
        launches.clear()
        made(rows, index.to(place), weights)
        seen.append(tuple(launches))
    assert not [name for name in asked if name != "__len__"]
    assert len({*seen}) == 1
    assert [len(grid) for grid in seen[0]] == [1, 3, 3, 2]
    assert seen[0][1] == (1, 16 // 16 + 5, 1), "rows by block, and one more block an expert"


def test_programs_run_on_the_gpu_of_their_matrices(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton runs what it is given on the current GPU, wherever that lies: theirs is the current one at a launch."""
    from moeq_kernels.gpu import programs, sums

    current, seen = ["another"], dict[str, list[str]]()

    class Noted(Recorded):
        def __getitem__(self, grid: tuple[int, ...]) -> object:
            self.launches.append(current[-1])  # type: ignore[arg-type]
            return self.function[grid]  # type: ignore[index]

    @contextmanager
    def on(device: torch.device) -> Iterator[None]:
        current.append(device.type)
        yield
        current.pop()

    for of, name in ((sums, "sort_rows"), (sums, "weighted_sum"), (programs, "grouped"), (programs, "unpack")):
        seen[name] = []
        monkeypatch.setattr(of, name, Noted(getattr(of, name), seen[name]))  # type: ignore[arg-type]
    monkeypatch.setattr(kernel, "launching_on", on)
    maker = Maker(15, place)
    made = prepared(layer_of([{name: maker.packed(16, 16, 4, -1) for name in ("up_proj", DOWN)}], "relu"), BLOCKS)
    rows, index = maker.rows(2, 16), torch.zeros((2, 1), dtype=torch.int64, device=place)
    for made.unpack_rows in (3, 1):
        made(rows, index, torch.ones(2, 1, device=place))
    TritonKernel().linear(maker.packed(16, 16, 4, -1))(rows)
    assert {name: (len(at), {*at}) for name, at in seen.items()} == {
        "sort_rows": (1, {place}), "weighted_sum": (2, {place}), "grouped": (3, {place}), "unpack": (2, {place}),
    }  # fmt: skip


def test_the_current_gpu_is_another_one_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device", nullcontext)
    with launching_on(torch.device("cuda", 1)) as entered, launching_on(torch.device("cpu")) as nothing:
        assert (entered, nothing) == (torch.device("cuda", 1), None)


def test_the_form_for_one_token_sorts_nothing(place: str, launches: list[tuple[int, ...]]) -> None:
    maker = Maker(8, place)
    made = TritonKernel().layer(layer_of(mixed(maker, 64, 32)))
    made(maker.rows(1, 64), torch.tensor([[3, 0]], device=place), torch.ones(1, 2, device=place))
    assert launches == [(2, 2, 1), (1, 2, 1), (1, 1)]


@pytest.mark.cases(0)
@pytest.mark.parametrize(
    ("hidden", "block_n", "numbers"), [(72, 64, (1, 5, 60)), pytest.param(128, 32, (1, 5, 300), marks=pytest.mark.full)]
)
@pytest.mark.parametrize(
    ("routing", "sort"),
    short(
        ("spread", True),
        ("experts that are none", False),
        ("one token", False),
        of=itertools.product(ROUTINGS, (True, False)),
    ),
)
def test_persistent_programs_store_the_same(
    place: str, routing: str, sort: bool, hidden: int, block_n: int, numbers: tuple[int, ...]
) -> None:
    """Any number of programs, more than there is work too: the same bits as with a program an item."""
    maker = Maker(11, place)
    matrices = mixed(maker, hidden, 144)
    index = ROUTINGS[routing](maker.generator).to(place)
    if hidden == 72:  # items take the interpreter long: 3 tokens are enough, or 3 blocks of one expert's rows
        matrices = [{name: one[name] for name in ("up_proj", DOWN)} for one in matrices]
        index = index if sort else index[:3]
    layer = layer_of(matrices)
    rows, weights = maker.rows(len(index), hidden), maker.rows(*index.shape).abs()
    alone = Settings(sort=sort, block_n=block_n, block_m=8, splits=2)
    wanted = prepared(layer, alone)(rows, index, weights)
    assert error(wanted, reference(layer, rows, index, weights)) < TOLERANCES[torch.float32]
    for programs in numbers:
        assert torch.equal(prepared(layer, replace(alone, persistent=programs))(rows, index, weights), wanted)


@pytest.mark.cases(0)
@pytest.mark.parametrize(("splits", "dtype"), [(2, torch.float32), (1, torch.float16)])
def test_several_tiles_a_step_store_the_same(place: str, splits: int, dtype: torch.dtype) -> None:
    """The same bits as tile by tile, where the last step has fewer tiles than it could and where a step is all."""
    maker = Maker(13, place)
    layer = layer_of([
        {"gate_proj": maker.packed(32, 384, bits, 128), "up_proj": maker.packed(32, 384, other, 128),
         DOWN: maker.rows(384, 32)}
        for bits, other in ((2, 2), (3, 2))
    ])  # fmt: skip
    index = torch.tensor([[0], [1]], device=place)
    rows, weights = maker.rows(2, 384, dtype=dtype), maker.rows(2, 1).abs()
    alone = Settings(sort=False, block_n=32, block_m=8, splits=splits)
    wanted = prepared(layer, alone)(rows, index, weights)
    assert error(wanted, reference(layer, rows, index, weights)) < TOLERANCES[dtype]
    for tiles in (2, 4):
        assert torch.equal(prepared(layer, replace(alone, tiles=tiles))(rows, index, weights), wanted)


@pytest.mark.cases(1)
@pytest.mark.parametrize(("splits", "parts", "tiles", "persistent"), [(1, 4, 1, 0), (2, 2, 1, 3), (1, 2, 4, 0)])
def test_parts_of_inputs_within_a_program(place: str, splits: int, parts: int, tiles: int, persistent: int) -> None:
    """Each by warps of its own: two matrices in one loop and apart, grids, trellis codes and dense ones, with biases; a
    step with fewer tiles than it could have."""
    maker, inputs = Maker(17, place), 512
    kinds = ((2, 2, 128), (3, 4, 32), (16, 1, 128))
    walked = trellis_of(32, inputs, 2, 10).map(lambda part: part.to(place))
    layer = layer_of([
        {"gate_proj": maker.rows(32, inputs) if bits == 16 else maker.packed(32, inputs, bits, group),
         "up_proj": maker.packed(32, inputs, other, group) if bits < 16 else walked, DOWN: maker.rows(inputs, 32)}
        for bits, other, group in kinds
    ])  # fmt: skip
    layer = replace(layer, biases=[{"up_proj": maker.rows(32)} for _ in kinds])
    rows, weights = maker.rows(2, inputs), maker.rows(2, 3).abs()
    index = torch.tensor([[0, 1, 2], [2, 1, 0]], device=place)
    alone = Settings(sort=False, block_n=32, block_m=8)
    made = prepared(layer, alone)
    made.settings = replace(alone, parts=parts, tiles=tiles, warps=parts, persistent=persistent), alone
    assert error(made(rows, index, weights), reference(layer, rows, index, weights)) < TOLERANCES[torch.float32]
    linear = TritonKernel().linear(layer.matrices[0]["up_proj"])
    linear.settings = replace(made.settings[0], splits=splits)
    wanted = rows.double() @ exact(layer.matrices[0]["up_proj"]).T
    assert error(linear(rows), wanted) < TOLERANCES[torch.float32]
    linear.settings = replace(linear.settings, splits=3)
    with pytest.raises(ValueError, match=f"512 inputs have no 3 splits of {parts} parts of whole tiles"):
        linear(rows)


def test_persistent_programs_share_work_by_bytes(place: str) -> None:
    """Every item once, in order; no program reads more than its part and one item."""
    from kernels.gpu.numbers_kernel import stretches

    items, costs = torch.tensor([6, 0, 12, 3, 24], dtype=torch.int32), torch.tensor([8, 3, 2, 16, 4], dtype=torch.int32)
    each = [cost for count, cost in zip(items.tolist(), costs.tolist(), strict=True) for _ in range(count)]
    for programs in (1, 4, 7, 100):
        found = stretches(items.to(place), costs.to(place), programs)
        assert [item for first, last in found for item in range(first, last)] == [*range(len(each))]
        most = max(sum(each[first:last]) for first, last in found)
        assert most <= sum(each) / programs + max(each)
    maker = Maker(12, place)
    matrices = [{name: maker.packed(128, 128, bits, -1, True) for name in ("up_proj", DOWN)} for bits in (2, 8)]
    stack = TritonKernel().layer(layer_of(matrices, "relu")).stack
    assert stack.costs((0,)).tolist() == [128 * 2 // 8 + 2, 128 + 2], "bytes of a row: codes and a scale"


@pytest.mark.cases(0)
@pytest.mark.parametrize(
    ("scratch", "dtype"),
    [
        (1, torch.float16), (1 << 20, torch.float32), (1 << 20, torch.bfloat16),
        *(pytest.param(*one, marks=pytest.mark.full) for one in UNPACKED),
    ],
)  # fmt: skip
def test_unpacked_experts_give_the_same(
    place: str, scratch: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Above a number of rows an expert, in memory for one expert at a time and for all: as the fused products."""
    monkeypatch.setattr(unpacked, "SCRATCH_BYTES", scratch)
    maker = Maker(13, place)
    layer = replace(layer_of(mixed(maker, 144, 128, 48)), biases=[{DOWN: maker.rows(144)} for _ in range(5)])
    made = prepared(layer, BLOCKS)
    index = torch.tensor([[0, 5], [-1, 2], [4, 3], [3, 2]], device=place)
    rows, weights = maker.rows(4, 144, dtype=dtype), maker.rows(4, 2).abs()
    made.unpack_rows = 1
    asked: list[int] = []
    whole = made.stack.unpacked
    monkeypatch.setattr(made.stack, "unpacked", lambda *given: (asked.append(len(given[1])), whole(*given))[1])
    found = made(rows, index, weights)
    assert asked == ([1] * 12 if scratch == 1 else [4] * 3), "experts 0, 2, 3 and 4"
    assert error(found, reference(layer, rows, index, weights)) < TOLERANCES[dtype]
    made.unpack_rows = 3
    asked.clear()
    made(rows, index, weights)
    assert not asked, "8 rows of 5 experts are fewer than 3 an expert"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_grouped_products_of_torch(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """The loop, and torch's grouped product where it is taken, as on a GPU."""
    maker = Maker(14)
    rows, weights = maker.rows(9, 16, dtype=dtype), maker.rows(3, 24, 16, dtype=dtype)
    wanted = torch.cat([rows[:4] @ weights[0].T, rows[4:5] @ weights[1].T, rows[5:] @ weights[2].T])
    assert torch.equal(unpacked.grouped_product(rows, weights, [4, 1, 4]), wanted)
    assert torch.equal(unpacked.grouped_product(rows[:5], weights, [4, 1, 0]), wanted[:5])
    torch.testing.assert_close(unpacked.with_torchs_own(rows, weights, [4, 1, 4]), wanted)


@pytest.mark.cases(6)
@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("bits", range(1, 9))
def test_numbers_of_codes_are_exact(place: str, bits: int, dtype: torch.dtype) -> None:
    """The codes themselves, in the order of the rows and inputs."""
    from kernels.gpu.numbers_kernel import numbers

    maker = Maker(bits, place)
    matrix = maker.packed(16, 128, bits, -1)
    linear = TritonKernel().linear(matrix)
    found = numbers(linear, bits, dtype)
    codes = unpack(matrix.codes, bits, 128).view(16, 128)
    assert torch.equal(found.cpu().double(), codes.cpu().double())


def test_what_it_refuses(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    maker = Maker(9, place)
    refusal, fine = TritonKernel().refusal, mixed(maker, 64, 32)
    assert refusal(layer_of(fine)) is None
    assert refusal(layer_of([*fine, {DOWN: maker.packed(64, 32, 4, -1)}])) == "its experts differ in shape"
    dense = {name: maker.rows(*size, dtype=torch.float64) for name, size in (("up_proj", (32, 64)), (DOWN, (64, 32)))}
    assert refusal(layer_of([dense])) == "dense matrices are torch.float64"
    with pytest.raises(ValueError, match="float64"):
        TritonKernel().linear(dense[DOWN])
    with monkeypatch.context() as older:
        older.setattr("triton.__version__", "3.4.0")
        older.delattr("triton.constexpr_function")
        assert refusal(layer_of(fine)) == "Triton 3.4.0 is too old, 3.5 or later is wanted"
        with pytest.raises(ValueError, match=r"Triton 3\.4\.0 is too old"):
            TritonKernel().linear(maker.packed(8, 16, 4, -1))
    monkeypatch.setattr(kernel, "has_triton", lambda: False)
    assert refusal(layer_of(fine)) == "Triton is not installed"
    with pytest.raises(ValueError, match="Triton is not installed"):
        TritonKernel().linear(maker.packed(8, 16, 4, -1))


def test_without_a_gpu_and_the_interpreter_it_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert TritonKernel().refusal(layer_of(mixed(Maker(10), 64, 32))) == "there is no CUDA device"


def test_settings_by_shape_and_from_a_tuned_table(tmp_path: object, monkeypatch: pytest.MonkeyPatch) -> None:
    from moeq_kernels.gpu import settings

    monkeypatch.setattr(settings, "TUNED", tmp_path)
    shape = Shape(experts=128, rows=768, inputs=2048, widths=1 << 2 | 1 << 16, pairs=48, two=True)
    assert shape.key == "128x768x2048x2/2+16 bits/64 rows"
    assert not usual(shape).sort
    assert usual(shape).splits == 1, "an activation needs whole sums"
    assert usual(Shape(experts=8, rows=1024, inputs=14336, widths=4, pairs=2, two=False)).splits == 8
    assert usual(Shape(experts=8, rows=4096, inputs=1024, widths=4, pairs=512, two=False)).block_m == 64
    walks, mixtral = 1 << 10, Shape(experts=8, rows=14336, inputs=4096, widths=4, pairs=2, two=True)
    assert (usual(mixtral).block_n, usual(mixtral).warps) == (32, 1)
    assert not usual(replace(mixtral, widths=walks)).ahead
    assert usual(replace(mixtral, widths=walks, rows=768)).ahead
    assert {usual(replace(mixtral, widths=walks, rows=rows, near=True)).warps for rows in (768, 14336)} == {2, 4}
    assert choose(shape, "NVIDIA H200") == usual(shape)
    other = Settings(sort=False, block_n=32, block_m=8, warps=2, stages=4)
    assert write("NVIDIA H200", {shape.key: other}).name == "nvidia-h200.json"
    assert choose(shape, "NVIDIA H200") == other
    assert choose(shape, "NVIDIA H100") == choose(shape, None) == usual(shape)
    assert other in candidates(shape)
    assert rows_to_unpack("NVIDIA H200") == rows_to_unpack(None) == settings.UNPACK_ROWS
    again = replace(other, persistent=2)
    write("NVIDIA H200", {"another": again}, unpack_rows=192)
    write("NVIDIA H200", {"a third": other})
    assert rows_to_unpack("NVIDIA H200") == 192
    assert settings.tuned("NVIDIA H200").settings == {shape.key: other, "another": again, "a third": other}
    assert {one.persistent for one in variants(shape, other)} == {0, 1, 2, 4}
    assert {one.tiles for one in candidates(shape)} == {1, 2, 4}
    assert {one.parts for one in candidates(shape)} == {1, 2, 4, 8}
    assert {one.parts for one in candidates(replace(shape, inputs=768))} == {1, 2}, "of 6 tiles"
    assert {one.parts for one in candidates(replace(shape, pairs=128 * 32))} == {1}
    parted = Settings(sort=False, block_n=16, block_m=8, warps=2, stages=2, parts=2)
    assert parted.smaller() == replace(parted, warps=1, parts=1)
    one = replace(shape, two=False, inputs=1536)
    assert {some.splits for some in variants(one, replace(parted, parts=4))} == {1}, "12 tiles: no half has 4 parts"
    with pytest.raises(ValueError, match="blocks of 32 x 1 "):
        Settings(sort=True, block_n=32, block_m=1)


def test_settings_that_do_not_fit_the_gpu_become_smaller(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer stages, then fewer rows a block; asked once for each kind of launch; else one line."""
    errors = pytest.importorskip("triton.runtime.errors", reason="Triton is not installed")
    stack = kernel.Stack(Stored([[torch.ones(64, 64)]], [[None]]))
    tried: list[Settings] = []

    def launched(*given: Any) -> torch.Tensor:
        tried.append(given[5])
        if given[5].stages > 2 or given[5].block_n > most:
            raise errors.OutOfResources(300_000, 232_448, "shared memory")
        return torch.ones(1)

    monkeypatch.setattr(stack, "_launched", launched)
    x, none = torch.ones(1, 64), torch.ones(1)
    settings = Settings(sort=False, block_n=64, block_m=8, stages=6)
    for most, seen in ((32, [(6, 64), (3, 64), (2, 64), (2, 32), (2, 32)]), (8, [(6, 64), (3, 64), (2, 64)])):
        tried.clear()
        stack._fitting.clear()
        if most == 32:
            for _ in range(2):
                assert stack.product(x, (0,), 1, 1, ("one", none, none, none), settings) is not None
        else:
            with pytest.raises(ValueError, match=r"no room for the kernel.*shared memory, Required: 300000"):
                stack.product(x, (0,), 1, 1, ("one", none, none, none), settings)
        assert [(one.stages, one.block_n) for one in tried][: len(seen)] == seen


@pytest.fixture
def synchronisation_is_an_error() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    yield
    torch.cuda.set_sync_debug_mode("default")


@pytest.mark.cuda
@pytest.mark.usefixtures("synchronisation_is_an_error")
@pytest.mark.parametrize("tokens", [1, 4, 64, 4096])
def test_a_layer_in_a_cuda_graph(tokens: int) -> None:
    """Captured with one routing and replayed with another, without a synchronisation; the same as without a graph."""
    torch.cuda.set_sync_debug_mode("default")
    maker = Maker(tokens, "cuda")
    layer = layer_of(mixed(maker, 512, 384))
    made = TritonKernel().layer(layer)
    made.unpack_rows = tokens + 1  # which asks how many rows each expert has
    index = torch.zeros((tokens, 2), dtype=torch.int64, device="cuda")
    hidden, weights = maker.rows(tokens, 512, dtype=torch.float16), maker.rows(tokens, 2).abs()
    torch.cuda.set_sync_debug_mode("error")
    made(hidden, index, weights)  # compiles
    torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = made(hidden, index, weights)
    index.copy_(torch.rand(tokens, 7, generator=maker.generator).topk(2).indices)
    graph.replay()
    some = slice(0, 64)
    wanted = reference(layer, hidden[some], index[some], weights[some])
    assert error(out[some], wanted) < TOLERANCES[torch.float16]
    assert torch.equal(out, made(hidden, index, weights))


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("tokens", [1, 7, 64, 4096])
def test_a_layer_on_a_gpu(tokens: int, dtype: torch.dtype) -> None:
    """As large as real ones, with the settings that are chosen; the same bits a second time."""
    maker = Maker(tokens, "cuda")
    layer = layer_of(mixed(maker, 1024, 768))
    made = TritonKernel().layer(layer)
    index = torch.rand(tokens, 6, generator=maker.generator).topk(2).indices.cuda()
    hidden, weights = maker.rows(tokens, 1024, dtype=dtype), maker.rows(tokens, 2).abs()
    found, some = made(hidden, index, weights), slice(0, 64)
    assert error(found[some], reference(layer, hidden[some], index[some], weights[some])) < TOLERANCES[dtype]
    assert torch.equal(found, made(hidden, index, weights))
