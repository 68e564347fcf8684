"""The recipe's gates: bounds with what the run came to."""

from __future__ import annotations

from moeq.reporting.html import Section, table
from moeq.reporting.inputs import ReportInputs


def gates(inputs: ReportInputs) -> Section:
    """Every gate with its verdict, those that failed first."""
    ordered = sorted(inputs.gates, key=lambda gate: gate.holds)
    failed = sum(not gate.holds for gate in ordered)
    rows = [(gate.name, gate.measured(), "holds" if gate.holds else "FAILED", gate.why or "") for gate in ordered]
    verdict = f"{failed} of {len(rows)} gates failed" if failed else "Every gate of the recipe holds"
    caption = f"{verdict}. A bound itself is still kept; of means, the interval of 95 % is shown and not judged."
    return Section("gates", "Gates", [table(caption, ("gate", "measured and bound", "verdict", ""), rows, texts=4)])
