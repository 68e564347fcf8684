"""The logits of the model that others are compared with, on the disk until they have been.

All logits are kept, as the model gave them, where those of the whole text take no more than MOST_BYTES; else as many of
every token's likeliest as do, and what bounds the rest (see `numerics.divergence`). The file has no name: whatever ends
the process, nothing of it is left.

Letters: T tokens of a part of a text, V vocabulary, K tokens of it that are kept.
"""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import torch
from torch import Tensor

from moeq.artifacts.storage import storage_errors
from moeq.artifacts.tensor_files import write_all
from moeq.numerics.divergence import Kept, keep_likeliest

Key = tuple[int, int]  # a document, or a sequence, and the number of its window
MOST_BYTES = 4 << 30
LEAST_KEPT = 256  # of every token, however long the text is
TOP = 5  # likeliest tokens whose overlap is measured
WRITING = "write the reference's logits"  # where a disk refuses it
FLOATS = 5  # of every token: normalizer, log-probability of the target, and mass, entropy and largest of the rest


@dataclass(frozen=True, kw_only=True)
class Scored:
    """A part of a text that a model has scored: its logits [T, V] as it gave them, log-probabilities [T, V] in float64,
    targets [T] and their log-probabilities [T]."""

    logits: Tensor
    logprobs: Tensor
    targets: Tensor
    scores: Tensor

    def leading(self) -> tuple[Tensor, Tensor]:
        """The likeliest token [T], the first one of equals, and the TOP likeliest [T, TOP]."""
        return self.logits.argmax(1), self.logits.topk(min(TOP, self.logits.shape[1])).indices


@dataclass(frozen=True, kw_only=True)
class Stored:
    """What is known of the same part by the first model: log-probabilities [T, V], or what was kept of them."""

    logprobs: Tensor | Kept
    targets: Tensor
    scores: Tensor
    first: Tensor
    top: Tensor


