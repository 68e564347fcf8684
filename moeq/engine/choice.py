"""Which engine a recipe asks for: `processes`, `ray`, `ray:ADDRESS`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from moeq.engine.task import Engine

RAY = "ray"


def open_engine(
    kind: str,
    workers: int,
    *,
    threads: int,
    beside: Path,
    preload: Sequence[str] = (),
    ram_bytes: int | None = None,
    gpus: Sequence[int] = (),
) -> Engine:
    """An engine with so many workers, open; the parameters are those of `ProcessEngine`. kind: as the recipe has it."""
    if kind.partition(":")[0] == RAY:
        from moeq.engine.ray_cluster import RayEngine

        return RayEngine(workers, threads=threads, address=kind.partition(":")[2] or None)
    from moeq.engine.processes import ProcessEngine

    return ProcessEngine(workers, threads=threads, beside=beside, preload=preload, ram_bytes=ram_bytes, gpus=gpus)
