"""moeq convert: a packed checkpoint for another runtime, uncalibrated; codes and scales are taken over exactly.

The name of the model, its licence and what it is of its base model are those that the checkpoint's own card, manifest
or provenance say; its card goes along as README.source.md.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from moeq.artifacts import making
from moeq.artifacts.digests import digests_of_files
from moeq.artifacts.files import building, claimed, write_text
from moeq.artifacts.manifest import read_manifest
from moeq.artifacts.provenance import (
    CHECKPOINT,
    CONVERSION,
    NO_SUBJECTS,
    BuildDefinition,
    Making,
    NamedModel,
    Parameters,
    RunDetails,
    Statement,
    check_listed,
    files_as,
)
from moeq.artifacts.sums import NAME as SUMS
from moeq.artifacts.sums import Sums
from moeq.errors import ArtifactError, FormatError, RecipeError
from moeq.exporters import gguf, write
from moeq.exporters.foreign import WriteOptions
from moeq.exporters.front_matter import CARD, Origin, read_origin
from moeq.exporters.native_reader import NativeReader
from moeq.exporters.packed_source import Checkable, PackedSource
from moeq.exporters.readers import PLAIN, format_of, open_packed
from moeq.exporters.readers.foreign import Foreign
from moeq.exporters.readers.gguf import Gguf
from moeq.folders import bytes_in
from moeq.models.drafts import left_drafts
from moeq.models.side_files import find_side_files
from moeq.preflight import check_absent
from moeq.progress import Reporter
from moeq.runtimes import NATIVE, named, runtimes, written
from moeq.stages import model_card
from moeq.verification.manifest_files import QUIET, check_native
from moeq.verification.written import check_written
from moeq_kernels.widths import METHOD

SHARD = 5 * 10**9  # bytes


def convert(
    checkpoint: Path,
    name: str,
    out: Path,
    *,
    widen: bool = False,
    max_shard: int = SHARD,
    trust_remote_code: bool = False,
    verify: bool = False,
    reporter: Reporter = QUIET,
) -> dict[str, Any]:
    """Write `checkpoint` to `out` for the runtime `name`, which appears when it is whole and right.

    max_shard: bytes of a file of what is not packed; verify: whether the runtime's own loader is asked what it makes of
    it. Returns what was written. Raises EvaluationError where it loads wrongly or holds other values, RecipeError for
    an unknown runtime or an `out` that is there, StorageError while another process writes it, ArtifactError for what
    is no packed checkpoint of moeq's or another tool's, FormatError for what the runtime would not load as it is meant.
    """
    name = named(name, convertible(), "--to")
    check_absent(out)
    _check_apart(out)
    source = _opened(checkpoint, name, trust_remote_code)
    sides, origin = find_side_files(source.source.path, source.config, trust_remote_code), read_origin(checkpoint)
    sums, statement = check_listed(checkpoint, reporter)
    if sums is None and isinstance(source, NativeReader):  # whose manifest has digests of all tensors
        check_native(checkpoint, reporter, source.manifest)
    lines = (left_drafts(source.source.drafts), _left_scales(source), sides.said(), origin.said(), _unlisted(sums))
    said = [line for line in lines if line is not None]
    model = _model(source, statement, origin)
    made = _making(checkpoint, name, widen, model, _digests(checkpoint) if sums is None else sums.files)
    options = WriteOptions(
        max_shard_bytes=max_shard,
        widen=widen,
        trust_remote_code=trust_remote_code,
        model_name=model.name,
        converted=True,
        making=made,
        bar=reporter.bar,
    )
    verdict = None
    with claimed(out):
        check_absent(out)  # who had the claim before has made it
        with building(out) as unfinished:
            said += write(name, source, unfinished, options)
            if name == NATIVE:
                card = model_card.render(read_manifest(unfinished), source.config, [], origin, converted=True)
                write_text(unfinished / CARD, card)
            if verify:
                against = source if name == NATIVE else checkpoint
                verdict = check_written(unfinished, reporter, against=against, trust_remote_code=trust_remote_code)
    summary = {"for": name, "layers": len(source.layers), "bytes": bytes_in(out), "path": str(out)}
    summary |= {"notes": said} if said else {}
    verified = {} if verdict is None else {"verified_with": verdict.target, "logits_error": verdict.logits_error}
    return summary | verified | {"loads_in": {name: None}}


def _opened(checkpoint: Path, name: str, trust_remote_code: bool) -> PackedSource:
    """What is to be converted; FormatError, ArtifactError where it is not, for the runtime `name`."""
    source = open_packed(checkpoint, trust_remote_code=trust_remote_code, as_values=name == PLAIN)
    if format_of(source.source) == PLAIN:
        do = "make a packed one of it with `moeq run`"
        raise ArtifactError("nothing in it is packed", where=str(checkpoint), do=do)
    if isinstance(source, Checkable):
        source.check()
    if isinstance(source, Gguf) and source.absent and runtimes()[name].exporter is not gguf.EXPORTER:
        do = "convert the checkpoint that it was made of"
        raise FormatError("it holds the language model alone of one that sees", where=str(checkpoint), do=do)
    return source


def convertible() -> tuple[str, ...]:
    """Names of the runtimes for which another's checkpoint can be written."""
    return (NATIVE, *written())


