"""moeq convert: a packed checkpoint for another runtime, uncalibrated; codes and scales are taken over exactly."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from moeq.artifacts.files import building, claimed
from moeq.artifacts.sums import check_sums
from moeq.errors import ArtifactError
from moeq.exporters import write
from moeq.exporters.foreign import WriteOptions
from moeq.exporters.front_matter import read_origin
from moeq.exporters.readers import PLAIN, format_of, open_packed
from moeq.models.side_files import find_side_files
from moeq.preflight import check_absent
from moeq.progress import Reporter
from moeq.runtimes import named, written
from moeq.tables import human_bytes
from moeq.verification.written import check_written


def convert(
    checkpoint: Path,
    name: str,
    out: Path,
    *,
    widen: bool = False,
    trust_remote_code: bool = False,
    verify: Reporter | None = None,
) -> dict[str, Any]:
    """Write `checkpoint` to `out` for the runtime `name`, which appears when it is whole and right.

    verify: where to tell what the runtime's own loader makes of it; None: it is not loaded. Returns what was written.
    Raises EvaluationError where it loads wrongly or holds other values, RecipeError for an unknown runtime or an `out`
    that is there, StorageError while another process writes it, ArtifactError for a directory that is no packed
    checkpoint of moeq's or of another tool's, FormatError for what the runtime would not load as it is meant.
    """
    name = named(name, written(), "--to")
    check_absent(out)
    source = open_packed(checkpoint, trust_remote_code=trust_remote_code)
    if format_of(source.source) == PLAIN:
        do = "make a packed one of it with `moeq run`"
        raise ArtifactError("nothing in it is packed", where=str(checkpoint), do=do)
    sides = find_side_files(source.source.path, source.config, trust_remote_code)
    said = [line for line in (sides.said(), read_origin(source.source.path).said()) if line is not None]
    sums = check_sums(checkpoint, reporter=verify)
    if sums is not None:
        sums.require_inactive(checkpoint)
    options = WriteOptions(widen=widen, trust_remote_code=trust_remote_code)
    verdict = None
    with claimed(out):
        check_absent(out)  # who had the claim before has made it
        with building(out) as unfinished:
            write(name, source, unfinished, options)
            if verify is not None:
                verdict = check_written(unfinished, verify, against=checkpoint, trust_remote_code=trust_remote_code)
    size = sum(path.stat().st_size for path in out.rglob("*") if path.is_file())
    summary = {"for": name, "layers": len(source.layers), "bytes": size, "size": human_bytes(size), "path": str(out)}
    summary |= {"notes": said} if said else {}
    verified = {} if verdict is None else {"verified_with": verdict.target, "logits_error": verdict.logits_error}
    return summary | verified | {"loads_in": {name: None}}
