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

group, ordered, device = int(sys.argv[1]), sys.argv[2] == "ordered", sys.argv[3]
generator = torch.Generator().manual_seed(0)
hidden = torch.randn(2, 400, 200, generator=generator, dtype=torch.float64)
hessian = hidden.mT @ (hidden + 0.5 * hidden.roll(1, -1))
hessian = (hessian + hessian.mT) / 800
weight = torch.randn(2, 40, 200, generator=generator)
weight[1, 3] = 0
order, hessian = act_order(hessian) if ordered else (None, hessian)
factor = factorize(hessian).unit_upper
assert gptq_device.has_kernel(weight.to(device))
calls = []
kernel = device_sweep.round_block
device_sweep.round_block = lambda *given: (calls.append(1), kernel(*given))
arguments = (weight, factor, (1, 2, 3, 4), 200 if group == -1 else group, False, order, None)
there = [one.to(device) if isinstance(one, torch.Tensor) else one for one in arguments]
expected = gptq_cpu.codes_and_grids(*arguments)
found = [one.cpu() for one in gptq_device.codes_and_grids(*there)]
assert calls
assert torch.equal(expected[0], found[0])
for one, other in zip(expected[1:], found[1:]):
    torch.testing.assert_close(one, other)
"""


def run(group: int, order: str, device: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", SCRIPT, str(group), order, device]
    return subprocess.run(command, env=os.environ | environment, capture_output=True, text=True)


@pytest.mark.parametrize("order", ["plain", "ordered"])
@pytest.mark.parametrize("group", [32, 128, -1])
def test_the_kernel_equals_the_compiled_loop(group: int, order: str) -> None:
    """In float64, where rounding leaves no room; the interpreter is chosen when Triton is imported."""
    found = run(group, order, "cpu", TRITON_INTERPRET="1")
    assert found.returncode == 0, found.stderr


@pytest.mark.cuda
@pytest.mark.parametrize("order", ["plain", "ordered"])
def test_the_kernel_equals_the_compiled_loop_on_a_gpu(order: str) -> None:
    found = run(128, order, "cuda")
    assert found.returncode == 0, found.stderr
