"""Where packed matrices lie: small ones side by side in one buffer, freed with the last of them."""

import gc
import weakref

from moeq_kernels.cpu import pages


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
