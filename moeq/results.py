"""What a finished run amounts to: the rows of its final table, from eval.json and estimate.json."""

from __future__ import annotations

from typing import Any

from moeq.stages import estimate, evaluate
from moeq.stages.context import Context


def final_rows(context: Context) -> list[dict[str, Any]]:
    """One row a variant, largest first: bytes, perplexity, accuracy, estimated decode speed-ups over MoNDE."""
    report, estimates = evaluate.load(context), estimate.load(context)
    original = report.row(evaluate.ORIGINAL)
    rows = []
    for row in sorted(report.rows, key=lambda one: -one.expert_bytes):
        one = estimates.of(row.name)
        speed = {} if one is None else estimate.decode_speedups(one)
        change = None
        if row.perplexity is not None and original is not None and original.perplexity:
            change = row.perplexity / original.perplexity - 1
        rows.append(
            {
                "name": row.name,
                "exported": row.exported,
                "average_bits": row.average_bits,
                "expert_bytes": row.expert_bytes,
                "total_bytes": row.total_bytes,
                "perplexity": row.perplexity,
                "perplexity_change": change,
                "accuracy": row.accuracy,
                "accuracy_stderr": row.accuracy_stderr,
                "speedup_over_monde_bandwidth_rule": speed.get("monde_bwrule"),
                "speedup_over_monde_cost_optimal": speed.get("monde_opt"),
            }
        )
    return rows
