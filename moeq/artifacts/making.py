"""With what checkpoints are made, as their provenance says it: versions of packages, and the machine."""

from __future__ import annotations

import platform
from collections.abc import Iterable, Mapping
from importlib import metadata

import torch

from moeq.artifacts.provenance import Builder, Resource, packages_as
from moeq.version import __version__

PACKAGES = (  # whose version may change a byte
    "moeq-kernels", "numba", "numpy", "pyarrow", "safetensors", "scikit-learn", "scipy", "tokenizers", "torch",
    "transformers",
)  # fmt: skip
OF_FORMATS = {"gguf": ("gguf",)}  # {format: packages that write it}
THREADS = "threads"  # in the version of a builder, and in `volatile` of a stage's record: how many computed


def threads_of(stage: str) -> str:
    """In the version of a builder: how many threads computed a stage, where they were not as many as the export's."""
    return f"{THREADS} of {stage}"


def builder(
    device: torch.device | None = None, threads: int | None = None, of_stages: Mapping[str, int] | None = None
) -> Builder:
    """moeq, Python and the instructions that last digits depend on; device: what computed, None: the processor.

    threads: how many of them computed, by which sums are divided; None: that decides nothing. of_stages: how many
    computed the stages before.
    """
    on = torch.device("cpu") if device is None else device
    return Builder(
        version={
            "moeq": __version__,
            "python": ".".join(platform.python_version_tuple()[:2]),
            "machine": f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}",
            "device": torch.cuda.get_device_name(on) if on.type == "cuda" else on.type,
        }
        | ({} if threads is None else {THREADS: str(threads)})
        | {threads_of(stage): str(count) for stage, count in (of_stages or {}).items() if count != threads}
    )


def packages(format_name: str, others: Iterable[str | None] = ()) -> list[Resource]:
    """The packages that shape a checkpoint; others: `NAME VERSION` of packages of other people, None: of none."""
    named = (*PACKAGES, *OF_FORMATS.get(format_name, ()))
    versions = {"moeq": __version__} | {name: metadata.version(name) for name in named}
    versions |= dict(other.rsplit(" ", 1) for other in others if other is not None)
    return packages_as(versions.items())
