"""Experts with versions in blocks of a device's buffer: what calls see, when blocks are free again, planes and counts.

In Triton's interpreter or on a GPU; the tests of streams and graphs need a GPU.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from kernels.gpu.packed_matrices import Maker, Matrix, same
from late_streams import LateStreams

from moeq_kernels import trellis
from moeq_kernels.description import DOWN, LayerOfExperts
from moeq_kernels.gpu.kernel import TritonLayer
from moeq_kernels.gpu.planes import are_nested, narrow, plane_bytes, widen, write_planes
from moeq_kernels.gpu.versions import STAGES, Block, State, VersionedTritonLayer, beside_bytes, versioned_layer
from moeq_kernels.packed import PackedWeight, packed_shapes
from moeq_kernels.streams import HostStreams, Streams, streams_of
from moeq_kernels.widths import Encoding

pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning")
H, I = 32, 16  # noqa: E741
E = 3
SHAPES = {"gate_proj": (I, H), "up_proj": (I, H), DOWN: (H, I)}


@pytest.fixture(autouse=True)
def _runs(place: str) -> None:
    """Triton is there."""


def gate(parts: dict[str, torch.Tensor]) -> torch.Tensor:
    return torch.nn.functional.silu(parts["gate_proj"]) * parts["up_proj"]


def layer_of(matrices: list[dict[str, Matrix]], biases: list[dict[str, torch.Tensor]]) -> LayerOfExperts:
    return LayerOfExperts(matrices=matrices, biases=biases, gate=gate, activation="silu")


class Pool:
    """Experts in versions, one block for each version of each expert and some more."""

    def __init__(
        self, make: list[Callable[[str], Matrix]], device: str, streams: Streams | None = None, biased: bool = False
    ) -> None:
        maker = Maker(99, device)
        self.streams = streams or streams_of(torch.device(device))
        self.matrices = [[{name: one(name) for name in SHAPES} for one in make] for _ in range(E)]
        self.biases = [
            {name: maker.rows(rows) for name, (rows, _) in SHAPES.items()} if biased else {} for _ in range(E)
        ]
        self.blocks = [Block(matrices) for matrices in self.matrices[0]]
        size = max(block.nbytes for block in self.blocks)
        self.free = [size * number for number in range(3 * E)]
        self.held = torch.zeros(size * len(self.free), dtype=torch.uint8, device=device)
        places = [(0, self.put(expert, 0)) for expert in range(E)]
        described = layer_of([self.matrices[0][0]], self.biases)
        self.layer: VersionedTritonLayer = versioned_layer(described, self.matrices[0], self.held, places, self.streams)

    def put(self, expert: int, version: int) -> int:
        """A version in a free block."""
        at, block = self.free.pop(0), self.blocks[version]
        block.write(self.matrices[expert][version], self.held[at : at + block.nbytes])
        return at

    def static(self) -> TritonLayer:
        """The same experts in a layer of their own."""
        now = [self.matrices[expert][version] for expert, (version, _) in enumerate(self.layer.places())]
        return TritonLayer(layer_of(now, self.biases))


def widths(device: str, *bits: int, group: int = 16) -> list[Callable[[str], Matrix]]:
    """Makers of one version each; 16: dense."""
    maker = Maker(1, device)

    def made(name: str, width: int) -> Matrix:
        rows, inputs = SHAPES[name]
        return maker.rows(rows, inputs).half() if width == 16 else maker.packed(rows, inputs, width, group)

    return [lambda name, width=width: made(name, width) for width in bits]  # type: ignore[misc]


def inputs(device: str, tokens: int = 1) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    maker = Maker(5, device)
    index = torch.rand(tokens, E, generator=maker.generator).topk(2).indices.to(device)
    return maker.rows(tokens, H), index, maker.rows(tokens, 2).abs()


@pytest.mark.cases(0)
@pytest.mark.parametrize(("bits", "biased"), [((2, 4), False), ((4, 16), True)])
def test_a_call_is_that_of_the_versions_published(place: str, bits: tuple[int, ...], biased: bool) -> None:
    """Bit for bit the layer of the same experts that was made for them, after every publication."""
    pool, rng = Pool(widths(place, *bits), place, biased=biased), random.Random(0)
    given = inputs(place)
    for turn in range(2):
        assert torch.equal(pool.layer(*given), pool.static()(*given))
        for expert, (version, _) in enumerate(pool.layer.places()):
            for name, matrix in pool.matrices[expert][version].items():
                assert same(pool.layer.matrix(expert, name), matrix)
        moved = rng.sample(range(E), 2 - turn)
        there = pool.layer.places()
        fresh = {one: (1 - there[one][0], pool.put(one, 1 - there[one][0])) for one in moved}
        number = pool.layer.publish(fresh)
        assert pool.layer.quiet(number, wait=True)
        pool.free += [there[one][1] for one in moved]


def test_many_rows_are_unpacked_from_the_versions_published(place: str) -> None:
    """The form of many rows an expert reads the same tables, and adds the same biases."""
    pool = Pool(widths(place, 2, 4), place, biased=True)
    pool.layer.publish({1: (1, pool.put(1, 1))})
    given, static = inputs(place, 3), pool.static()
    pool.layer.layer.unpack_rows = static.unpack_rows = 1
    assert torch.equal(pool.layer(*given), static(*given))


def test_blocks_are_quiet_when_the_device_is_past_them(place: str) -> None:
    if place == "cuda":
        pytest.skip("a late device is one of Triton's interpreter")
    streams = LateStreams()
    pool = Pool(widths("cpu", 2, 4), "cpu", streams)
    first = pool.layer.publish({0: (1, pool.put(0, 1))})
    second = pool.layer.publish({1: (1, pool.put(1, 1))})
    assert STAGES == 2
    assert not pool.layer.ready(), "both stages are on their way"
    assert not pool.layer.quiet(first)
    streams.step()
    assert pool.layer.ready()
    assert pool.layer.quiet(first)
    assert not pool.layer.quiet(second)
    assert pool.layer.quiet(second, wait=True)
    assert pool.layer.quiet(second), "asked again"
    assert [version for version, _ in pool.layer.places()] == [1, 1, 0]


def test_what_is_kept_beside_blocks_is_as_much_as_was_said(place: str) -> None:
    for biased in (False, True):
        pool = Pool(widths(place, 2, 4), place, biased=biased)
        assert pool.layer.beside_bytes == beside_bytes(pool.blocks[0], E, pool.biases)
        state = pool.layer._held.state
        assert state.there.nbytes == State.size_of(E, 3, 4)
        assert torch.equal(state.there.cpu(), state.here)


def test_matrices_of_another_shape_are_refused(place: str) -> None:
    maker = Maker(2, place)
    block = Block({name: maker.packed(*SHAPES[name], 4, 16) for name in SHAPES})
    into = torch.zeros(block.nbytes, dtype=torch.uint8, device=place)
    others = {name: maker.packed(*SHAPES[name], 4, -1) for name in SHAPES}
    with pytest.raises(ValueError, match="in groups of -1"):
        block.write(others, into)
    assert not into.any(), "nothing was written"
    nested = {name: maker.packed(*SHAPES[name], 4, 16, nested=True) for name in SHAPES}
    with pytest.raises(ValueError, match="nested"):
        block.write(nested, into)


def test_versions_that_no_layer_has_are_refused(place: str) -> None:
    streams = streams_of(torch.device(place))
    maker = Maker(2, place)
    dense = [{name: maker.rows(*SHAPES[name], dtype=dtype) for name in SHAPES} for dtype in (torch.half, torch.float)]
    held = torch.zeros(1 << 14, dtype=torch.uint8, device=place)
    with pytest.raises(ValueError, match="dense matrices are"):
        versioned_layer(layer_of(dense, []), dense, held, [(0, 0)] * E, streams)
    smaller = {name: maker.packed(16, 16, 4, 16) for name in SHAPES}
    versions = [dense[0], smaller]
    with pytest.raises(ValueError, match="other shapes"):
        versioned_layer(layer_of(versions, []), versions, held, [(0, 0)] * E, streams)


def test_trellis_codes_with_trained_values_are_refused(place: str) -> None:
    bits, states = next(iter(_trained()))
    shapes = packed_shapes(16, 16, bits, Encoding(group_size=-1, symmetric=True, state_bits=states))
    parts = {part: torch.zeros(size, dtype=dtype, device=place) for part, (size, dtype) in shapes.items()}
    encoding = Encoding(group_size=-1, symmetric=True, state_bits=states)
    matrix = PackedWeight.of(parts, bits, 16, encoding)
    with pytest.raises(ValueError, match="trained values"):
        Block(dict.fromkeys(SHAPES, matrix))


def _trained() -> Iterator[tuple[int, int]]:
    from moeq_kernels.trellis_tables import table

    for bits in trellis.WALKED:
        for states in range(4, 17):
            try:
                if table(bits, states) is not None:
                    yield bits, states
            except (KeyError, ValueError):
                continue


@pytest.mark.parametrize(("rows", "columns", "symmetric"), [(32, 128, False), (16, 208, False), (24, 96, True)])
def test_planes_joined_and_parted_are_the_blocks_themselves(
    place: str, rows: int, columns: int, symmetric: bool
) -> None:
    maker = Maker(rows, place)
    shapes = {"up_proj": (rows, columns), DOWN: (16, rows)}
    large = {name: maker.packed(*size, 4, 16, symmetric, nested=True) for name, size in shapes.items()}
    small = {name: one.leading(2) for name, one in large.items()}
    wide, low = Block(large), Block(small)
    assert all(are_nested(one, two) for one, two in zip(low.places, wide.places, strict=True))
    assert not are_nested(wide.places[0], wide.places[0])
    wanted = [torch.zeros(block.nbytes, dtype=torch.uint8, device=place) for block in (low, wide)]
    low.write(small, wanted[0])
    wide.write(large, wanted[1])
    planes = torch.zeros(plane_bytes(low), dtype=torch.uint8, device=place)
    write_planes(low, large, planes)
    found = [torch.zeros_like(one) for one in wanted]
    widen(low, wide, wanted[0], planes, found[1])
    narrow(wide, low, wanted[1], found[0])
    assert torch.equal(found[0], wanted[0])
    assert torch.equal(found[1], wanted[1])


def test_planes_of_what_is_not_nested_are_not_there(place: str) -> None:
    maker = Maker(3, place)
    low, high = (Block({DOWN: maker.packed(16, 32, bits, 16)}) for bits in (2, 4))
    assert not are_nested(low.places[0], high.places[0])
    dense = Block({DOWN: maker.rows(16, 32).half()})
    assert not are_nested(low.places[0], dense.places[0])


@pytest.mark.parametrize(("tokens", "dtype"), [(1, torch.float32), (70, torch.float16)])
def test_choices_are_counted_as_algorithm_1_has_it(place: str, tokens: int, dtype: torch.dtype) -> None:
    """Two steps, with choices of experts that are none; the same bits a second time."""
    from moeq_kernels.gpu.version_programs import add_choices

    experts, kept = 18, 0.9
    made = []
    for _ in range(2):
        maker = Maker(tokens, place)
        held = torch.zeros(2 * experts + 1, dtype=torch.float32, device=place)
        sums, squares = np.zeros(experts), np.zeros(experts)
        for _ in range(2):
            index = torch.randint(0, experts + 2, (tokens, 2), generator=maker.generator).to(place)
            weights = maker.rows(tokens, 2, dtype=dtype).abs()
            add_choices[(2,)](
                index, weights, held, index.numel(), experts, 1 / tokens, kept, 1 - kept, BLOCK=16, EVERY=32
            )
            sums, squares = kept * sums, kept**2 * squares
            for one, weight in zip(index.flatten().tolist(), weights.flatten().tolist(), strict=True):
                if one < experts:
                    sums[one] += (1 - kept) * weight / tokens
                    squares[one] += ((1 - kept) * weight / tokens) ** 2
        np.testing.assert_allclose(held[:experts].cpu(), sums, rtol=1e-5, atol=1e-8)
        np.testing.assert_allclose(held[experts:-1].cpu(), squares, rtol=1e-5, atol=1e-10)
        assert held[-1] == 2
        made.append(held)
    assert torch.equal(*made)


def test_work_beside_is_done_in_its_order(place: str) -> None:
    """Without a GPU at once; on one, when its event says so."""
    streams = streams_of(torch.device(place))
    given, there = streams.waiting(4096), torch.zeros(4096, dtype=torch.uint8, device=place)
    assert given.is_pinned() == (place == "cuda")
    assert given.numel() == 4096
    given.fill_(7)
    first = streams.beside(lambda: there.copy_(given, non_blocking=True))  # type: ignore[arg-type, return-value]
    second = streams.beside(lambda: there.add_(1))  # type: ignore[arg-type, return-value]
    second.wait()
    assert first.done()
    assert second.done()
    assert there.unique().tolist() == [8]
    now = streams.now()
    now.wait()
    assert now.done()
    assert not streams.capturing()
    assert isinstance(streams, HostStreams) == (place == "cpu")


@pytest.mark.cuda
def test_a_captured_graph_sees_what_was_published() -> None:
    """One graph, versions that change between its replays, each replay bit for bit the layer called anew; publishing
    synchronises nothing."""
    pool = Pool(widths("cuda", 2, 4), "cuda")
    given = inputs("cuda", 4)
    pool.layer(*given)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = pool.layer(*given)
    for expert in (0, 2, 1):
        there = pool.layer.places()[expert]
        fresh = expert, 1 - there[0], pool.put(expert, 1 - there[0])
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            number = pool.layer.publish({fresh[0]: fresh[1:]})
            graph.replay()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert torch.equal(out, pool.layer(*given))
        torch.testing.assert_close(out, pool.static()(*given), rtol=1e-5, atol=1e-5)
        assert pool.layer.quiet(number, wait=True)


@pytest.mark.cuda
def test_calls_while_versions_come_on_another_stream() -> None:
    """Copies of both versions of all experts, over and over, under calls that are never told to wait: every result is
    that of one consistent set."""
    pool = Pool(widths("cuda", 2, 4), "cuda")
    given = inputs("cuda", 4)
    streams, rng = pool.streams, random.Random(0)
    waiting = []
    for expert in range(E):
        waiting.append([])
        for version, block in enumerate(pool.blocks):
            held = streams.waiting(block.nbytes)
            block.write({name: _here(one) for name, one in pool.matrices[expert][version].items()}, held)
            waiting[-1].append(held)
    static = {}
    for number in range(2**E):
        now = [pool.matrices[expert][number >> expert & 1] for expert in range(E)]
        static[number] = TritonLayer(layer_of(now, []))(*given)
    pool.layer(*given)
    torch.cuda.synchronize()
    retired, results = [], []
    for _ in range(200):
        for published, block in list(retired):
            if pool.layer.quiet(published):
                pool.free.append(block)
                retired.remove((published, block))
        if pool.free and pool.layer.ready():
            expert = rng.randrange(E)
            version, old = pool.layer.place(expert)
            at, given_bytes = pool.free.pop(0), waiting[expert][1 - version]
            into = pool.held[at : at + len(given_bytes)]
            event = streams.beside(lambda into=into, held=given_bytes: into.copy_(held, non_blocking=True))
            event.wait()
            retired.append((pool.layer.publish({expert: (1 - version, at)}), old))
        which = sum(version << expert for expert, (version, _) in enumerate(pool.layer.places()))
        results.append((which, pool.layer(*given)))
    for which, found in results:
        torch.testing.assert_close(found, static[which], rtol=1e-5, atol=1e-5)
    assert len({which for which, _ in results}) > 3


def _here(matrix: Matrix) -> Matrix:
    return matrix.cpu() if isinstance(matrix, torch.Tensor) else matrix.map(lambda part: part.cpu())


def test_a_version_alone_is_the_static_layer(place: str) -> None:
    """All in one version, of those that might be there: the layer that has no other, bit for bit."""
    pool = Pool(widths(place, 2, 4), place)
    given = inputs(place)
    for version in (1, 0):
        pool.layer.publish({expert: (version, pool.put(expert, version)) for expert in range(E)})
        static = TritonLayer(layer_of([one[version] for one in pool.matrices], []))
        assert torch.equal(pool.layer(*given), static(*given))
