"""A checkpoint that was just written is loaded by its target's own loader, where that can be done here."""

from __future__ import annotations

from pathlib import Path

import torch
from rich.markup import escape

from moeq.artifacts.files import PARTIAL
from moeq.errors import EvaluationError
from moeq.exporters.packed_source import PackedSource
from moeq.exporters.readers import open_packed
from moeq.exporters.readers.foreign import Foreign
from moeq.exporters.readers.gguf import Gguf
from moeq.models.loading import memory_bytes
from moeq.progress import Reporter
from moeq.tables import human_bytes
from moeq.verification.against import first_of
from moeq.verification.launch import NotInstalledError
from moeq.verification.verify import Options, Verdict, require, resident_bytes, verify
from moeq.verification.weights import differences


def check_written(
    directory: Path,
    reporter: Reporter,
    *,
    against: PackedSource | Path | None = None,
    trust_remote_code: bool = False,
) -> Verdict | None:
    """Load a checkpoint in a fresh process and compare it; EvaluationError when it loads wrongly.

    against: what it was made of: what its values must be, and those that its loader computes with, but where it says
    itself how far its are from those (GGUF with rounded scales). None, and the reason is said, where the target's
    package is not installed here or memory is too small; values are compared all the same.
    """
    packed = open_packed(directory, trust_remote_code=trust_remote_code, as_values=True)
    made_of = against
    if isinstance(made_of, Path):
        made_of = open_packed(made_of, trust_remote_code=trust_remote_code, as_values=True)
    size, memory = resident_bytes(packed), memory_bytes(torch.device("cpu"))
    apart = _is_rounded(packed)
    del packed  # its headers and manifest; whoever checks it opens it again
    if size > memory:
        reporter.say(
            f"  [yellow]not loaded: that takes {human_bytes(size)} of memory, there are {human_bytes(memory)}; "
            "`moeq verify` it on a larger machine[/yellow]"
        )
        _check_values(directory, made_of, reporter, trust_remote_code)
        return None
    try:
        options = Options(trust_remote_code=trust_remote_code)
        verdict = verify(directory, options, reporter, None if apart else made_of)
    except NotInstalledError as error:
        reporter.say(f"  [yellow]not verified: {escape(str(error))}[/yellow]")
        _check_values(directory, made_of, reporter, trust_remote_code)
        return None
    require(verdict)
    if apart:
        _check_values(directory, made_of, reporter, trust_remote_code)
    worst = max((check.worst for check in verdict.layers), default=0.0)
    reporter.say(
        f"  verified with {verdict.target}: layers within {worst:.1g}, logits within {verdict.logits_error:.1g}"
    )
    return verdict


def _is_rounded(packed: PackedSource) -> bool:
    """Whether its values need not be those of what it was made of: scales were rounded."""
    return (isinstance(packed, Gguf) and packed.refitted) or (isinstance(packed, Foreign) and packed.rounds is not None)


def _check_values(directory: Path, made_of: PackedSource | None, reporter: Reporter, trust_remote_code: bool) -> None:
    """EvaluationError where a checkpoint that cannot be loaded here holds other values than what it was made of."""
    if made_of is None:
        return
    packed = open_packed(directory, trust_remote_code=trust_remote_code, as_values=True)
    problems = differences(made_of, packed, reporter, trust_remote_code)
    if problems:
        raise EvaluationError(first_of(problems), where=str(directory), do="do not use it; write it again")
    what = "as far from those of {} as it says" if _is_rounded(packed) else "those of {}"
    if isinstance(packed, Foreign) and packed.rounds is not None:
        what = f"those of {{}}, scales and zero points in {str(packed.rounds).removeprefix('torch.')}"
    name = made_of.source.name.removesuffix(PARTIAL)  # of one that is still being made
    reporter.say(f"  its values are {what.format(escape(name))}")
