"""A checkpoint's files against its manifest and the record of the stage that wrote it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from moeq.artifacts.files import sha256_file
from moeq.artifacts.manifest import PlacedModule, PlacementManifest, Replica, read_manifest
from moeq.artifacts.stage import RECORD, StageRecord, read_record
from moeq.errors import ArtifactError
from moeq.exporters.moeq import tensors_sha256
from moeq.models.source import read_header
from moeq.progress import Reporter

QUIET = Reporter(quiet=True)


def check_native(
    directory: Path, reporter: Reporter = QUIET, manifest: PlacementManifest | None = None
) -> tuple[PlacementManifest, int]:
    """Compare sizes, sums and SHA-256 of every replica with the manifest; ArtifactError at the first difference.

    manifest: the checkpoint's, where it was read already. Returns it and the bytes of all tensors on disk.
    """
    manifest = read_manifest(directory) if manifest is None else manifest
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
                where=str(directory),
                do="export the checkpoint again",
            )
    if (directory / RECORD).is_file():  # covers what the manifest does not: config, index, other weights, tokenizer
        check_files(directory, read_record(directory, "export"))
    return manifest, on_disk


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


def check_files(directory: Path, record: StageRecord) -> None:
    """Compare a directory with the record of its stage; ArtifactError at the first file that is missing or changed."""
    for name, stamp in record.files.items():
        path = directory / name
        if not path.is_file() or sha256_file(path) != stamp.sha256:
            raise ArtifactError(
                "missing or changed since the stage wrote it", where=str(path), do=f"run `moeq {record.stage}` again"
            )
