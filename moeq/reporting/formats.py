"""Figures as the report writes them: one function a quantity, `MISSING` where nothing was measured."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from moeq.tables import counted, rounded
from moeq_kernels.widths import DROPPED

MISSING = "\N{EN DASH}"
NARROW_SPACE = "\N{NARROW NO-BREAK SPACE}"
number, count = rounded, counted
TIMES = "\N{MULTIPLICATION SIGN}"


def perplexity(value: float | None) -> str:
    """About four significant digits."""
    if value is None:
        return MISSING
    if value < 10:
        return f"{value:.3f}"
    return f"{value:.2f}" if value < 1000 else f"{value:.4g}"


def kl(value: float | None) -> str:
    """In nats a token, three significant digits."""
    return MISSING if value is None else f"{value:.3g}"


def with_error(value: str, error: str | None) -> str:
    """A figure and its standard error, where it is known."""
    return value if error is None else f"{value}{NARROW_SPACE}±{NARROW_SPACE}{error}"


def cross_entropy(value: float | None) -> str:
    """In nats an image, four decimals."""
    return MISSING if value is None else f"{value:.4f}"


def change(value: float | None, reference: float | None) -> str:
    """Relative change against a reference, signed; empty when one of them is missing."""
    if value is None or reference is None or reference == 0:
        return ""
    percent = 100 * (value / reference - 1)
    return _signed(percent, 1 if abs(percent) >= 1 else 2) + NARROW_SPACE + "%"


def points(value: float | None, reference: float | None) -> str:
    """Difference of two shares in percentage points, signed; empty when one of them is missing."""
    return "" if value is None or reference is None else _signed(100 * (value - reference), 1) + " points"


def _signed(value: float, digits: int) -> str:
    text = f"{abs(value):.{digits}f}"
    sign = "±" if float(text) == 0 else "+" if value > 0 else "\N{MINUS SIGN}"
    return sign + text


def difference(value: float) -> str:
    """A difference, signed."""
    return _signed(value, 4 if abs(value) < 1 else 2)


def interval(low: float, high: float) -> str:
    return f"{difference(low)} to {difference(high)}"


def percent(value: float | None) -> str:
    """A share in percent with one decimal."""
    return MISSING if value is None else f"{100 * value:.1f}{NARROW_SPACE}%"


def standard_error(value: float | None) -> str:
    """The standard error of one accuracy, in percentage points; empty when it is not known."""
    return "" if value is None else f"standard error {100 * value:.1f} points"


def share(value: float | None, digits: int = 3) -> str:
    """A share in percent, in scientific notation only below 0.001 %."""
    if value is None or value != value:
        return MISSING
    percent = 100 * value
    if percent == 0 or abs(percent) >= 0.001:
        return f"{percent:.{digits}g}{NARROW_SPACE}%"
    return f"{percent:.1e}{NARROW_SPACE}%"


def bits(value: float | None) -> str:
    """Of a weight, on average."""
    return MISSING if value is None else f"{value:.2f}"


def width(bits: int) -> str:
    """The name of a width: bits of a code, not all that is stored for a weight."""
    return "dropped" if bits == DROPPED else f"{bits}-bit"


def ratio(value: float | None) -> str:
    """How many times as much."""
    if value is None:
        return MISSING
    return (f"{value:.2f}" if value < 10 else f"{value:.1f}") + TIMES


def milliseconds(seconds: float) -> str:
    value = 1e3 * seconds
    return f"{value:.2f}" if value >= 0.1 else f"{value:.2g}"


def span(values: Sequence[float], form: Callable[[float], str]) -> str:
    """The range of values; one figure when both ends read the same."""
    low, high = form(min(values)), form(max(values))
    return low if low == high else f"{low} to {high}"
