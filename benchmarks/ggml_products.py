"""llama.cpp's products with packed matrices on a CPU, called in the libggml that llama-cpp-python brings.

Every kind of weights is tried in all buffers that take it, the plain one and those that rearrange it for this CPU, and
the fastest is kept. One call of libggml is a graph of many products, as it runs a model: what a call costs is shared.

Letters: N rows and K inputs of a matrix, E experts, k of a token, T tokens.
"""

from __future__ import annotations

import ctypes
import importlib.util
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import cycle
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

KINDS = {"Q4_0": 2, "Q8_0": 8, "Q2_K": 10, "Q3_K": 11, "Q4_K": 12}  # enum ggml_type
WORST = {"Q2_K": 0.5, "Q3_K": 0.3, "Q4_K": 0.2, "Q4_0": 0.2, "Q8_0": 0.02}  # relative error, or it is no product
F32, I32 = 0, 26
NODES = 1024  # of a graph, and tensors of what it needs
BYTES = 4
AMX = "AMX"  # the buffer of llama-cpp-python 0.3.36 in which products of several rows end by a segmentation fault
Floats = NDArray[np.float32]
Address = ctypes.c_void_p | int
_POINTERS = (  # functions that give one
    "ggml_init", "ggml_new_tensor_2d", "ggml_new_tensor_3d", "ggml_mul_mat", "ggml_mul_mat_id", "ggml_swiglu_split",
    "ggml_mul", "ggml_add", "ggml_view_2d", "ggml_new_graph_custom", "ggml_backend_alloc_ctx_tensors_from_buft",
    "ggml_backend_alloc_ctx_tensors", "ggml_backend_cpu_init", "ggml_backend_cpu_reg", "ggml_backend_cpu_buffer_type",
    "ggml_backend_reg_dev_get", "ggml_backend_reg_get_proc_address", "ggml_backend_buft_name",
)  # fmt: skip
_SIZES = ("ggml_tensor_overhead", "ggml_graph_overhead_custom", "ggml_row_size", "ggml_quantize_chunk")


class _Parameters(ctypes.Structure):
    """struct ggml_init_params."""

    _fields_ = (("mem_size", ctypes.c_size_t), ("mem_buffer", ctypes.c_void_p), ("no_alloc", ctypes.c_bool))


class _Library:
    """The functions of libggml by name; whole numbers go as int64, which is what they are or are cut from."""

    def __init__(self) -> None:
        found = importlib.util.find_spec("llama_cpp")
        assert found is not None
        assert found.origin is not None
        folder = Path(found.origin).parent / "lib"
        self.parts = [ctypes.CDLL(str(folder / f"libggml{part}.so"), ctypes.RTLD_GLOBAL) for part in ("-base", "-cpu")]

    def __call__(self, name: str, *arguments: object) -> int:
        function = next(getattr(part, name) for part in self.parts if hasattr(part, name))
        function.restype = ctypes.c_void_p if name in _POINTERS else ctypes.c_int
        if name in _SIZES:
            function.restype = ctypes.c_size_t
        found = function(*[ctypes.c_int64(one) if isinstance(one, int) else one for one in arguments])
        return int(found or 0)


def _context(call: _Library, tensors: int, graphs: int = 0) -> int:
    size = call("ggml_tensor_overhead") * tensors + call("ggml_graph_overhead_custom", NODES, False) * graphs
    return call("ggml_init", _Parameters(size, None, True))


