"""What windows of a text can be, before any text is read."""

from __future__ import annotations

from moeq.errors import EvaluationError


def check_windows(window: int, stride: int | None) -> int:
    """The stride, none for the window's own length; EvaluationError for windows that cannot be."""
    stride = window if stride is None else stride
    if window < 2 or not 1 <= stride <= window:
        raise EvaluationError(
            f"window {window}, stride {stride}", where="--text", do="give 1 <= stride <= window, window at least 2"
        )
    return stride


def too_long(window: int, positions: int) -> EvaluationError:
    """What is said of a window that the model has no positions for."""
    return EvaluationError(
        f"a window of {window} tokens is longer than the model's {positions} positions",
        where="--window",
        do=f"set it to {positions} or less",
    )
