"""First calls of several threads at once, and of children that were forked off."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator

import pytest
import torch
from packed_layers import layer_of
from torch import nn

from moeq.runtime.packed_modules import PackedModule
from moeq_kernels import choice
from moeq_kernels.cpu.kernel import CpuKernel
from moeq_kernels.once import made_once
from moeq_kernels.widths import Encoding


@pytest.fixture
def switching() -> Iterator[None]:
    """Threads take turns as often as they can, which makes what goes wrong between two steps likely."""
    before, threads = sys.getswitchinterval(), torch.get_num_threads()
    sys.setswitchinterval(1e-6)
    torch.set_num_threads(1)
    yield
    sys.setswitchinterval(before)
    torch.set_num_threads(threads)


def at_once(call: Callable[[], object], number: int = 8) -> list[object]:
    """What so many threads get that begin together: results, or errors."""
    go, seen = threading.Barrier(number), []

    def one() -> None:
        go.wait(timeout=60)
        try:
            seen.append(call())
        except Exception as error:
            seen.append(error)

    threads = [threading.Thread(target=one) for _ in range(number)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    return seen


@pytest.mark.cases(1)
@pytest.mark.parametrize("times", [40, 300])
@pytest.mark.usefixtures("switching")
def test_threads_that_share_the_first_call_of_a_layer_share_its_numbers(times: int) -> None:
    layer, kernel = layer_of([4, 3] * 8, 64, 32), CpuKernel(prefill=1 << 30)
    given = torch.randn(4, 64), torch.randint(0, 16, (4, 2)), torch.rand(4, 2)
    wanted = kernel.layer(layer)(*given)
    for _ in range(times):
        prepared = kernel.layer(layer)
        found = at_once(lambda prepared=prepared: torch.equal(prepared(*given), wanted))
        assert found == [True] * 8
        assert torch.equal(prepared(*given), wanted)


def test_what_is_made_once_is_one_for_all_threads() -> None:
    made: list[object] = []

    class Holder:
        @made_once
        def value(self) -> object:
            made.append(object())
            return made[-1]

    holder = Holder()
    assert {id(one) for one in at_once(lambda: holder.value)} == {id(made[0])}
    assert len(made) == 1


def test_two_threads_have_a_kernel_take_a_module_once() -> None:
    with choice.choosing("fixed", at_once=False):
        for _ in range(10):
            module = PackedModule(nn.Linear(512, 256, bias=False), 4, Encoding(group_size=128, symmetric=False)).eval()
            for name, buffer in module.named_buffers():
                buffer.random_(0, 256) if name in ("codes", "zeros") else buffer.fill_(0.01)
            rows = torch.randn(2, 512)

            def product(module: PackedModule = module, rows: torch.Tensor = rows) -> torch.Tensor:
                with torch.inference_mode():
                    return module(rows)

            found = at_once(product, 2)
            assert all(isinstance(one, torch.Tensor) for one in found), found
            assert torch.equal(*found)


@pytest.mark.usefixtures("switching")
def test_what_is_looked_at_while_another_thread_calls_is_whole() -> None:
    """State dicts, copies, moves and calls that take the stored tensors."""
    with choice.choosing("fixed", at_once=False):
        module = PackedModule(nn.Linear(64, 48, bias=False), 4, Encoding(group_size=16, symmetric=False)).eval()
    for name, buffer in module.named_buffers():
        buffer.random_(0, 256) if name in ("codes", "zeros") else buffer.fill_(0.01)
    rows, whole = torch.randn(2, 64), list(module.state_dict())
    with torch.no_grad():
        wanted, doubles = module(rows), module(rows.double())
    ends, seen = time.monotonic() + 2, []

    def calls() -> None:
        with torch.no_grad():
            while time.monotonic() < ends:
                seen.append(torch.equal(module(rows), wanted))

    def looks() -> None:
        with torch.no_grad():
            while time.monotonic() < ends:
                seen.append(list(module.state_dict()) == whole)
                seen.append(list(copy.deepcopy(module).state_dict()) == whole)
                seen.append(torch.equal(module(rows.double()), doubles))
                module.to(torch.bfloat16).to(torch.float32)

    ways = iter((calls, looks, calls))
    assert at_once(lambda: next(ways)(), 3) == [None] * 3
    assert seen
    assert all(seen)


FORKED = """
import os, threading, time
import torch
torch.set_num_threads(2)
from moeq.numerics import trellis
from moeq_kernels.cpu.kernel import CpuKernel

values, targets = torch.randn(256), torch.randn(64, 256)
trellis.walks(targets, values, 2)
linear, rows = CpuKernel().linear(torch.randn(4096, 1024)), torch.randn(1, 1024)
linear(rows)
ours = [thread for thread in threading.enumerate() if thread.name == "moeq-kernel"]
allowed = lambda: [os.sched_getaffinity(thread.native_id) for thread in ours]
time.sleep(0.3)
before = allowed()
child = os.fork()
if child == 0:
    trellis.walks(targets, values, 2)
    raise SystemExit(7)
for _ in range(600):
    ended, status = os.waitpid(child, os.WNOHANG)
    if ended:
        break
    time.sleep(0.05)
else:
    os.kill(child, 9)
assert os.waitstatus_to_exitcode(status) == 7, status
time.sleep(0.3)
assert ours and allowed() == before, (before, allowed())
"""


@pytest.mark.skipif(not hasattr(os, "fork") or (os.cpu_count() or 1) < 2, reason="needs fork and two cores")
def test_a_forked_child_computes_and_leaves_its_parents_threads_alone() -> None:
    environment = os.environ | {"OMP_WAIT_POLICY": "PASSIVE"}
    subprocess.run([sys.executable, "-c", FORKED], env=environment, check=True, timeout=120)
