"""Small results kept apart from temporaries."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from moeq.numerics.slab import BLOCK_BYTES, Slab

PACKING = """
import re, torch
from moeq.numerics.gptq import quantize
from moeq.numerics.storing import packed_of
from moeq.numerics.slab import Slab
def anonymous():
    return int(re.search(r"RssAnon:\\s+(\\d+)", open("/proc/self/status").read())[1]) * 1024
weight = torch.randn(1, 1024, 1024)
def packed():
    return packed_of(quantize(weight, None, bits=[4], group_size=128), 4, False)
packed()
slab, start = Slab(), anonymous()
kept = [packed().map(slab.keep) for _ in range(60)]
print(anonymous() - start - sum(one.nbytes for one in kept))
"""


def test_copies_are_equal_and_do_not_overlap() -> None:
    slab = Slab()
    generator = torch.Generator().manual_seed(1)
    types = (torch.uint8, torch.float16, torch.float32, torch.bfloat16)
    shapes = ((3, 5), (0, 4), (), (7,), (33, 2))
    given = [torch.randn(shape, generator=generator).abs().to(dtype) for dtype in types for shape in shapes]
    given.append(torch.arange(12.0).reshape(3, 4).T)
    kept = [slab.keep(tensor) for tensor in given]
    assert all(torch.equal(one, other) and one.dtype == other.dtype for one, other in zip(kept, given, strict=True))
    assert all(one.is_contiguous() for one in kept)


def test_what_fits_no_block_gets_its_own() -> None:
    slab = Slab()
    sizes = (BLOCK_BYTES - 10, 100, BLOCK_BYTES + 1, 7)
    kept = [slab.keep(torch.full((size,), index, dtype=torch.uint8)) for index, size in enumerate(sizes)]
    assert [(len(tensor), int(tensor.min()), int(tensor.max())) for tensor in kept] == [
        (size, index, index) for index, size in enumerate(sizes)
    ]


@pytest.mark.full
@pytest.mark.skipif(not Path("/proc/self/status").is_file(), reason="no /proc here")
def test_the_heap_does_not_grow_with_every_matrix() -> None:
    done = subprocess.run([sys.executable, "-c", PACKING], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 60 << 20  # 280 MiB where the parts stay where they were computed
