"""Opening an exported checkpoint with transformers, with every silent failure made an error."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import nn

from moeq.artifacts.manifest import read_manifest
from moeq.errors import ArtifactError
from moeq.models.loading import compute_dtype, load_model
from moeq.models.source import open_source
from moeq.runtime import hf_quantizer
from moeq.runtime.tiers import place, tier_devices

CARD = "README.md"


def load(
    path: str | Path,
    *,
    dtype: str = "auto",
    placement: bool | Mapping[str, str] = False,
    trust_remote_code: bool = False,
) -> nn.Module:
    """A checkpoint that moeq exported, ready to run; `moeq.load`.

    dtype: auto (the checkpoint's), float32, bfloat16 or float16. placement: False puts all on one device, the GPU where
    there is one; True the experts of tier gpu and everything that is no expert there, the other experts in the
    machine's memory; {tier: device} somewhere else. Raises ArtifactError for a checkpoint that is not moeq's or has
    no placement, ModelError for a device that is not there.
    """
    source = open_source(str(path), trust_remote_code=trust_remote_code)
    devices = tier_devices(placement if isinstance(placement, Mapping) else {})
    layers = read_manifest(source.path).layers if placement else ()
    first = torch.device("cpu") if placement else devices["gpu"]
    model = load_checkpoint(source.path, compute_dtype(source, dtype, devices["gpu"]), first, trust_remote_code)
    return place(model, layers, devices) if placement else model


def load_checkpoint(path: Path, dtype: torch.dtype, device: torch.device, trust_remote_code: bool = False) -> nn.Module:
    """Load a checkpoint that moeq exported; ArtifactError when it is not one."""
    source = open_source(str(path))
    method = (source.config.get("quantization_config") or {}).get("quant_method")
    if method != hf_quantizer.METHOD:
        raise ArtifactError(
            f"not exported by moeq (quant_method {method!r})",
            where=str(path / "config.json"),
            do="give the checkpoint directory of a moeq run",
        )
    return load_model(source, dtype, device, trust_remote_code)