def _check_apart(out: Path) -> None:
    """RecipeError for a directory within a checkpoint, whose list of files would not know it."""
    for folder in out.absolute().parents:
        if (folder / SUMS).is_file():
            do = "choose another --out: a checkpoint holds nothing that its list of files does not name"
            raise RecipeError(f"lies within the checkpoint {folder}", where=str(out), do=do)


def _left_scales(source: PackedSource) -> str | None:
    """One line on what a checkpoint says of the rounding of activations, which is left behind; None without it."""
    keys = source.of_activations if isinstance(source, Foreign) else ()
    if not keys:
        return None
    names = ", ".join(sorted({key.rpartition(".")[2] for key in keys}))
    return f"left out: how activations or the key-value cache are rounded, {len(keys):,} tensors ({names})"


def _unlisted(sums: Sums | None) -> str | None:
    """One line on files that nobody's digest covers, or None."""
    return f"{SUMS} does not list {', '.join(sums.unlisted)}" if sums is not None and sums.unlisted else None


def _model(source: PackedSource, statement: Statement | None, origin: Origin) -> NamedModel:
    """The model that a checkpoint was made of, as its manifest, provenance or card calls it, else the checkpoint."""
    if isinstance(source, NativeReader):
        stamp = source.manifest.model
        return NamedModel(name=stamp.name, revision=stamp.revision)
    if statement is not None and statement.parameters.model is not None:
        return statement.parameters.model
    return NamedModel(name=next(iter(origin.base_model), source.source.name))


def _digests(checkpoint: Path) -> dict[str, str]:
    """{file: SHA-256} of a checkpoint without sums, a directory or a single file."""
    paths = sorted(checkpoint.iterdir()) if checkpoint.is_dir() else [checkpoint]
    taken = digests_of_files((path for path in paths if path.is_file()), cached=True)
    return {path.name: digest for path, digest in taken.items() if path.name not in NO_SUBJECTS}


def _making(checkpoint: Path, name: str, widen: bool, model: NamedModel, digests: dict[str, str]) -> Making:
    """How a checkpoint is made from another one of these files, for its provenance."""
    runtime = METHOD if name == NATIVE else name
    asked = NamedModel(name=checkpoint.resolve().name)
    given = Parameters(runtime=runtime, model=model, checkpoint=asked, widen=widen)
    dependencies = [*files_as(CHECKPOINT, digests), *making.packages(runtimes()[name].exporter.name)]
    definition = BuildDefinition(build_type=CONVERSION, parameters=given, dependencies=dependencies)
    return Making(definition=definition, details=RunDetails(builder=making.builder()))
