"""Where packed matrices lie: small ones side by side in one buffer, freed with the last; and what calls take."""

import gc
import mmap
import weakref
from pathlib import Path

import pytest
import torch
from packed_layers import layer_of, routed

from moeq_kernels import measured
from moeq_kernels.cpu import pages
from moeq_kernels.cpu.kernel import CpuKernel

HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")  # the way that is chosen stands in brackets


def test_small_buffers_share_one_and_do_not_overlap(monkeypatch):
    monkeypatch.setattr(pages, "_free", pages.np.zeros(0, "uint8"))
    first, second = pages.zeros(100), pages.zeros(1000)
    assert [len(first), len(second)] == [100, 1000]
    assert second.data_ptr() - first.data_ptr() == 128
    first.fill_(7)
    assert not second.any()
    assert not any(one.data_ptr() % pages.ALIGNED for one in (first, second))


def test_what_does_not_fit_takes_the_next_buffer(monkeypatch):
    monkeypatch.setattr(pages, "_free", pages.np.zeros(64, "uint8"))
    assert len(pages.zeros(65)) == 65
    assert len(pages._free) == pages.SHARED_BYTES - 128


def test_large_buffers_are_their_own(monkeypatch):
    monkeypatch.setattr(pages, "_free", pages.np.zeros(0, "uint8"))
    assert len(pages.zeros(pages.HUGE_BYTES)) == pages.HUGE_BYTES
    assert len(pages._free) == 0


def test_a_shared_buffer_is_freed_with_its_last_matrix(monkeypatch):
    monkeypatch.setattr(pages, "_free", pages.np.zeros(0, "uint8"))
    first, second = pages.zeros(100), pages.zeros(100)
    whole = weakref.ref(pages._free.base)
    pages._free = pages.np.zeros(0, "uint8")
    del first
    gc.collect()
    assert whole() is not None
    assert not second.any()
    del second
    gc.collect()
    assert whole() is None


def new_pages() -> int:
    resource = pytest.importorskip("resource")
    return int(resource.getrusage(resource.RUSAGE_SELF).ru_minflt)


@pytest.mark.skipif(
    not hasattr(mmap, "MADV_HUGEPAGE") or not HUGE_PAGES.exists() or "[never]" in HUGE_PAGES.read_text(),
    reason="no huge pages here",
)
def test_what_a_long_prompt_takes_comes_in_huge_pages() -> None:
    """Rows of activations and products are new memory at every call: page by page it took a sixth of the call."""
    tokens, top_k, hidden, inner, experts = 2048, 2, 512, 256, 4
    layer = CpuKernel(prefill=measured.NEVER).layer(layer_of([4] * experts, hidden, inner, activation="silu"))
    given = routed(tokens, experts, top_k, hidden, torch.bfloat16)
    least = tokens * hidden * 4 * 2 + tokens * top_k * (inner * 4 + hidden * 2)  # bytes: rows and sums as float32, ...
    layer(*given)

    def taken() -> int:
        before = new_pages()
        layer(*given)
        return new_pages() - before

    # of three calls: beside other tests the system may have none left for a moment
    assert min(taken() for _ in range(3)) < least / 4096 / 4
