"""A checkpoint's files against its manifest and the record of the stage that wrote it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moeq.artifacts.digests import digest_of_file
from moeq.artifacts.manifest import NAME as MANIFEST
from moeq.artifacts.manifest import PlacedModule, PlacementManifest, Replica, read_manifest
from moeq.artifacts.stage import RECORD, StageRecord, check_files, read_record
from moeq.artifacts.sums import NAME, Sums, check_sums
from moeq.errors import ArtifactError
from moeq.exporters.native_writer import tensors_sha256
from moeq.models.source import read_header
from moeq.progress import Reporter
from moeq.runtime.hook import HOOK_FILE, HOOK_SHA256

QUIET = Reporter(quiet=True)
EXPORT_AGAIN = "export the checkpoint again"


@dataclass(frozen=True, kw_only=True)
class Checked:
    """A checkpoint that is as its manifest says. tensor_bytes: on disk; files: which other files were compared with
    what, in words."""

    manifest: PlacementManifest
    tensor_bytes: int
    files: str


def check_native(directory: Path, reporter: Reporter = QUIET, manifest: PlacementManifest | None = None) -> Checked:
    """Read a whole checkpoint: every replica's size and SHA-256 against the manifest, its sums, then every file against
    SHA256SUMS and the stage's record. ArtifactError at the first difference.

    manifest: the checkpoint's, where it was read already.
    """
    manifest = read_manifest(directory) if manifest is None else manifest
    listed = check_sums(directory, only=lambda name: False)
    if listed is not None:
        _refuse_other_weights(directory, listed)
    headers = {path.name: read_header(path) for path in sorted(directory.glob("*.safetensors"))}
    by_tier: dict[str, int] = {}
    placed = other = 0
    with reporter.bar("checking", sum(len(layer.experts) for layer in manifest.layers)) as advance:
        for layer in manifest.layers:
            for expert in layer.experts:
                for replica in expert.replicas:
                    width = replica.bits if replica.projections is None else "mixed"
                    what = f"{layer.name}, expert {expert.expert}, {width} bits"
                    _check_replica(directory, replica, headers, what)
                    if replica.placed:
                        placed += replica.bytes
                        by_tier[expert.tier] = by_tier.get(expert.tier, 0) + replica.bytes
                    elif replica.leading_bits_of is None:
                        other += replica.bytes
                advance()
    packed = _check_modules(directory, manifest, headers)
    on_disk = sum(header.bytes for tensors in headers.values() for header in tensors.values())
    totals = manifest.totals
    stated = {
        "placed_expert_bytes": (placed, totals.placed_expert_bytes),
        "other_replica_bytes": (other, totals.other_replica_bytes),
        "packed_module_bytes": (packed, totals.packed_module_bytes),
        "bytes_by_tier": (by_tier, totals.bytes_by_tier),
        "tensor bytes on disk": (
            on_disk,
            totals.placed_expert_bytes + totals.other_replica_bytes + totals.non_expert_bytes + totals.guard_bytes,
        ),
    }
    for what, (found, expected) in stated.items():
        if found != expected:
            raise ArtifactError(
                f"{what}: {found}, the manifest states {expected}",
                where=str(directory / MANIFEST),
                do="export the checkpoint again",
            )
    sums = check_sums(directory, reporter=reporter)
    record = read_record(directory, "export") if (directory / RECORD).is_file() else None
    if record is not None:
        check_files(directory, record, {} if sums is None else sums.files, reporter)
    check_code(directory, manifest)
    return Checked(manifest=manifest, tensor_bytes=on_disk, files=_checked_files(sums, record))


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
    listed = {one.file: one for one in manifest.code}
    found: dict[str, str] = {}
    for name in sorted({path.name for path in directory.glob("*.py")} | set(listed)):
        path, one = directory / name, listed.get(name)
        if not path.is_file():
            raise ArtifactError("missing, the manifest lists it", where=str(path), do=EXPORT_AGAIN)
        sha256 = digest_of_file(path)
        if name == HOOK_FILE and sha256 != HOOK_SHA256:
            raise ArtifactError("is not the hook that moeq writes", where=str(path), do=EXPORT_AGAIN)
        if one is not None and one.sha256 != sha256:
            raise ArtifactError("changed since the manifest was written", where=str(path), do=EXPORT_AGAIN)
        if one is None and listed:
            raise ArtifactError("the manifest does not list this code", where=str(path), do="read it, or remove it")
        own = "moeq's own hook" if name == HOOK_FILE else "code of the original model"
        found[name] = f"{own}, SHA-256 {sha256}"
    return found


def _check_modules(directory: Path, manifest: PlacementManifest, headers: dict[str, Any]) -> int:
    """Compare the packed modules outside of the experts with the manifest; returns their bytes."""
    for module in manifest.others:
        _check_replica(directory, module, headers, f"{module.name}, {module.bits} bits")
    return sum(module.bytes for module in manifest.others)


def _check_replica(directory: Path, replica: Replica | PlacedModule, headers: dict[str, Any], what: str) -> None:
    file = headers.get(replica.file)
    again = "export the checkpoint again"
    if file is None:
        raise ArtifactError(f"file {replica.file} is missing", where=str(directory), do=again)
    found = []
    for stamp in replica.tensors:
        header = file.get(replica.key_prefix + stamp.name)
        if header is None or (header.dtype, header.shape) != (stamp.dtype, stamp.shape):
            where = f"{directory / replica.file}: {replica.key_prefix}{stamp.name}"
            raise ArtifactError(f"tensor of {what} is not as the manifest says", where=where, do=again)
        found.append(header)
    if sum(header.bytes for header in found) != replica.bytes:
        raise ArtifactError(f"{what}: bytes differ from the manifest", where=str(directory / replica.file), do=again)
    if tensors_sha256(found) != replica.sha256:
        raise ArtifactError(f"{what}: SHA-256 differs from the manifest", where=str(directory / replica.file), do=again)
