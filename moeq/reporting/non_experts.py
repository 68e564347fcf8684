"""The section on modules outside of the experts, where the run packed some of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from moeq.artifacts.non_experts import OtherRow, OtherTable
from moeq.reporting import formats
from moeq.reporting.html import Raw, Section, details, paragraph, table
from moeq.tables import human_bytes

FALLBACKS = {
    "rounded": "rounded to nearest instead of GPTQ",
    "no_tokens": "no calibration row came to it",
    "not_one_row_a_token": "its inputs are not one row a token",
    "inputs_vary": "it was given other tensors than what it shared them with",
    "raised_damping": "the factorization held only with more damping",
    "float64": "the factorization held only in float64",
}


def packed_modules(others: OtherTable) -> Section:
    """What else was packed, class by class."""
    kinds = dict.fromkeys(row.kind for row in others.modules)
    rows = [_line(kind, [row for row in others.modules if row.kind == kind]) for kind in kinds]
    parts: list[Raw] = [
        table(
            "Modules outside of the routed experts, by class. The error is the mean square of what the output is off, "
            "over the output's own, on held-out rows; routers and norms keep full precision.",
            ("class", "modules", "code bits", "method", "bytes", "in FP16", "mean error", "largest error"),
            rows,
        ),
        *_notes(others),
        details("Every module", _modules(others.modules)),
    ]
    return Section("others", "What else was packed", parts)


def _line(kind: str, rows: Sequence[OtherRow]) -> list[str]:
    errors = [row.relative_error for row in rows if row.relative_error is not None]
    return [
        kind,
        str(len(rows)),
        str(rows[0].bits),
        " and ".join(dict.fromkeys(row.method for row in rows)),
        human_bytes(sum(row.bytes for row in rows)),
        human_bytes(sum(2 * row.rows * row.inputs for row in rows)),
        formats.share(sum(errors) / len(errors) if errors else None),
        formats.share(max(errors, default=None)),
    ]


def _notes(others: OtherTable) -> list[Raw]:
    notes = []
    counts = Counter(name for row in others.modules for name in row.fallback.split("+") if name != "none")
    if counts:
        notes.append("; ".join(f"{count}: {FALLBACKS.get(name, name)}" for name, count in sorted(counts.items())))
    tied = [row for row in others.modules if row.tied is not None]
    notes += [f"{row.module} and {row.tied} are one tensor, rounded row by row." for row in tied]
    left = Counter(others.left.values())
    notes += [f"{formats.count(count, 'module')} left in full precision: {reason}." for reason, count in left.items()]
    if others.absent:
        notes.append(f"Not in this model: {', '.join(others.absent)}.")
    return [paragraph(text) for text in notes]


def _modules(modules: Sequence[OtherRow]) -> Raw:
    rows = [
        [
            row.module,
            str(row.bits),
            row.method,
            f"{row.rows} x {row.inputs}",
            human_bytes(row.bytes),
            formats.share(row.relative_error),
            row.fallback,
        ]
        for row in modules
    ]
    head = ("module", "code bits", "method", "rows x inputs", "bytes", "error", "fallback")
    return table("Each module, with the error of its output on held-out rows.", head, rows)
