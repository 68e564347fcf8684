"""moeq convert: a packed checkpoint for another runtime, uncalibrated; codes and scales are taken over exactly."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from moeq.artifacts import making
from moeq.artifacts.digests import digests_of_files
from moeq.artifacts.files import building, claimed
from moeq.artifacts.provenance import (
    CHECKPOINT,
    CONVERSION,
    NO_SUBJECTS,
    BuildDefinition,
    Making,
    NamedModel,
    Parameters,
    RunDetails,
    check_provenance,
    files_as,
)
from moeq.artifacts.sums import check_sums
from moeq.errors import ArtifactError
from moeq.exporters import write
from moeq.exporters.foreign import WriteOptions
from moeq.exporters.front_matter import read_origin
from moeq.exporters.readers import PLAIN, format_of, open_packed
from moeq.models.side_files import find_side_files
from moeq.preflight import check_absent
from moeq.progress import Reporter
from moeq.runtimes import named, runtimes, written
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
    check_provenance(checkpoint, sums)
    made = _making(checkpoint, name, widen, _digests(checkpoint) if sums is None else sums.files)
    options = WriteOptions(widen=widen, trust_remote_code=trust_remote_code, making=made)
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


def _digests(checkpoint: Path) -> dict[str, str]:
    """{file: SHA-256} of a checkpoint without sums, a directory or a single file."""
    paths = sorted(checkpoint.iterdir()) if checkpoint.is_dir() else [checkpoint]
    taken = digests_of_files((path for path in paths if path.is_file()), cached=True)
    return {path.name: digest for path, digest in taken.items() if path.name not in NO_SUBJECTS}


def _making(checkpoint: Path, name: str, widen: bool, digests: dict[str, str]) -> Making:
    """How a checkpoint is made from another one of these files, for its provenance."""
    given = Parameters(runtime=name, checkpoint=NamedModel(name=checkpoint.resolve().name), widen=widen)
    dependencies = [*files_as(CHECKPOINT, digests), *making.packages(runtimes()[name].exporter.name)]
    definition = BuildDefinition(build_type=CONVERSION, parameters=given, dependencies=dependencies)
    return Making(definition=definition, details=RunDetails(builder=making.builder()))
