"""The model that a run directory was made from, as the records of its stages have it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from moeq.artifacts.stage import RECORD, ModelStamp, StageRecord, read_record
from moeq.errors import ArtifactError
from moeq.models.source import SAMPLED_BYTES, ModelSource

MODEL_FILES = "model_files"  # in `volatile` of a record: {file of the model: SHA-256}


def stamp_of(source: ModelSource, files: Mapping[str, str], out: Path) -> ModelStamp:
    """The model's stamp; files: digests of all its files.

    In the directory of a run that an older moeq began, which read samples of large files, the digest that it gave the
    same model, so that nothing is made again; unless a record of a newer moeq has other digests of the files.
    """
    stamp = source.stamp(files)
    if all(path.stat().st_size <= SAMPLED_BYTES for path in source.files):
        return stamp
    records = _records(out)
    if not records or any(record.model.digest == stamp.digest for record in records):
        return stamp
    older = source.sampled_digest(files)
    of_older = [record for record in records if record.model.digest == older]
    if not of_older or any(changed_files(record, files) for record in of_older):
        return stamp
    return stamp.model_copy(update={"digest": older})


def changed_files(record: StageRecord, files: Mapping[str, str]) -> list[str]:
    """Files of the model that are not as the stage found them; none where its moeq did not write that down."""
    noted = record.volatile.get(MODEL_FILES, files)
    known = noted if isinstance(noted, Mapping) else {}
    return sorted(name for name in {*known, *files} if known.get(name) != files.get(name))


def _records(out: Path) -> list[StageRecord]:
    records = []
    for path in sorted(out.glob(f"*/{RECORD}")):
        try:
            records.append(read_record(path.parent, path.parent.name))
        except ArtifactError:
            continue  # the stage that it belongs to says so
    return records
