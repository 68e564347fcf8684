"""A checkpoint's files against its manifest and the record of the stage that wrote it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moeq.artifacts.digests import digest_of_file
from moeq.artifacts.manifest import NAME as MANIFEST
from moeq.artifacts.manifest import REMEDY, PlacedModule, PlacementManifest, Replica, read_manifest, totals
from moeq.artifacts.provenance import NAME as PROVENANCE
from moeq.artifacts.provenance import RUN, Statement, check_listed, words
from moeq.artifacts.stage import RECORD, StageRecord, check_files, read_record
from moeq.artifacts.sums import NAME, Sums, check_sums
from moeq.artifacts.tensor_files import tensors_sha256
from moeq.bounded import shown
from moeq.errors import ArtifactError
from moeq.models.source import read_header
from moeq.progress import Reporter
from moeq.runtime.hook import HOOK_FILE, HOOK_SHA256

QUIET = Reporter(quiet=True)
NO_TENSORS = f"{MANIFEST} has no digests of tensors outside of the experts: an older moeq made it"


@dataclass(frozen=True, kw_only=True)
class Checked:
    """A checkpoint that is as its manifest says. tensor_bytes: on disk; files: which other files were compared with
    what, and provenance: what that names, in words."""

    manifest: PlacementManifest
    tensor_bytes: int
    files: str
    provenance: str

    @property
    def covered(self) -> str:
        """`files`, and what the manifest itself does not cover."""
        return self.files if self.manifest.tensors else f"{self.files}; {NO_TENSORS}"


def check_native(directory: Path, reporter: Reporter = QUIET, manifest: PlacementManifest | None = None) -> Checked:
    """Read a whole checkpoint: every tensor's size and SHA-256 against the manifest, its sums, then every file against
    SHA256SUMS and the stage's record. ArtifactError at the first difference.

    manifest: the checkpoint's, where it was read already.
    """
    manifest = read_manifest(directory) if manifest is None else manifest
    listed = check_sums(directory, only=lambda name: False)
    if listed is not None:
        _refuse_other_weights(directory, listed)
    headers = {path.name: read_header(path) for path in sorted(directory.glob("*.safetensors"))}
    with reporter.bar("checking", sum(len(layer.experts) for layer in manifest.layers)) as advance:
        for layer in manifest.layers:
            for expert in layer.experts:
                for replica in expert.replicas:
                    width = replica.bits if replica.projections is None else "mixed"
                    what = f"{layer.name}, expert {expert.expert}, {width} bits"
                    _check_replica(directory, replica, headers, what)
                advance()
    for module in manifest.others:
        _check_replica(directory, module, headers, f"{module.name}, {module.bits} bits")
    if manifest.tensors:
        _check_tensors(directory, manifest, headers)
    on_disk = sum(header.bytes for tensors in headers.values() for header in tensors.values())
    stated, guard = manifest.totals, manifest.totals.guard_bytes
    counted = totals(manifest.layers, manifest.others, on_disk, guard)
    for what in ("placed_expert_bytes", "other_replica_bytes", "packed_module_bytes", "bytes_by_tier"):
        _check_total(directory, what, getattr(counted, what), getattr(stated, what))
    expected = on_disk - counted.non_expert_bytes + stated.non_expert_bytes
    _check_total(directory, "tensor bytes on disk", on_disk, expected)
    sums, statement = check_listed(directory, reporter)
    _check_model(directory, manifest, statement)
    record = read_record(directory, "export") if (directory / RECORD).is_file() else None
    if record is not None:
        check_files(directory, record, {} if sums is None else sums.files, reporter)
    check_code(directory, manifest)
    files = _checked_files(sums, record)
    return Checked(manifest=manifest, tensor_bytes=on_disk, files=files, provenance=words(statement))


def _check_total(directory: Path, what: str, counted: object, stated: object) -> None:
    if counted != stated:
        where = str(directory / MANIFEST)
        raise ArtifactError(f"{what}: {counted}, the manifest states {stated}", where=where, do=REMEDY)


def _check_model(directory: Path, manifest: PlacementManifest, statement: Statement | None) -> None:
    """ArtifactError unless the manifest of a run's checkpoint names the model that its provenance names."""
    if statement is None or statement.predicate.definition.build_type != RUN:
        return
    made, stated = statement.parameters.model, manifest.model
    if made is not None and (made.name, made.revision) != (stated.name, stated.revision):
        what = f"of the model {shown(stated.name)} ({shown(stated.revision)}), {PROVENANCE} says {shown(made.name)}"
        where = str(directory / MANIFEST)
        raise ArtifactError(f"{what} ({shown(made.revision)})", where=where, do=REMEDY)


