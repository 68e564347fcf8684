"""A reader of EXL3 that shares nothing with moeq: from the packed words to weights, bit by bit, in numpy.

As exllamav3's kernels do it: codebook.cuh, exl3_dq.cuh, pack.cu and exl3.py of turboderp-org/exllamav3 at 4f8ad01.
"""

from __future__ import annotations

import numpy as np


def read_word(words: np.ndarray, step: int, bits: int) -> int:
    """The 16 bits that end with a step, of a tile's little-endian words of 32 bits, most significant bit first."""
    found = 0
    for place in range((step + 1) * bits - 16, (step + 1) * bits):
        at = place % (256 * bits)
        found = found << 1 | int(words[at // 32]) >> 31 - at % 32 & 1
    return found


def half(bits: int) -> np.float16:
    return np.uint16(bits).view(np.float16)


def read_value(word: int, codebook: str) -> np.float16:
    if codebook == "mul1":
        product = word * 0x83DCD12D % 2**32
        total = 0x6400 + sum(product >> shift & 0xFF for shift in (0, 8, 16, 24))  # bits of a half, 1024 and more
        exact = float(half(total)) * float(half(0x1EEE)) + float(half(0xC931))
        return np.float16(exact)
    product = (word * 0xCBAC1FED if codebook == "mcg" else word * 89226354 + 64248484) % 2**32
    both = product & 0x8FFF8FFF ^ 0x3B603B60
    return np.float16(float(half(both & 0xFFFF)) + float(half(both >> 16)))


def read(trellis: np.ndarray, suh: np.ndarray, svh: np.ndarray, codebook: str) -> tuple[np.ndarray, np.ndarray]:
    """V float16 [K, N], and the weight float32 [N, K]."""
    bits, words = trellis.shape[2] // 16, trellis.view(np.uint32)
    inner = np.empty((len(suh), len(svh)), np.float16)
    for k, n in np.ndindex(*trellis.shape[:2]):
        for step in range(256):
            thread, own = step // 8, step % 8  # eight weights of each of 32 threads: the fragment of a tensor core
            row = 2 * (thread % 4) + (0, 1, 8, 9, 0, 1, 8, 9)[own]
            column = thread // 4 + (0, 0, 0, 0, 8, 8, 8, 8)[own]
            inner[16 * k + row, 16 * n + column] = read_value(read_word(words[k, n], step, bits), codebook)
    plus = np.array([[1 - 2 * ((i & j).bit_count() % 2) for j in range(128)] for i in range(128)], np.float64)
    whole = inner.astype(np.float64)
    for start in range(0, len(suh), 128):
        whole[start : start + 128] = plus @ whole[start : start + 128]
    for start in range(0, len(svh), 128):
        whole[:, start : start + 128] = whole[:, start : start + 128] @ plus
    whole = whole / 128 * suh.astype(np.float64)[:, None] * svh.astype(np.float64)
    return inner, whole.T.astype(np.float32)
