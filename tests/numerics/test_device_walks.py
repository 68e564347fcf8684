"""The Triton kernel of trellis codes' walks against plain torch: in Triton's interpreter, and on a GPU where one is."""

import os
import subprocess
import sys

import pytest

pytest.importorskip("triton", reason="the gpu extra is not installed")

SCRIPT = """
import sys
import torch
from moeq.numerics import device_walks, trellis_device, trellis_ldlq
from moeq.numerics.factor import factorize

device, (has_kernel, kernel), calls = sys.argv[1], (trellis_device.has_kernel, device_walks.walks), []
device_walks.walks = lambda *given: (calls.append(1), kernel(*given))[1]


def both(make):
    '''What is made with the kernel, and without it.'''
    calls.clear()
    found = make()
    assert calls, "the kernel is not used"
    trellis_device.has_kernel = lambda tensor: False
    calls.clear()
    expected = make()
    assert not calls
    trellis_device.has_kernel = has_kernel
    return found, expected


def compare(state_bits, bits, tiles, sets, steps):
    '''sets: of importances, 0: none.'''
    for module in (device_walks, trellis_device):
        module.STEPS, module.SEAM = steps, steps // 4
    device_walks.BACK_BYTES = tiles * (steps * bits >> 3 << state_bits - bits) // 2  # so that there are a few launches
    generator = torch.Generator().manual_seed(16 * state_bits + bits)
    wanted = torch.randn(tiles, steps, generator=generator).to(device)
    value = torch.randn(1 << state_bits, generator=generator).to(device)
    counts = (torch.rand(sets, steps, generator=generator) + 0.3).to(device) if sets else None
    found, expected = both(lambda: trellis_device.walks(wanted, value, bits, counts))
    losses = []
    for codes, nearest in (found, expected):
        assert codes.dtype == torch.uint8 and nearest.dtype == torch.float32
        ring = torch.zeros(tiles, steps, dtype=torch.long, device=device)  # states by the codes
        for before in range(-(-state_bits // bits)):
            up = state_bits - bits * (before + 1)
            moved = codes.long().roll(before, 1)
            ring += moved << up if up >= 0 else moved >> -up
        assert torch.equal(value[ring], nearest), "no closed walk"
        weights = 1 if counts is None else counts.repeat_interleave(tiles // sets, 0)
        losses.append((weights * (wanted - nearest) ** 2).sum(1))
    if device == "cpu":
        assert torch.equal(found[0], expected[0]), "other walks"
    far = (losses[0] - losses[1]).abs() > 1e-5 * losses[1]  # ties around the seam may close at other costs
    assert float(far.float().mean()) <= 0.02, f"{int(far.sum())} of {tiles} tiles are others"
    torch.testing.assert_close(losses[0].mean(), losses[1].mean(), rtol=1e-4, atol=0)


def more_states(state_bits):
    '''Trellises of more states than the kernel is for are left to plain torch.'''
    device_walks.MOST_STATES = 1 << state_bits - 1
    calls.clear()
    trellis_device.walks(torch.randn(1, trellis_device.STEPS), torch.randn(1 << state_bits), 1)
    assert not calls


def quantize(state_bits):
    '''Trellis codes of weights use the kernel.'''
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(2, 40, 300, generator=generator) * 0.02
    mixed = torch.randn(2, 300, 300, generator=generator) * torch.linspace(0.1, 2, 300)
    weight, hessian = weight.to(device), (mixed.mT @ mixed / 300).to(device)
    factor = factorize(hessian)
    made = both(lambda: trellis_ldlq.quantize(weight, factor, hessian, [1, 2, 4, 8], state_bits))
    for found, expected in zip(*made):
        left = [weight - one.dequantize() for one in (found, expected)]
        losses = [((one @ hessian) * one).sum() for one in left]
        torch.testing.assert_close(*losses, rtol=0.03, atol=0)


for case in sys.argv[2:]:
    name, *numbers = case.split(":")
    try:
        globals()[name](*map(int, numbers))
        print(case)
    except AssertionError as error:
        print(f"{case} differs: {error}", file=sys.stderr)
"""
SHORT = ("compare:4:2:2:0:32", "compare:4:1:2:2:32", "compare:6:3:1:1:32", "more_states:5")
LONG = ("compare:5:1:2:0:256", "compare:6:2:2:2:256", "compare:6:3:2:1:256", "compare:8:4:1:1:256")
ON_GPU = [f"compare:{states}:{bits}:150:{3 * (bits % 2)}:256" for states in (8, 10, 12, 14) for bits in (1, 2, 3, 4)]


def run(device: str, *cases: str, **environment: str) -> tuple[list[str], str]:
    """Which cases hold, and what is said of the others: all in one process; Triton chooses when it is imported."""
    command = [sys.executable, "-c", SCRIPT, device, *cases]
    done = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True)
    return done.stdout.split(), done.stderr


@pytest.mark.cases(0)
def test_the_kernel_finds_the_walks_of_plain_torch() -> None:
    """Around rings of 32 steps."""
    equal, said = run("cpu", *SHORT, TRITON_INTERPRET="1")
    assert equal == list(SHORT), said


@pytest.mark.full
def test_the_kernel_finds_the_walks_of_whole_tiles() -> None:
    equal, said = run("cpu", *LONG, TRITON_INTERPRET="1")
    assert equal == list(LONG), said


@pytest.mark.cuda
def test_the_kernel_finds_the_walks_of_plain_torch_on_a_gpu() -> None:
    equal, said = run("cuda", *ON_GPU)
    assert equal == ON_GPU, said


@pytest.mark.cuda
@pytest.mark.parametrize("states", [9, 12])
def test_trellis_codes_on_a_gpu_are_made_by_the_kernel(states: int) -> None:
    equal, said = run("cuda", f"quantize:{states}")
    assert equal == [f"quantize:{states}"], said
