"""A checkpoint that was just written is loaded by its target's own loader, where that can be done here."""

from __future__ import annotations

from pathlib import Path

import torch
from rich.markup import escape

from moeq.exporters.readers import open_packed
from moeq.models.loading import memory_bytes
from moeq.progress import Reporter
from moeq.tables import human_bytes
from moeq.verification.launch import NotInstalledError
from moeq.verification.verify import Options, Verdict, require, resident_bytes, verify


def check_written(
    directory: Path, reporter: Reporter, *, against: Path | None = None, trust_remote_code: bool = False
) -> Verdict | None:
    """Load a checkpoint in a fresh process and compare it; EvaluationError when it loads wrongly.

    against: the packed checkpoint whose values it must hold. None, and the reason is said, where the target's package
    is not installed here or memory is too small.
    """
    packed = open_packed(directory, trust_remote_code=trust_remote_code, as_values=True)
    size, memory = resident_bytes(packed), memory_bytes(torch.device("cpu"))
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
        return None
    require(verdict)
    worst = max((check.worst for check in verdict.layers), default=0.0)
    reporter.say(
        f"  verified with {verdict.target}: layers within {worst:.1g}, logits within {verdict.logits_error:.1g}"
    )
    return verdict