def _checked_files(sums: Sums | None, record: StageRecord | None) -> str:
    if sums is not None:
        return sums.text
    older = f"no {NAME}: an older moeq made it"
    if record is not None:
        return f"SHA-256 of {len(record.files)} files as in {RECORD} ({older})"
    return f"configuration, tokenizer and weights outside of the experts are not covered ({older}; export it again)"


def _refuse_other_weights(directory: Path, sums: Sums) -> None:
    for name in sums.unlisted:
        if name.endswith(".safetensors"):
            where = str(directory / name)
            raise ArtifactError(f"weights that {NAME} does not list", where=where, do="remove it")


def check_code(directory: Path, manifest: PlacementManifest) -> dict[str, str]:
    """{Python file of a checkpoint: what it is}; ArtifactError for one that is not as the manifest says.

    The hook is known by its text. Manifests that list no code were made before it was listed.
    """
    listed = {code.file: code for code in manifest.code}
    what: dict[str, str] = {}
    for name in sorted({path.name for path in directory.glob("*.py")} | set(listed)):
        path, code = directory / name, listed.get(name)
        if not path.is_file():
            raise ArtifactError("missing, the manifest lists it", where=str(path), do=REMEDY)
        sha256 = digest_of_file(path)
        if name == HOOK_FILE and sha256 != HOOK_SHA256:
            raise ArtifactError("is not the hook that moeq writes", where=str(path), do=REMEDY)
        if code is not None and code.sha256 != sha256:
            raise ArtifactError("changed since the manifest was written", where=str(path), do=REMEDY)
        if code is None and listed:
            raise ArtifactError("the manifest does not list this code", where=str(path), do="read it, or remove it")
        own = "moeq's own hook" if name == HOOK_FILE else "code of the original model"
        what[name] = f"{own}, SHA-256 {sha256}"
    return what


def _check_tensors(directory: Path, manifest: PlacementManifest, headers: dict[str, Any]) -> None:
    """ArtifactError unless the files hold every tensor that the manifest lists, as it says, and no other."""
    for tensor in manifest.tensors:
        header = headers.get(tensor.file, {}).get(tensor.name)
        where = f"{directory / tensor.file}: {tensor.name}"
        if header is None:
            raise ArtifactError("tensor is missing, the manifest lists it", where=where, do=REMEDY)
        if (header.dtype, header.shape) != (tensor.dtype, tensor.shape):
            raise ArtifactError("tensor is not as the manifest says", where=where, do=REMEDY)
        if tensors_sha256([header]) != tensor.sha256:
            raise ArtifactError("SHA-256 of the tensor differs from the manifest", where=where, do=REMEDY)
    listed = {(tensor.file, tensor.name) for tensor in manifest.tensors}
    experts = (expert for layer in manifest.layers for expert in layer.experts)
    places: list[Replica | PlacedModule] = [replica for expert in experts for replica in expert.replicas]
    for place in (*places, *manifest.others):
        listed |= {(place.file, f"{place.key_prefix}{stamp.name}") for stamp in place.tensors}
    for file, tensors in headers.items():
        for name in tensors:
            if (file, name) not in listed:
                where = f"{directory / file}: {name}"
                raise ArtifactError("the manifest does not list this tensor", where=where, do=REMEDY)


def _check_replica(directory: Path, replica: Replica | PlacedModule, headers: dict[str, Any], what: str) -> None:
    file = headers.get(replica.file)
    if file is None:
        raise ArtifactError(f"file {replica.file} is missing", where=str(directory), do=REMEDY)
    stored = []
    for stamp in replica.tensors:
        header = file.get(replica.key_prefix + stamp.name)
        if header is None or (header.dtype, header.shape) != (stamp.dtype, stamp.shape):
            where = f"{directory / replica.file}: {replica.key_prefix}{stamp.name}"
            raise ArtifactError(f"tensor of {what} is not as the manifest says", where=where, do=REMEDY)
        stored.append(header)
    where = str(directory / replica.file)
    if sum(header.bytes for header in stored) != replica.bytes:
        raise ArtifactError(f"{what}: bytes differ from the manifest", where=where, do=REMEDY)
    if tensors_sha256(stored) != replica.sha256:
        raise ArtifactError(f"{what}: SHA-256 differs from the manifest", where=where, do=REMEDY)