def kept_logits(tokens: int, vocabulary: int, width: int) -> int:
    """How many logits of `width` bytes are kept of every token of a text."""
    if tokens * vocabulary * width <= MOST_BYTES:
        return vocabulary
    return min(vocabulary, max(LEAST_KEPT, MOST_BYTES // (tokens * (width + 4))))


def stored_bytes(tokens: int, vocabulary: int, width: int) -> int:
    """Bytes that the file takes for a text of so many tokens."""
    kept = kept_logits(tokens, vocabulary, width)
    return tokens * _record(kept, vocabulary, width)


def _record(kept: int, vocabulary: int, width: int) -> int:
    """Bytes of one token."""
    return kept * (width + (4 if kept < vocabulary else 0)) + 8 * FLOATS + 4 * (2 + min(TOP, vocabulary))


@dataclass(frozen=True, kw_only=True)
class Seen:
    """What another process reads a `ReferenceLogits` by; path: of the file, which has no name of its own."""

    path: Path
    folder: Path
    tokens: int
    starts: dict[Key, tuple[int, int]]
    vocabulary: int
    dtype: torch.dtype
    kept: int


class ReferenceLogits:
    """Logits of all windows of a text, written once and read for every other model."""

    def __init__(self, folder: Path | None, tokens: int) -> None:
        """folder: None for the system's own for temporary files; tokens: of the text that count.

        StorageError where the folder cannot be written to.
        """
        self.folder, self.tokens = folder or Path(tempfile.gettempdir()), tokens
        with storage_errors(self.folder, WRITING):
            self._file: IO[bytes] = tempfile.TemporaryFile(buffering=0, dir=self.folder)  # noqa: SIM115
        self._starts: dict[Key, tuple[int, int]] = {}  # where a window begins, and its tokens
        self._end = 0
        self.vocabulary, self.dtype, self.kept = 0, torch.float32, 0

    def seen(self) -> Seen:
        """What another process of this machine reads the file by while this one has it open."""
        path = Path(f"/proc/{os.getpid()}/fd/{self._file.fileno()}")
        return Seen(
            path=path, folder=self.folder, tokens=self.tokens, starts=dict(self._starts), vocabulary=self.vocabulary,
            dtype=self.dtype, kept=self.kept,
        )  # fmt: skip

    @classmethod
    def again(cls, seen: Seen) -> ReferenceLogits:
        """The same in another process, to be read."""
        made = cls.__new__(cls)
        made.folder, made.tokens, made._starts, made._end = seen.folder, seen.tokens, seen.starts, 0
        made.vocabulary, made.dtype, made.kept = seen.vocabulary, seen.dtype, seen.kept
        with storage_errors(seen.folder, "read"):
            made._file = seen.path.open("rb")
        return made

    def close(self) -> None:
        self._file.close()

    @property
    def whole(self) -> bool:
        """Whether all logits are kept."""
        return self.kept == self.vocabulary

    def write(self, key: Key, part: Scored) -> None:
        """Keep what follows in a window."""
        if not self._starts:
            self.vocabulary, self.dtype = part.logits.shape[1], part.logits.dtype
            self.kept = kept_logits(self.tokens, self.vocabulary, self.dtype.itemsize)
        begun, tokens = self._starts.get(key, (self._end, 0))
        self._starts[key] = begun, tokens + len(part.targets)
        first, top = part.leading()
        logits, ids = part.logits, []
        rest = [torch.zeros_like(part.scores)] * 3
        if not self.whole:
            kept = keep_likeliest(part.logprobs, self.kept)
            logits, ids = part.logits.gather(1, kept.ids), [kept.ids.int()]
            rest = [kept.rest, kept.entropy, kept.largest]
        normalizers = part.logits.gather(1, part.targets[:, None]).squeeze(1).double() - part.scores
        floats = torch.stack([normalizers, part.scores, *rest], 1)
        words = torch.cat([part.targets[:, None], first[:, None], top], 1).int()
        columns = [column.contiguous().view(torch.uint8).cpu() for column in (logits, *ids, floats, words)]
        data = torch.cat(columns, 1).numpy().tobytes()
        with storage_errors(self.folder, WRITING):
            write_all(self._file, memoryview(data))
        self._end += len(data)

    def read(
        self, key: Key, start: int, tokens: int, device: torch.device, dtype: torch.dtype = torch.float64
    ) -> Stored | None:
        """So many tokens of a window from `start` on; None where it has not so many.

        dtype: of log-probabilities, where all are kept.
        """
        begun, there = self._starts.get(key, (0, 0))
        if there < start + tokens:
            return None
        size = _record(self.kept, self.vocabulary, self.dtype.itemsize)
        with storage_errors(self.folder, "read"):
            data = os.pread(self._file.fileno(), tokens * size, begun + start * size)
        rows = torch.frombuffer(bytearray(data), dtype=torch.uint8).view(tokens, size).to(device)
        widths = [self.kept * self.dtype.itemsize, 0 if self.whole else 4 * self.kept, 8 * FLOATS]
        parts = rows.split([*widths, size - sum(widths)], 1)
        dtypes = (self.dtype, torch.int32, torch.float64, torch.int32)
        logits, ids, floats, words = (
            part.flatten().clone().view(dtype).view(tokens, part.shape[1] // dtype.itemsize)
            for part, dtype in zip(parts, dtypes, strict=True)
        )
        normalizers, scores, rest, entropy, largest = floats.unbind(1)
        logprobs: Tensor | Kept
        if self.whole:
            logprobs = logits.log_softmax(1, dtype=dtype)
        else:
            known = logits.double() - normalizers[:, None]
            logprobs = Kept(ids=ids.long(), logprobs=known, rest=rest, entropy=entropy, largest=largest)
        words = words.long()
        return Stored(logprobs=logprobs, targets=words[:, 0], scores=scores, first=words[:, 1], top=words[:, 2:])
