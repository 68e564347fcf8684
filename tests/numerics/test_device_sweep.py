"""The Triton kernel against the compiled loop, in Triton's interpreter or, where there is one, on a GPU."""

import os
import subprocess
import sys

import pytest

pytest.importorskip("triton", reason="the gpu extra is not installed")

SCRIPT = """
import sys
import torch
from moeq.numerics import device_sweep, gptq_cpu, gptq_device
from moeq.numerics.factor import act_order, factorize

kernel, calls = device_sweep.round_block, []
device_sweep.round_block = lambda *given: (calls.append(1), kernel(*given))


def compare(group, ordered, device):
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(2, 400, 200, generator=generator, dtype=torch.float64)
    hessian = hidden.mT @ (hidden + 0.5 * hidden.roll(1, -1))
    hessian = (hessian + hessian.mT) / 800
    rows = 40 if device == "cuda" else 10  # of which four widths are more than a program's, and no multiple of them
    weight = torch.randn(2, rows, 200, generator=generator)
    weight[1, 3] = 0
    order, hessian = act_order(hessian) if ordered else (None, hessian)
    factor = factorize(hessian).unit_upper
    assert gptq_device.has_kernel(weight.to(device))
    calls.clear()
    arguments = (weight, factor, (1, 2, 3, 4), 200 if group == -1 else group, False, order, None)
    there = [one.to(device) if isinstance(one, torch.Tensor) else one for one in arguments]
    expected = gptq_cpu.codes_and_grids(*arguments)
    found = [one.cpu() for one in gptq_device.codes_and_grids(*there)]
    assert calls
    assert torch.equal(expected[0], found[0])
    for one, other in zip(expected[1:], found[1:]):
        torch.testing.assert_close(one, other)


for case in sys.argv[2:]:
    group, order = case.split(":")
    try:
        compare(int(group), order == "ordered", sys.argv[1])
        print(case)
    except AssertionError as error:
        print(f"{case} differs: {error}", file=sys.stderr)
"""
CASES = ("32:ordered", "128:plain", "-1:ordered", "32:plain", "128:ordered", "-1:plain")


def run(device: str, *cases: str, **environment: str) -> tuple[list[str], str]:
    """Which cases are equal, and what is said of the others: all in one process."""
    command = [sys.executable, "-c", SCRIPT, device, *cases]
    done = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True)
    return done.stdout.split(), done.stderr


@pytest.fixture(scope="module")
def interpreted() -> tuple[list[str], str]:
    """In float64, where rounding leaves no room; the interpreter is chosen when Triton is imported."""
    return run("cpu", *CASES, TRITON_INTERPRET="1")


@pytest.mark.full
@pytest.mark.parametrize("case", CASES)
def test_the_kernel_equals_the_compiled_loop(case: str, interpreted: tuple[list[str], str]) -> None:
    equal, said = interpreted
    assert case in equal, said


ELSEWHERE = """
from contextlib import contextmanager
import torch
from moeq.numerics import device_sweep, device_walks

current, seen = ["another"], []


@contextmanager
def on(device):
    current.append(device.type)
    yield
    current.pop()


class Noted:
    def __getitem__(self, grid):
        return lambda *given, **named: seen.append(current[-1])


device_sweep.launching_on = device_walks.launching_on = on
device_sweep._round_block = device_walks._walk = Noted()
columns, grid = torch.zeros(2, 3, 8), torch.ones(2, 1, 8)
given = columns, columns, torch.zeros(2, 3, 3), grid, grid, grid[0, 0], columns
device_sweep.round_block(*given, columns.to(torch.uint8))
device_walks.walks(torch.zeros(2, 256), torch.zeros(256), 2)
print(*seen)
"""


def test_programs_run_on_the_gpu_of_what_they_are_given() -> None:
    """The loops' and the walks': Triton itself would take the current one."""
    done = subprocess.run([sys.executable, "-c", ELSEWHERE], capture_output=True, text=True)
    assert done.stdout == "cpu cpu\n", done.stderr


@pytest.mark.cuda
@pytest.mark.parametrize("order", ["plain", "ordered"])
def test_the_kernel_equals_the_compiled_loop_on_a_gpu(order: str) -> None:
    equal, said = run("cuda", f"128:{order}")
    assert equal == [f"128:{order}"], said
