"""Log-probabilities of a text's tokens, and how far a model's distributions are from those of the first one.

The figures are those of llama.cpp's `--kl-divergence`; there, percentiles are interpolated linearly, too. It differs in
this: it scores the second half of every chunk alone, keeps the first model's logits in 16 bits from the largest down to
16 below, leaves out tokens that the first model gives a probability below exp(-16), and takes tokens as independent in
its standard errors, which are those of windows or documents here.

Letters: T tokens of a part of a text, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from moeq.artifacts.evaluation import Divergence
from moeq.errors import EvaluationError
from moeq.evaluation.paired import standard_error
from moeq.evaluation.reference_logits import Key, ReferenceLogits, Scored, Seen, Stored
from moeq.evaluation.results import items_of_text
from moeq.numerics.divergence import Kept, kl_bounds, kl_divergence

SLICE = 1 << 18  # logits that are float64 at once
LOGIT_BYTES = 7 * 8  # of each of those, with what is made of it
TOKEN_BYTES = 160  # of every token's figures of one model, until they are summed up
COLUMNS = ("kl", "same_top", "top5_overlap", "change", "squared_change")  # whose sums are kept of every item
KL_PERCENTILES = (0, 0.1, 1, 5, 10, 50, 90, 95, 99, 99.9, 100)
CHANGE_PERCENTILES = (0, 0.1, 1, 5, 10, 25, 50, 75, 90, 95, 99, 99.9, 100)


def slice_bytes(tokens: int, vocabulary: int) -> int:
    """Most bytes that scoring and comparing a window of so many tokens takes beside its logits."""
    return LOGIT_BYTES * min(max(SLICE, vocabulary), tokens * vocabulary)


class Scorer:
    """Log-probabilities of targets, summed up in float64. missing: why nothing is compared with the first model."""

    missing: str | None = None

    def score(self, key: Key, logits: Tensor, targets: Tensor) -> Tensor:
        """Log-probabilities [T] of a window's targets [T] after logits [T, V], on the CPU; a window comes once."""
        targets = targets.to(logits.device)
        rows = max(1, SLICE // logits.shape[1])
        # at once: small tensors that stay would part the freed large ones
        scores = torch.empty(len(targets), dtype=torch.float64)
        for start in range(0, len(targets), rows):
            part, wanted = logits[start : start + rows], targets[start : start + rows]
            logprobs = part.log_softmax(1, dtype=torch.float64)
            own = logprobs.gather(1, wanted[:, None]).squeeze(1)
            self._see(key, start, Scored(logits=part, logprobs=logprobs, targets=wanted, scores=own))
            scores[start : start + rows] = own.cpu()
        return scores

    def _see(self, key: Key, start: int, part: Scored) -> None:
        """The tokens of a window from `start` on."""

    def divergence(self, measured: Mapping[str, Any]) -> dict[str, Any] | None:
        """The fields of `Divergence`, and the sums of every one of the measured text's items; None: not compared."""
        return None


class Recorder(Scorer):
    """The first model, whose logits are kept."""

    def __init__(self, reference: ReferenceLogits) -> None:
        self._reference = reference

    def _see(self, key: Key, start: int, part: Scored) -> None:
        self._reference.write(key, part)


class Comparer(Scorer):
    """Another model, which is compared with the first one."""

    def __init__(self, base: str, reference: ReferenceLogits) -> None:
        self._base, self._reference = base, reference
        self._tokens: dict[Key, Tensor] = {}  # [T, columns, what kl is at most, rest]

    def score(self, key: Key, logits: Tensor, targets: Tensor) -> Tensor:
        self._tokens[key] = torch.empty(len(targets), len(COLUMNS) + 2, dtype=torch.float64)
        return super().score(key, logits, targets)

    def _see(self, key: Key, start: int, part: Scored) -> None:
        vocabulary, theirs = part.logits.shape[1], self._reference.vocabulary
        if vocabulary != theirs:
            self.missing = f"its vocabulary is {vocabulary:,}, that of {self._base} {theirs:,}"
        if self.missing is not None:
            return
        stored = self._reference.read(key, start, len(part.targets), part.logits.device)
        if stored is None or not torch.equal(stored.targets, part.targets):
            self.missing = f"its tokens are not those of {self._base}"
            return
        self._tokens[key][start : start + len(part.targets)] = _compared(stored, part).cpu()

    def divergence(self, measured: Mapping[str, Any]) -> dict[str, Any] | None:
        if self.missing is not None:
            return None
        windows = {key: tokens.numpy() for key, tokens in sorted(self._tokens.items())}
        tokens = np.concatenate(list(windows.values()))
        if not np.isfinite(tokens).all():
            where, do = f"KL to {self._base}", "use dtype: float32 or check the checkpoint"
            raise EvaluationError("the model's outputs are not finite", where=where, do=do)
        items = self._sums(windows, measured)
        whole = self._reference.whole
        change = items["squared_change"].sum() / len(tokens)
        errors = {name: self._error(sums, measured) for name, sums in items.items()}
        rms, squared_error = float(np.sqrt(change)), errors["squared_change"]
        means = dict(zip(COLUMNS, tokens.mean(0).tolist(), strict=False))
        found = Divergence(
            base=self._base,
            tokens=len(tokens),
            kl=means["kl"],
            kl_stderr=errors["kl"],
            kl_percentiles=_percentiles(tokens[:, 0], KL_PERCENTILES),
            same_top=means["same_top"],
            same_top_stderr=errors["same_top"],
            top5_overlap=means["top5_overlap"],
            top5_overlap_stderr=errors["top5_overlap"],
            change=means["change"],
            change_stderr=errors["change"],
            rms_change=rms,
            rms_change_stderr=squared_error / (2 * rms) if squared_error is not None and rms else squared_error,
            change_percentiles=_percentiles(tokens[:, 3], CHANGE_PERCENTILES),
            kept=None if whole else self._reference.kept,
            rest=float(tokens[:, -1].mean()),
            kl_most=None if whole else float(tokens[:, -2].mean()),
            kl_percentiles_most={} if whole else _percentiles(tokens[:, -2], KL_PERCENTILES),
        )
        return found.model_dump() | {"items": {name: sums.tolist() for name, sums in items.items()}}

    def _sums(self, windows: Mapping[Key, np.ndarray], measured: Mapping[str, Any]) -> dict[str, np.ndarray]:
        """The columns' sums over every item of the text."""
        sums = np.array([[*rows[:, : len(COLUMNS)].sum(0), len(rows)] for rows in windows.values()]).T
        assert sums[-1].tolist() == measured["items"]["tokens"], "other items than those of the perplexity"
        return dict(zip(COLUMNS, sums[:-1], strict=True))

    @staticmethod
    def _error(sums: np.ndarray, measured: Mapping[str, Any]) -> float | None:
        return standard_error(replace(items_of_text(dict(measured)), kind="mean", values=sums))


class Reference:
    """The first model of an evaluation, and what compares the others with it. A context that ends with the file."""

    def __init__(self, folder: Path | None) -> None:
        """folder: where the logits lie meanwhile, None for the system's own for temporary files."""
        self._folder = folder
        self._base = ""
        self._logits: ReferenceLogits | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._logits is not None:
            self._logits.close()

    def seen(self) -> tuple[str, Seen] | None:
        """The first model as another process of this machine compares with it; None where none was scored."""
        return None if self._logits is None else (self._base, self._logits.seen())

    @classmethod
    def again(cls, seen: tuple[str, Seen] | None) -> Reference:
        """The same in that process."""
        made = cls(None)
        if seen is not None:
            made._base, made._logits = seen[0], ReferenceLogits.again(seen[1])
        return made

    def scorer(self, name: str, tokens: int) -> Scorer:
        """What scores the next model on a text of so many tokens that count."""
        if self._logits is not None:
            return Comparer(self._base, self._logits)
        self._base, self._logits = name, ReferenceLogits(self._folder, tokens)
        return Recorder(self._logits)


def _compared(stored: Stored, part: Scored) -> Tensor:
    """[T, columns, what kl is at most, rest] in float64."""
    kept = stored.logprobs
    if isinstance(kept, Kept):
        (least, most), rest = kl_bounds(kept, part.logprobs), kept.rest
    else:
        least = most = kl_divergence(kept, part.logprobs)
        rest = torch.zeros_like(least)
    first, top = part.leading()
    same = (first == stored.first).double()
    overlap = (top[:, :, None] == stored.top[:, None, :]).any(2).double().mean(1)
    change = part.scores.exp() - stored.scores.exp()
    return torch.stack([least, same, overlap, change, change**2, most, rest], 1)


def _percentiles(values: np.ndarray, wanted: tuple[float, ...]) -> dict[str, float]:
    """By their names; between two values interpolated linearly."""
    return {f"{name:g}": float(value) for name, value in zip(wanted, np.percentile(values, wanted), strict=True)}
