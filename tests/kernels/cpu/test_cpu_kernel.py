"""The CPU's kernel against float64 with the same codes, in every form that runs here."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from cases import examples
from hypothesis import HealthCheck, settings
from hypothesis import given as given_some
from hypothesis import strategies as some
from packed_layers import layer_of, matrix_of, reference, routed, silu_gate, trellis_of, values
from torch import nn

from moeq_kernels import measured
from moeq_kernels.cpu import threads
from moeq_kernels.cpu.forms import FORMS, Form, forms, host_features
from moeq_kernels.cpu.kernel import CpuKernel
from moeq_kernels.description import DOWN, LayerOfExperts

MIXED = [4, 3, {"gate_proj": 2, "up_proj": 8, DOWN: 16}, 1, 16]
TOLERANCE = {torch.bfloat16: 2.0**-7, torch.float16: 2.0**-9, torch.float32: 1e-5}  # of the largest output
BF16 = torch.bfloat16


@pytest.fixture(params=[name for name, form in FORMS.items() if name != "neon" and not form.int8])
def form(request: pytest.FixtureRequest) -> str:
    if request.param not in forms():
        pytest.skip(f"this CPU has no {request.param}")
    return str(request.param)


def check(layer: LayerOfExperts, kernel: CpuKernel, given: list[torch.Tensor]) -> None:
    result, wanted = kernel.layer(layer)(*given), reference(layer, *given)
    assert result.dtype == given[0].dtype
    assert result.shape == wanted.shape
    if wanted.numel():
        error = (result.double() - wanted).abs().max() / wanted.abs().max().clamp(min=1e-30)
        assert error < TOLERANCE[given[0].dtype]


@pytest.mark.cases(2)
@pytest.mark.parametrize("tokens", [0, 1, 3, 40])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_a_mixed_layer_is_what_float64_gives(tokens: int, dtype: torch.dtype) -> None:
    check(layer_of(MIXED, 96, 64), CpuKernel(), routed(tokens, len(MIXED), 2, 96, dtype))


@pytest.mark.cases(3)
@pytest.mark.parametrize(("tokens", "dtype"), [(1, BF16), (6, torch.float32)], ids=str)
def test_every_form_gives_the_same(form: str, tokens: int, dtype: torch.dtype) -> None:
    check(layer_of([4, 3], 96, 64), CpuKernel(form), routed(tokens, 2, 2, 96, dtype))


def test_vectors_of_any_length_are_the_same_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """NEON's four lanes, as LLVM compiles them for this CPU."""
    monkeypatch.setattr(Form, "runs_here", lambda self: True)
    check(layer_of([3], 32, 32), CpuKernel("neon"), routed(2, 1, 1, 32, torch.float32))


@pytest.mark.cases(8)
@pytest.mark.parametrize("bits", range(1, 9))
@pytest.mark.parametrize("nested", [False, True])
def test_products_with_bf16_rows_are_exact_but_for_the_last_rounding(bits: int, nested: bool) -> None:
    matrix = matrix_of(48, 256, bits, 64, symmetric=bits == 5, nested=nested)
    rows = torch.randn(3, 256, generator=torch.Generator().manual_seed(bits)).to(BF16)
    wanted = rows.double() @ values(matrix).T
    result = CpuKernel().linear(matrix)(rows).double()
    assert ((result - wanted).abs() <= wanted.abs() * 2.0**-8 + 1e-6 * wanted.abs().max()).all()


