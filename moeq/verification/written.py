"""A checkpoint that was just written is loaded by its target's own loader, where that can be done here."""

from __future__ import annotations

from pathlib import Path

import torch
from rich.markup import escape

from moeq.errors import EvaluationError
from moeq.exporters.readers import open_packed
from moeq.models.loading import memory_bytes
from moeq.progress import Reporter
from moeq.tables import human_bytes
from moeq.verification.against import differences
from moeq.verification.launch import NotInstalledError
from moeq.verification.verify import Options, Verdict, require, resident_bytes, verify


def check_written(
    directory: Path, reporter: Reporter, *, against: Path | None = None, trust_remote_code: bool = False
) -> Verdict | None:
    """Load a checkpoint in a fresh process and compare it; EvaluationError when it loads wrongly.

    against: the packed checkpoint whose values it must hold. None, and the reason is said, where the target's package
    is not installed here (its values are compared all the same) or memory is too small.
    """
    packed = open_packed(directory, trust_remote_code=trust_remote_code, as_values=True)
    size, memory = resident_bytes(packed), memory_bytes(torch.device("cpu"))
    del packed  # its headers and manifest; whoever checks it opens it again
    if size > memory:
        reporter.say(
            f"  [yellow]not verified: loading it takes {human_bytes(size)} of memory, there are {human_bytes(memory)}; "
            f"`moeq verify {escape(str(directory))}` on a larger machine[/yellow]"
        )
        return None
    try:
        source = None if against is None else str(against)
        verdict = verify(directory, Options(against=source, trust_remote_code=trust_remote_code), reporter)
    except NotInstalledError as error:
        reporter.say(f"  [yellow]not verified: {escape(str(error))}[/yellow]")
        if against is not None:
            _check_values(directory, against, reporter, trust_remote_code)
        return None
    require(verdict)
    worst = max((check.worst for check in verdict.layers), default=0.0)
    reporter.say(
        f"  verified with {verdict.target}: layers within {worst:.1g}, logits within {verdict.logits_error:.1g}"
    )
    return verdict


def _check_values(directory: Path, against: Path, reporter: Reporter, trust_remote_code: bool) -> None:
    """EvaluationError where a checkpoint that cannot be loaded here holds other values than what it was made of."""
    packed = open_packed(directory, trust_remote_code=trust_remote_code, as_values=True)
    problems = differences(str(against), packed, reporter, trust_remote_code)
    if problems:
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        raise EvaluationError(f"{problems[0]}{more}", where=str(directory), do="do not use it; write it again")
    reporter.say(f"  its values are those of {escape(against.name)}")