class Ggml:
    """Products with weights of one kind, in some threads."""

    def __init__(self, kind: str, threads: int) -> None:
        self.call, self.kind, self.type = _Library(), kind, KINDS[kind]
        self.backend = self.call("ggml_backend_cpu_init")
        self.call("ggml_backend_cpu_set_n_threads", self.backend, threads)
        registry = self.call("ggml_backend_cpu_reg")
        self.device = self.call("ggml_backend_reg_dev_get", registry, 0)
        extra = self.call("ggml_backend_reg_get_proc_address", registry, b"ggml_backend_dev_get_extra_bufts")
        listed = ctypes.CFUNCTYPE(ctypes.POINTER(ctypes.c_void_p), ctypes.c_void_p)(extra)(self.device)
        self.places = [self.call("ggml_backend_cpu_buffer_type")]
        for place in listed:
            if place is None:
                break
            self.places.append(place)

    def bits(self, inputs: int) -> float:
        """Of a weight, with its share of scales."""
        return 8 * self.call("ggml_row_size", self.type, inputs) / inputs

    def packed(self, weights: Floats) -> NDArray[np.uint8]:
        """Weights [N, K] in this kind."""
        rows, inputs = weights.shape
        made = np.empty(rows * self.call("ggml_row_size", self.type, inputs), np.uint8)
        given = np.ascontiguousarray(weights)
        self.call("ggml_quantize_chunk", self.type, given.ctypes, made.ctypes, 0, rows, inputs, None)
        return made

    def name(self, place: int) -> str:
        """Of a kind of buffer."""
        return ctypes.string_at(self.call("ggml_backend_buft_name", place)).decode()

    def held(self, sizes: Sequence[tuple[int, ...]], copies: Sequence[NDArray[np.uint8]], place: int) -> list[int]:
        """Tensors of sizes (K, N) or (K, N, E) in a kind of buffer, filled; none where it does not take them."""
        context = _context(self.call, len(sizes))
        made = [self.call(f"ggml_new_tensor_{len(size)}d", context, self.type, *size) for size in sizes]
        self.call("ggml_backend_alloc_ctx_tensors_from_buft", context, place)
        if not all(self._takes(tensor, size) for tensor, size in set(zip(made, sizes, strict=True))):
            return []
        for tensor, data in zip(made, copies, strict=True):
            self.call("ggml_backend_tensor_set", tensor, data.ctypes, 0, data.nbytes)
        return made

    def _takes(self, tensor: int, size: tuple[int, ...]) -> bool:
        context = _context(self.call, 3)
        if len(size) == 2:
            rows = self.call("ggml_new_tensor_2d", context, F32, size[0], 1)
            product = self.call("ggml_mul_mat", context, tensor, rows)
        else:
            rows = self.call("ggml_new_tensor_3d", context, F32, size[0], 1, 1)
            which = self.call("ggml_new_tensor_2d", context, I32, 1, 1)
            product = self.call("ggml_mul_mat_id", context, tensor, rows, which)
        return bool(self.call("ggml_backend_dev_supports_op", self.device, product) & 1)

    def graph(self, make: Callable[[int, list[tuple[int, NDArray[np.generic]]]], list[int]]) -> tuple[int, list[int]]:
        """A graph of the outputs that make(context, inputs) gives; it notes the inputs with what they hold."""
        context, inputs = _context(self.call, NODES, 1), []  # type: ignore[var-annotated]
        outputs = make(context, inputs)
        graph = self.call("ggml_new_graph_custom", context, NODES, False)
        for output in outputs:
            self.call("ggml_build_forward_expand", graph, output)
        self.call("ggml_backend_alloc_ctx_tensors", context, self.backend)
        for tensor, data in inputs:
            self.call("ggml_backend_tensor_set", tensor, data.ctypes, 0, data.nbytes)
        return graph, outputs

    def run(self, graph: int) -> None:
        if self.call("ggml_backend_graph_compute", self.backend, graph):
            raise RuntimeError("libggml does not compute its graph")

    def read(self, tensor: int, rows: int, columns: int) -> Floats:
        found = np.empty((rows, columns), np.float32)
        self.call("ggml_backend_tensor_get", tensor, found.ctypes, 0, found.nbytes)
        return found

    def check(self, found: Floats, wanted: Floats, products: int) -> None:
        """SystemExit for what is not the result of so many products with the weights, one after the other."""
        error = float(np.linalg.norm(found - wanted) / np.linalg.norm(wanted))
        if not error < products * WORST[self.kind]:
            raise SystemExit(f"{self.kind}: relative error {error:.3f}")

    def fastest(self, made: Sequence[list[int]]) -> Iterator[int]:
        """Of graphs that do the same, by buffer, those that are done first; in turn, again and again."""
        taken = []
        for graphs in made:
            times = []
            for graph in [graphs[0], *graphs]:
                began = time.perf_counter()
                self.run(graph)
                times.append(time.perf_counter() - began)
            taken.append(sorted(times)[len(times) // 2])
        return cycle(made[taken.index(min(taken))])


class MatrixOfGgml:
    """Copies of one matrix [N, K]."""

    def __init__(self, kind: str, weights: Floats, cold_bytes: int, threads: int) -> None:
        self.ggml, self.weights = Ggml(kind, threads), weights
        data = self.ggml.packed(weights)
        copies = -(-cold_bytes // data.nbytes)
        size = weights.shape[::-1]
        tried = {place: self.ggml.held([size] * copies, [data] * copies, place) for place in self.ggml.places}
        self.forms = {self.ggml.name(place): tensors for place, tensors in tried.items() if tensors}
        self.bits = self.ggml.bits(weights.shape[1])

    def turns(self, rows: Floats, calls: int) -> Callable[[], None]:
        """So many products of rows [T, K], each with another copy."""
        ggml, made = self.ggml, []
        for name, tensors in self.forms.items():
            if name == AMX and len(rows) > 1:
                continue
            graphs = []
            for first in range(0, len(tensors) - calls + 1, calls):
                graph, outputs = ggml.graph(lambda context, inputs, some=tensors[first : first + calls]: [  # type: ignore[misc]
                    ggml.call("ggml_mul_mat", context, one, self._rows(context, inputs, rows)) for one in some
                ])  # fmt: skip
                graphs.append(graph)
            ggml.run(graph)
            ggml.check(ggml.read(outputs[-1], len(rows), len(self.weights)), rows @ self.weights.T, 1)
            made.append(graphs)
        order = ggml.fastest(made)
        return lambda: ggml.run(next(order))

    def _rows(self, context: int, inputs: list[tuple[int, NDArray[np.generic]]], rows: Floats) -> int:
        tensor = self.ggml.call("ggml_new_tensor_2d", context, F32, rows.shape[1], rows.shape[0])
        inputs.append((tensor, rows))
        return tensor


class LayerOfGgml:
    """A layer of E experts, all of the same gate and up [I, H] and down [H, I]."""

    def __init__(self, kind: str, gate: Floats, up: Floats, down: Floats, experts: int, threads: int) -> None:
        self.ggml, self.parts = Ggml(kind, threads), (gate, up, down)
        data = [np.tile(self.ggml.packed(part), experts) for part in self.parts]
        sizes = [(*part.shape[::-1], experts) for part in self.parts]
        tried = [self.ggml.held(sizes, data, place) for place in self.ggml.places]
        self.forms = [tensors for tensors in tried if tensors]
        self.bits = self.ggml.bits(gate.shape[1])

    def turns(self, hidden: Floats, index: NDArray[np.int32], weights: Floats) -> Callable[[], None]:
        """One call after the other: hidden [calls, T, H], experts [calls, T, k] and their weights."""
        ggml, made = self.ggml, []
        for tensors in self.forms:
            graph, outputs = ggml.graph(lambda context, inputs, own=tensors: [  # type: ignore[misc]
                self._layer(context, inputs, own, *given) for given in zip(hidden, index, weights, strict=True)
            ])  # fmt: skip
            ggml.run(graph)
            ggml.check(ggml.read(outputs[-1], *hidden[-1].shape), self._wanted(hidden[-1], weights[-1]), 2)
            made.append([graph])
        order = ggml.fastest(made)
        return lambda: ggml.run(next(order))

    def _wanted(self, hidden: Floats, weights: Floats) -> Floats:
        gate, up, down = self.parts
        inner = hidden @ gate.T
        found: Floats = (inner / (1 + np.exp(-inner)) * (hidden @ up.T)) @ down.T * weights.sum(1, keepdims=True)
        return found

    def _layer(
        self, context: int, inputs: list[tuple[int, NDArray[np.generic]]], own: list[int], hidden: Floats,
        index: NDArray[np.int32], weights: Floats,
    ) -> int:  # fmt: skip
        """One call as llama.cpp builds it: gate, up, activation, down, weights and their sum over k."""
        call, (tokens, size), top_k = self.ggml.call, hidden.shape, index.shape[1]
        rows = call("ggml_new_tensor_3d", context, F32, size, 1, tokens)
        which = call("ggml_new_tensor_2d", context, I32, top_k, tokens)
        share = call("ggml_new_tensor_3d", context, F32, 1, top_k, tokens)
        inputs += [(rows, hidden), (which, index), (share, weights)]
        gate, up = (call("ggml_mul_mat_id", context, part, rows, which) for part in own[:2])
        inner = call("ggml_swiglu_split", context, gate, up)
        down = call("ggml_mul", context, call("ggml_mul_mat_id", context, own[2], inner, which), share)
        views = [
            call("ggml_view_2d", context, down, size, tokens, size * top_k * BYTES, place * size * BYTES)
            for place in range(top_k)
        ]
        total = views[0]
        for view in views[1:]:
            total = call("ggml_add", context, total, view)
        return total
