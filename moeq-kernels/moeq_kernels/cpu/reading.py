"""A large buffer read as fast as all threads can: what the reading of packed matrices is held against."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from moeq_kernels.cpu.compiled import entry
from moeq_kernels.cpu.emit import LINE_BYTES
from moeq_kernels.cpu.kept_code import internal
from moeq_kernels.cpu.memory import add_at, asking, int64s
from moeq_kernels.cpu.schedule import LINE
from moeq_kernels.cpu.threads import together

PIECE, PAGE, AHEAD = 1 << 14, 1 << 7, 6 << 10  # words that a thread claims, and asks for; bytes ahead
_ask_for = asking(2)  # read so, a Zen 4 gives 8 % more than with 8 KiB ahead into the first level of cache
_compile = internal()


@_compile  # type: ignore[untyped-decorator]
def _sum(words):  # type: ignore[no-untyped-def]
    result = np.int64(0)
    for k in range(words.shape[0]):
        result += words[k]
    return result


def _read(address):  # type: ignore[no-untyped-def]
    """One thread's part of reading all words, which are asked for ahead of reading them. The numbers: a counter on a
    line of its own, addresses of words and of their sum, how many words there are."""
    numbers = int64s(address, LINE + 3)
    words = int64s(numbers[LINE], numbers[LINE + 2])
    result = np.int64(0)
    while True:
        first = add_at(address, PIECE)
        if first >= words.shape[0]:
            break
        for begin in range(first, min(first + PIECE, words.shape[0]), PAGE):
            for line in range(0, 8 * PAGE, LINE_BYTES):
                _ask_for(numbers[LINE] + 8 * begin + AHEAD + line)
            result += _sum(words[begin : begin + PAGE])
    add_at(numbers[LINE + 1], result)


def total(words: NDArray[np.int64]) -> int:
    """The sum of all words, [n] one after the other in memory, read with as many threads as torch has: it shows that
    each was read."""
    sums, numbers = np.zeros(1, np.int64), np.zeros(LINE + 3, np.int64)
    numbers[LINE:] = words.ctypes.data, sums.ctypes.data, len(words)
    together(entry(_read), numbers)
    return int(sums[0])
