"""Trellis codes on the GPU, or in Triton's interpreter: exact values, products against float64, the way back."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from kernels.gpu.packed_matrices import Maker, Matrix, same
from kernels.gpu.test_products import BLOCKS, ROUTINGS, ROWS, TOLERANCES, check, error, layer_of, prepared, reference
from packed_layers import trellis_of

from moeq_kernels.description import DOWN
from moeq_kernels.gpu import strips
from moeq_kernels.gpu.kernel import TritonKernel, TritonLinear
from moeq_kernels.gpu.settings import Settings, Shape
from moeq_kernels.gpu.stored import Stored
from moeq_kernels.packed import PackedWeight
from moeq_kernels.widths import STATE_BITS, TRELLIS_BITS

pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning")
NUMBERS = {1: 8, 2: 10, 3: 8, 4: 10, 8: 9}  # bits: bits of a state


@pytest.fixture(autouse=True)
def _runs(place: str) -> None:
    """Triton is there."""


def walks(place: str, rows: int, inputs: int, bits: int, state_bits: int, seed: int = 0) -> PackedWeight:
    return trellis_of(rows, inputs, bits, state_bits, seed=seed).map(lambda part: part.to(place))


def columns(linear: TritonLinear, inputs: int, place: str, settings: Settings = BLOCKS) -> torch.Tensor:
    """The matrix [N, K], every column by a product."""
    linear.settings = settings
    return linear(torch.eye(inputs, device=place)).T


@pytest.mark.cases(1)
@pytest.mark.parametrize("bits", TRELLIS_BITS)
@pytest.mark.parametrize(
    "state_bits", [one if one in (8, 10, 16) else pytest.param(one, marks=pytest.mark.full) for one in STATE_BITS]
)
def test_every_value_is_exact(place: str, bits: int, state_bits: int) -> None:
    """Whole blocks of tiles, a last one of two, rows that fill no tile: the plain way's values, bit for bit."""
    matrix = walks(place, 40, 156, bits, state_bits)
    linear = TritonKernel().linear(matrix)
    settings = Settings(sort=True, block_n=64, block_m=64)
    assert torch.equal(columns(linear, 156, place, settings), matrix.dequantize())
    which = torch.zeros(1, dtype=torch.int32, device=place)
    assert torch.equal(linear.stack.unpacked(0, which, torch.float32)[0], matrix.dequantize())
    assert same(linear.matrix(), matrix)
    even = walks(place, 40, 256, bits, state_bits)
    found = columns(TritonKernel().linear(even), 256, place, replace(settings, parts=2))
    assert torch.equal(found, even.dequantize())


@pytest.mark.cases(0)
def test_computed_values_are_those_of_the_table(place: str) -> None:
    """Beside a matrix whose values were trained those of another come from a table too: the same bits."""
    trained, other = walks(place, 16, 128, 2, 8), walks(place, 16, 128, 2, 11, seed=1)
    both = Stored([[trained], [other]], [[None], [None]])
    alone = TritonKernel().linear(other)
    assert not both.computed
    assert {*both.values} == {(2, 8), (2, 11)}
    assert alone.stack.stored.computed
    assert not alone.stack.stored.values
    given = torch.eye(128, device=place)
    up = TritonKernel().layer(
        layer_of([{"up_proj": one, DOWN: torch.eye(16, device=place)} for one in (trained, other)], "relu")
    )
    up.settings = (BLOCKS, BLOCKS)
    found = up(given, torch.ones((128, 1), dtype=torch.int64, device=place), torch.ones((128, 1), device=place))
    assert torch.equal(found, columns(alone, 128, place).T.relu())


@pytest.mark.cases(2)
@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("bits", TRELLIS_BITS)
def test_a_matrix_alone(place: str, bits: int, dtype: torch.dtype) -> None:
    maker = Maker(bits, place)
    for (rows, inputs), settings in (((40, 256), BLOCKS), ((16, 200), ROWS), ((33, 24), ROWS)):
        matrix, bias = walks(place, rows, inputs, bits, NUMBERS[bits]), maker.rows(rows)
        linear = TritonKernel().linear(matrix, bias)
        linear.settings = replace(settings, splits=2)
        given = maker.rows(3, inputs, dtype=dtype)
        wanted = given.double() @ matrix.dequantize().double().T + bias.double()
        assert error(linear(given), wanted) < TOLERANCES[dtype]


def mixed(maker: Maker, hidden: int, inner: int) -> list[dict[str, Matrix]]:
    """Five experts: trellis codes of several widths and numbers of states, grids and a dense one."""
    kinds = [("t2", "t3", "t4"), ("t8", "t1", 2), (4, "t2", "t3"), (16, 16, 16), ("t1", 3, "t12")]

    def made(rows: int, inputs: int, kind: str | int) -> Matrix:
        if kind == 16:
            return 0.1 * maker.rows(rows, inputs, dtype=torch.float16)
        if isinstance(kind, int):
            return maker.packed(rows, inputs, kind, 32)
        bits, state_bits = (2, 12) if kind == "t12" else (int(kind[1:]), NUMBERS[int(kind[1:])])
        return walks(maker.device, rows, inputs, bits, state_bits, seed=rows + bits)

    names = {"gate_proj": (inner, hidden), "up_proj": (inner, hidden), DOWN: (hidden, inner)}
    return [{name: made(*names[name], kind) for name, kind in zip(names, one, strict=True)} for one in kinds]