@pytest.mark.cases(2)
@pytest.mark.parametrize(
    ("rows", "inputs", "group_size", "bits"),
    [(30, 100, 24, 3), (5, 37, 7, 4), (17, 64, -1, 2), (16, 33, 32, 5), (1, 1, 1, 8), (40, 75, 128, 16)],
)
def test_ragged_shapes(rows: int, inputs: int, group_size: int, bits: int) -> None:
    matrix, bias = matrix_of(rows, inputs, bits, group_size), torch.arange(rows, dtype=torch.float32)
    linear = CpuKernel().linear(matrix, bias)
    for count, dtype in ((0, BF16), (1, BF16), (2, torch.float32)):
        given = torch.randn(count, inputs, generator=torch.Generator().manual_seed(1)).to(dtype)
        wanted = given.double() @ values(matrix).T + bias.double()
        torch.testing.assert_close(linear(given).double(), wanted, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.mark.cases(4)
def test_gate_and_up_whose_groups_are_filled_up_alike_in_other_units(form: str) -> None:
    """Groups of 16 are two units of 4 bits, and one of 6 bits: whole numbers lie in another order."""
    layer = layer_of([{"gate_proj": 4, "up_proj": 6, DOWN: 4}, {"gate_proj": 3, "up_proj": 4, DOWN: 2}], 48, 32, 16)
    check(layer, CpuKernel(form), routed(3, 2, 2, 48, BF16))


def test_one_expert_with_all_tokens_and_others_with_none() -> None:
    layer, given = layer_of([2, 4, 4], 64, 32), routed(64, 3, 1, 64, BF16)
    given[1] = torch.ones_like(given[1])
    check(layer, CpuKernel(), given)


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_pytorch_tanh", "relu", None])
def test_activations_in_the_pass_and_outside_of_it(activation: str | None, biased: bool) -> None:
    functions = {
        "gelu": nn.functional.gelu,
        "gelu_pytorch_tanh": lambda rows: nn.functional.gelu(rows, approximate="tanh"),
        "relu": nn.functional.relu,
    }
    act = functions.get(activation or "", nn.functional.silu)
    layer = layer_of([4, 4], 64, 32, biased=biased, activation=activation)
    layer = replace(layer, gate=lambda parts: act(parts["gate_proj"]) * parts["up_proj"])
    check(layer, CpuKernel(), routed(3, 2, 2, 64, torch.float32))


def test_without_a_gate_projection_and_with_rows_that_are_finished() -> None:
    layer = layer_of([4, 2], 64, 32, activation="relu")
    matrices = [{name: one[name] for name in ("up_proj", DOWN)} for one in layer.matrices]
    layer = replace(layer, matrices=matrices, gate=lambda parts: torch.relu(parts["up_proj"]))
    given = routed(5, 2, 2, 64, torch.float32)
    check(layer, CpuKernel(), given)
    check(replace(layer, finish=lambda rows: rows * rows), CpuKernel(), given)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_many_rows_go_through_torch(dtype: torch.dtype) -> None:
    layer = layer_of(MIXED, 96, 64, biased=True)
    check(layer, CpuKernel(prefill=6), routed(20, len(MIXED), 2, 96, dtype))
    check(replace(layer, finish=lambda rows: rows / 2 - 1), CpuKernel(prefill=6), routed(20, len(MIXED), 2, 96, dtype))


@pytest.mark.cases(1)
def test_unpacked_values_are_those_of_the_weight(form: str) -> None:
    for bits, nested in ((3, False), (4, True), (8, False)):
        matrix = matrix_of(40, 72, bits, 24, nested=nested)
        assert torch.equal(CpuKernel(form, prefill=0).linear(matrix)(torch.eye(72)), matrix.dequantize().T)


@pytest.mark.cases(1)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_a_matrix_is_unpacked_part_by_part(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """In inference mode or not; a smaller one behind a larger one."""
    monkeypatch.setattr("moeq_kernels.cpu.matrices.UNPACKED_BYTES", 1 << 14)
    large, small = matrix_of(520, 48, 4, 24), matrix_of(200, 24, 3, 24)
    for inference, matrix in ((True, large), (False, small), (True, small), (False, large)):
        with torch.inference_mode(inference):
            given = torch.eye(matrix.inputs, dtype=dtype)
            assert torch.equal(CpuKernel(prefill=0).linear(matrix)(given), matrix.dequantize().T.to(dtype))


@pytest.fixture
def teams(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Teams of threads that no other test has; torch has as many as before afterwards, also where a test says otherwise
    and layers are made, which sets back what was said."""
    before = torch.get_num_threads()
    monkeypatch.setattr(threads, "_teams", cache(threads._Team))
    yield
    torch.set_num_threads(before)


@pytest.fixture(params=["torch's threads", "our own"])
def spinning(request: pytest.FixtureRequest, teams: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who does the work: torch's threads where they spin."""
    spin = request.param == "torch's threads"
    if spin and not threads._parallel():
        pytest.skip("torch has no OpenMP with GOMP_parallel here")
    monkeypatch.setattr(threads, "_spinning", lambda: spin)


@pytest.mark.cases(1)
@pytest.mark.usefixtures("spinning")
def test_what_comes_out_does_not_depend_on_the_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moeq_kernels.cpu.layer.WAKING_BYTES", 0)
    prepared, given = CpuKernel().layer(layer_of(MIXED, 96, 64)), routed(9, 5, 3, 96, BF16)
    results = []
    for count in (1, 3):
        monkeypatch.setattr(torch, "get_num_threads", lambda count=count: count)
        results += [prepared(*given) for _ in range(10)]
    assert all(torch.equal(result, results[0]) for result in results)


def posted(count: int) -> int:
    """How much work the threads of our own of a team have been given."""
    return ctypes.c_int64.from_address(threads._teams(count)._posts[0] + threads.TICKET).value


def asleep(count: int) -> bool:
    first, posts = threads._teams(count)._posts
    places = range(first, first + posts * threads.POST_BYTES, threads.POST_BYTES)
    return all(ctypes.c_int64.from_address(place + threads.ASLEEP).value for place in places)


@pytest.mark.usefixtures("teams")
@pytest.mark.parametrize("bits", [3, pytest.param(8, marks=pytest.mark.full), pytest.param(16, marks=pytest.mark.full)])
def test_a_lone_matrix_is_shared_out_with_the_same_bits(bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """To threads that are awake, and, of many bytes, to those that sleep; whatever rows, of which some are compiled."""
    monkeypatch.setattr(threads, "_spinning", lambda: False)
    monkeypatch.setattr("moeq_kernels.cpu.layer.DIVIDED_BYTES", 0)
    matrix, random = matrix_of(328, 96, bits), torch.Generator().manual_seed(0)
    for waking in (0, 2**60):
        monkeypatch.setattr("moeq_kernels.cpu.layer.WAKING_BYTES", waking)
        linear = CpuKernel().linear(matrix, torch.arange(328.0))
        for rows, dtype in ((1, BF16), (3, torch.float32), (5, torch.float16)):
            given = torch.randn(rows, 96, generator=random).to(dtype)
            monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
            wanted, before = linear(given), posted(3)
            monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
            while waking and posted(3) == before:  # those that slept are awake after some calls
                assert torch.equal(linear(given), wanted)
            before = posted(3)
            assert all(torch.equal(linear(given), wanted) for _ in range(20))
            assert waking or posted(3) == before + 20


@pytest.mark.usefixtures("teams")
def test_a_little_matrix_is_left_to_the_thread_that_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "_spinning", lambda: False)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    assert CpuKernel().linear(matrix_of(64, 96, 4))(torch.ones(1, 96)).shape == (1, 64)
    assert not posted(2)
    monkeypatch.setattr("moeq_kernels.cpu.layer.DIVIDED_BYTES", 0)
    while not asleep(2):
        time.sleep(0.001)
    assert CpuKernel().linear(matrix_of(64, 96, 4))(torch.ones(1, 96)).shape == (1, 64)
    assert not posted(2)  # it was woken for what comes next


@pytest.mark.usefixtures("teams")
def test_codes_that_take_longer_are_shared_out_with_fewer_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "_spinning", lambda: False)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    kernel, size = CpuKernel(), (64, 256)
    two, few, many = (
        kernel.linear(one) for one in (matrix_of(*size, 2), trellis_of(*size, 2, 8), trellis_of(*size, 2, 10))
    )
    assert two.matrices.work == 64 * 256 // 2  # as many bytes as codes of 4 bits
    assert (few.matrices.work, many.matrices.work) == (1.5 * two.matrices.work, 3 * two.matrices.work)
    assert kernel.linear(matrix_of(*size, 8)).matrices.work > 2 * two.matrices.work  # with its scales
    monkeypatch.setattr("moeq_kernels.cpu.layer.WAKING_BYTES", few.matrices.work * 5 // 4)
    for linear, shared in ((two, 0), (few, 1), (many, 1)):
        before = posted(2)
        linear(torch.ones(1, 256))
        assert posted(2) - before == shared


@pytest.mark.usefixtures("spinning")
def test_threads_are_woken_again_and_callers_do_not_wait_for_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls of several threads of a program at once, and after the helpers of the kernel have gone to sleep."""
    monkeypatch.setattr("moeq_kernels.cpu.layer.WAKING_BYTES", 0)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    prepared, given = CpuKernel().layer(layer_of(MIXED, 96, 64)), routed(9, 5, 3, 96, BF16)
    wanted = prepared(*given)
    for pause in (0.0, 0.05):
        time.sleep(pause)
        with ThreadPoolExecutor(3) as pool:
            results = [future.result(timeout=60) for future in [pool.submit(prepared, *given) for _ in range(30)]]
        assert all(torch.equal(result, wanted) for result in results)


@pytest.mark.usefixtures("teams")
@pytest.mark.skipif(sys.platform != "linux", reason="threads are told where to run on Linux")
def test_a_woken_thread_goes_on_on_another_core_and_may_run_where_it_could(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two cores the one that the caller is not on; of one core that one."""
    allowed = sorted(os.sched_getaffinity(0))
    if len(allowed) < 2:
        pytest.skip("there is one core")
    monkeypatch.setattr("moeq_kernels.cpu.layer.WAKING_BYTES", 0)
    monkeypatch.setattr(threads, "_spinning", lambda: False)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    prepared, given = CpuKernel().layer(layer_of(MIXED, 96, 64)), routed(9, 5, 3, 96, BF16)
    wanted, (thread,) = prepared(*given), threads._teams(2)._threads
    assert thread.native_id is not None

    def told() -> int:
        """Where it was told to go on, as bits of cores, by the last that woke it."""
        at = threads._teams(2)._posts[0] + threads.CORES + threads.CORES_BYTES
        return int.from_bytes(ctypes.string_at(at, threads.CORES_BYTES), "little")

    for may, caller in (([allowed[0], allowed[1]], allowed[0]), ([allowed[1]], allowed[1])):
        while not asleep(2):
            time.sleep(0.001)
        os.sched_setaffinity(thread.native_id, may)
        os.sched_setaffinity(0, {caller})
        try:
            assert torch.equal(prepared(*given), wanted)
        finally:
            os.sched_setaffinity(0, allowed)
        while not asleep(2):
            time.sleep(0.001)
        assert os.sched_getaffinity(thread.native_id) == set(may)
        assert told() == (1 << allowed[1] if len(may) > 1 else 0)


@pytest.mark.usefixtures("teams")
def test_torchs_threads_do_the_work_where_they_spin(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    if not threads._parallel():
        pytest.skip("torch has no OpenMP with GOMP_parallel here")
    kind = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
    parallel = kind(threads._parallel())

    @kind
    def counted(work: int, numbers: int, count: int, flags: int) -> None:
        asked.append(count)
        parallel(work, numbers, count, flags)

    address = ctypes.cast(counted, ctypes.c_void_p).value
    monkeypatch.setattr("moeq_kernels.cpu.layer.WAKING_BYTES", 0)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    monkeypatch.setattr(threads, "_parallel", lambda: address)
    monkeypatch.setattr(threads, "_spinning", threads._spinning.__wrapped__)  # which looks at every call
    layer, given = layer_of(MIXED, 96, 64), routed(9, 5, 3, 96, torch.float32)
    for policy, wanted in (("PASSIVE", 0), ("active", 1), ("", 1)):
        monkeypatch.setenv("OMP_WAIT_POLICY", policy)
        monkeypatch.setattr(threads, "_teams", cache(threads._Team))
        asked.clear()
        check(layer, CpuKernel(), given)
        assert asked == [2] * wanted


@pytest.mark.full
@pytest.mark.parametrize("policy", ["ACTIVE", "PASSIVE"])
def test_a_forked_process_has_threads_of_its_own(policy: str) -> None:
    program = """
import os, torch
from packed_layers import layer_of, routed
from moeq_kernels.cpu import layer
from moeq_kernels.cpu.kernel import CpuKernel
layer.WAKING_BYTES = 0
torch.set_num_threads(2)
prepared, given = CpuKernel().layer(layer_of([4], 64, 32)), routed(2, 1, 1, 64, torch.float32)
first = prepared(*given)
child = os.fork()
if not child:
    os._exit(0 if torch.equal(prepared(*given), first) else 1)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), torch.equal(prepared(*given), first))
"""
    paths = os.pathsep.join([str(Path(__file__).parents[2]), *sys.path])
    environment = os.environ | {"PYTHONPATH": paths, "OMP_WAIT_POLICY": policy}
    command = [sys.executable, "-c", program]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
    assert (answer.stdout.split(), answer.returncode) == (["0", "True"], 0), answer.stderr


def test_shapes_are_checked_before_anything_is_read() -> None:
    prepared, given = CpuKernel().layer(layer_of([4], 64, 32)), routed(2, 1, 1, 64, BF16)
    for wrong in (
        [given[0][:, :32], *given[1:]],
        [given[0], given[1], given[2][:1]],
        [given[0], given[1][:1], given[2][:1]],
        [given[0], given[1].float(), given[2]],
    ):
        with pytest.raises(ValueError, match=r"hidden|index"):
            prepared(*wrong)
    beyond = [given[0], torch.tensor([[-1], [2**40]]), given[2]]
    assert not prepared(*beyond).any()
    with pytest.raises(ValueError, match="rows are"):
        CpuKernel().linear(matrix_of(4, 64, 4))(torch.zeros(2, 63))


def test_what_it_cannot_compute_it_refuses() -> None:
    layer, kernel = layer_of([4, 4], 64, 32), CpuKernel()
    assert kernel.refusal(layer) is None
    other = [layer.matrices[0], {**layer.matrices[1], DOWN: matrix_of(32, 32, 4)}]
    assert "different sizes" in str(kernel.refusal(replace(layer, matrices=other)))
    lacking = [layer.matrices[0], {DOWN: layer.matrices[1][DOWN]}]
    assert "same matrices" in str(kernel.refusal(replace(layer, matrices=lacking)))
    whole = [{name: torch.zeros(4, 4, dtype=torch.int8) for name in layer.matrices[0]}]
    assert "int8" in str(kernel.refusal(replace(layer, matrices=whole)))
    with pytest.raises(ValueError, match="int8"):
        kernel.layer(replace(layer, matrices=whole))


@pytest.mark.parametrize(
    ("lacking", "wanted", "zen"),
    [
        (("amx-bf16",), "avx512_vnni", False), (("amx-bf16",), "avx512_bf16", True),
        (("avx512bf16",), "avx512_vnni", False),
        (("avx512bf16", "avx512vnni"), "avx512", False), (("avx512f",), "avx2_vnni", False),
        (("avx512f", "avxvnni"), "avx2_madd", False), (("avx512f", "avx2", "neon"), "plain", False),
    ],
)  # fmt: skip
def test_a_cpu_that_lacks_vectors_takes_a_form_it_has(
    lacking: tuple[str, ...], wanted: str, zen: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = {name: here for name, here in host_features().items() if name not in lacking}
    if wanted != "plain" and wanted not in forms():
        pytest.skip(f"this CPU has no {wanted}")
    monkeypatch.setattr("moeq_kernels.cpu.forms.host_features", lambda: found)
    monkeypatch.setattr("moeq_kernels.cpu.forms.is_zen", lambda: zen)
    kernel = CpuKernel()
    assert kernel.form.name == wanted
    check(layer_of([4, 3], 96, 64), kernel, routed(1, 2, 2, 96, BF16))


@pytest.mark.full
@settings(max_examples=examples(150), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given_some(
    rows=some.integers(1, 70),
    inputs=some.integers(1, 200),
    bits=some.sampled_from([*range(1, 9), 16]),
    group_size=some.sampled_from([-1, 7, 16, 24, 32, 64, 128]),
    symmetric=some.booleans(),
    nested=some.booleans(),
    dtype=some.sampled_from(list(TOLERANCE)),
    count=some.sampled_from([0, 1, 2, 3, 5, 8, 16, 17, 64, 65, 600, 4096]),
    unpacked=some.booleans(),
    seed=some.integers(0, 9),
)
def test_any_product_in_any_form(
    form: str, rows: int, inputs: int, bits: int, group_size: int, symmetric: bool, nested: bool, dtype: torch.dtype,
    count: int, unpacked: bool, seed: int,
) -> None:  # fmt: skip
    matrix = matrix_of(rows, inputs, bits, group_size, symmetric=symmetric, nested=nested, dtype=dtype, seed=seed)
    given = torch.randn(count, inputs, generator=torch.Generator().manual_seed(seed)).to(dtype)
    result = CpuKernel(form, 1 if unpacked else measured.NEVER).linear(matrix)(given).double()
    wanted = given.double() @ values(matrix).T
    assert result.shape == wanted.shape
    if count:
        lost = TOLERANCE[dtype] * (2 if unpacked else 1)  # unpacked values are rounded, too
        assert (result - wanted).abs().max() <= lost * (given.double().abs() @ values(matrix).abs().T).max()


@pytest.mark.full
@pytest.mark.parametrize("group_size", [-1, 16, 24, 32, 128])
@pytest.mark.parametrize("symmetric", [False, True])
def test_all_widths_all_forms(form: str, group_size: int, symmetric: bool) -> None:
    kernel = CpuKernel(form)
    for dtype in TOLERANCE:
        layer = layer_of([*range(1, 9), 16], 160, 72, group_size, symmetric=symmetric, dtype=dtype)
        for tokens in (1, 2, 4, 7, 16, 33, 64):
            check(layer, kernel, routed(tokens, 9, 4, 160, dtype, seed=tokens))


def test_the_gate_of_the_tests_is_the_activation() -> None:
    parts = {"gate_proj": torch.tensor([1.0]), "up_proj": torch.tensor([2.0])}
    assert silu_gate(parts) == 2 * torch.sigmoid(torch.tensor(1.0))
