"""The gates of a run's recipe at the end of a command: a line for each, and an exit code where one failed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from moeq.cli.ending import refuse

if TYPE_CHECKING:
    from moeq.artifacts.gates import Gate


def as_json(gates: Sequence[Gate]) -> list[dict[str, Any]]:
    """Gates for --json."""
    return [gate.model_dump(mode="json", exclude_none=True) | {"line": gate.line()} for gate in gates]


def print_lines(gates: Sequence[Gate]) -> None:
    for gate in gates:
        print(gate.line())


def end(gates: Sequence[Gate], *, json: bool) -> None:
    """Raise GateError, or end with its exit code behind a result in JSON, where a gate failed."""
    from moeq.stages.gates import error_of

    error = error_of(gates)
    if error is not None:
        refuse(error, json=json)