@pytest.mark.cases(0)
@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("routing", ROUTINGS)
def test_a_layer_of_trellis_codes_and_grids(place: str, routing: str, dtype: torch.dtype) -> None:
    """In one launch, each matrix with its own kind of codes, and so by unpacking."""
    maker = Maker(3, place)
    hidden, inner = (128, 128) if dtype != torch.float32 else (72, 40)
    layer = layer_of(mixed(maker, hidden, inner))
    index = ROUTINGS[routing](maker.generator).to(place)
    rows, weights = maker.rows(len(index), hidden, dtype=dtype), maker.rows(*index.shape, dtype=dtype).abs()
    check(layer, rows, index, weights, ROWS if routing == "one token" else BLOCKS)
    if routing == "spread":
        made = prepared(layer, BLOCKS)
        made.unpack_rows = 1
        assert error(made(rows, index, weights), reference(layer, rows, index, weights)) < TOLERANCES[dtype]


@pytest.mark.cases(0)
def test_persistent_programs_store_the_same(place: str) -> None:
    maker = Maker(11, place)
    layer = layer_of(mixed(maker, 72, 144))
    index = ROUTINGS["experts that are none"](maker.generator).to(place)
    rows, weights = maker.rows(len(index), 72), maker.rows(*index.shape).abs()
    alone = Settings(sort=True, block_n=64, block_m=8, splits=2)
    wanted = prepared(layer, alone)(rows, index, weights)
    assert torch.equal(prepared(layer, replace(alone, persistent=5))(rows, index, weights), wanted)


@pytest.mark.parametrize("bits", TRELLIS_BITS)
def test_the_order_of_codes_can_be_undone_and_takes_no_room(place: str, bits: int) -> None:
    for rows, inputs in ((1, 1), (16, 128), (40, 156), (17, 400)):
        matrix = walks(place, rows, inputs, bits, NUMBERS[bits])
        stored = strips.arrange(matrix.codes, bits)
        assert stored.numel() == matrix.codes.numel()
        assert torch.equal(strips.undo(stored, inputs, bits), matrix.codes)
        assert not torch.equal(stored, matrix.codes.flatten()) or (rows, inputs) == (1, 1)
        linear, some = TritonKernel().linear(matrix), torch.tensor([rows - 1, 0, rows // 2, 0], device=place)
        assert torch.equal(linear.some(some), matrix.dequantize()[some])


@pytest.mark.cases(1)
@pytest.mark.parametrize("state_bits", [8, 10, 11])
def test_where_values_are_looked_up(place: str, state_bits: int) -> None:
    """In shared memory where every table is small enough and a program has two warps; the same bits elsewhere."""
    trained = walks(place, 32, 128, 2, 8), walks(place, 32, 128, 3, 10, seed=2), walks(place, 32, 128, 8, 8, seed=3)
    other = walks(place, 32, 128, 2, state_bits, seed=1)
    given = Stored([[one] for one in (*trained, other)], [[None]] * 4)
    assert [given.values_near(warps) for warps in (1, 2, 4)] == ([0, 10, 10] if state_bits <= 10 else [0, 0, 0])
    assert Stored([[walks(place, 32, 128, 4, 16)]], [[None]]).values_near(4) == -1, "they are computed"
    layer = layer_of([{"up_proj": one, DOWN: torch.eye(128, 32, device=place)} for one in (*trained, other)], "relu")
    index = torch.arange(4, device=place)[:, None]
    rows, weights = Maker(1, place).rows(4, 128), torch.ones((4, 1), device=place)
    found = [prepared(layer, replace(ROWS, block_n=32, warps=warps))(rows, index, weights) for warps in (1, 2)]
    assert torch.equal(*found)
    assert error(found[0], reference(layer, rows, index, weights)) < TOLERANCES[torch.float32]


def test_a_layer_takes_the_bytes_of_its_codes() -> None:
    matrices = [[trellis_of(512, 768, bits, 10)] for bits in TRELLIS_BITS]
    stored = Stored(matrices, [[None]] * len(matrices))
    assert stored.nbytes <= 1.05 * sum(one.nbytes for (one,) in matrices)
    assert [place.nbytes for (place,) in stored.places] == [one.nbytes for (one,) in matrices]


def test_tuned_settings_tell_trellis_codes_from_grids() -> None:
    widths = 1 << 2 | 1 << strips.kind_of(2) | 1 << strips.kind_of(8) | 1 << 16
    shape = Shape(experts=8, rows=64, inputs=128, widths=widths, pairs=8, two=False)
    assert shape.key == "8x64x128/2+t2+t8+16 bits/8 rows"


@pytest.mark.cuda
@pytest.mark.parametrize("tokens", [1, 7, 64])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_layer_in_a_cuda_graph(tokens: int, dtype: torch.dtype) -> None:
    """Captured with one routing and replayed with another, as without a graph, with the settings that are chosen."""
    maker = Maker(tokens, "cuda")
    layer = layer_of(mixed(maker, 512, 384))
    made = TritonKernel().layer(layer)
    made.unpack_rows = tokens + 1
    index = torch.zeros((tokens, 2), dtype=torch.int64, device="cuda")
    hidden, weights = maker.rows(tokens, 512, dtype=dtype), maker.rows(tokens, 2).abs()
    made(hidden, index, weights)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = made(hidden, index, weights)
    index.copy_(torch.rand(tokens, 5, generator=maker.generator).topk(2).indices)
    graph.replay()
    assert error(out, reference(layer, hidden, index, weights)) < TOLERANCES[dtype]
    assert torch.equal(out, made(hidden, index, weights))
