"""Opening an exported checkpoint with transformers, with every silent failure made an error."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import nn

from moeq.arguments import checked
from moeq.artifacts.manifest import read_manifest
from moeq.artifacts.sums import NAME as SUMS
from moeq.artifacts.sums import check_sums
from moeq.errors import ArtifactError
from moeq.folders import checkpoint_of
from moeq.models.declared import quantization_of
from moeq.models.loading import compute_dtype, load_model
from moeq.models.source import open_source
from moeq.runtime.tiers import place, tier_devices
from moeq.runtimes import NATIVE, to_convert
from moeq_kernels import choice
from moeq_kernels.widths import METHOD

CARD = "README.md"
OWN = "one of moeq's"  # what moeq convert makes of another tool's checkpoint


@checked
def load(
    path: str | Path,
    *,
    dtype: str = "auto",
    placement: bool | Mapping[str, str] = False,
    verify: bool = False,
    trust_remote_code: bool = False,
) -> nn.Module:
    """A checkpoint that moeq exported, ready to run; `moeq.load`. A run stands for its checkpoint.

    dtype: auto (the checkpoint's; float32 where that is float16 and the device is a CPU), float32, bfloat16 or float16.
    placement: False puts all on one device, the GPU where there is one; True the experts of tier gpu and everything
    that is no expert there, the other experts in the machine's memory; {tier: device} somewhere else. verify: first
    read every file and compare it with SHA256SUMS; refused are also code and weights that it does not list, and a
    checkpoint without it. Raises ArtifactError for a checkpoint that is not moeq's, is not what SHA256SUMS says or has
    no placement, ModelError for a device that is not there.
    """
    source = open_source(str(checkpoint_of(Path(path))), trust_remote_code=trust_remote_code)
    if verify:
        verify_files(source.path)
    devices = tier_devices(placement if isinstance(placement, Mapping) else {})
    layers = read_manifest(source.path).layers if placement else ()
    first = torch.device("cpu") if placement else devices["gpu"]
    model = load_checkpoint(source.path, compute_dtype(source, dtype, devices["gpu"]), first, trust_remote_code)
    return place(model, layers, devices) if placement else model


def verify_files(path: Path) -> None:
    """ArtifactError unless a checkpoint holds what SHA256SUMS says, and no other code or weights."""
    sums = check_sums(path)
    if sums is None:
        what = f"no {SUMS}: an older moeq made it, nothing says what its files must hold"
        raise ArtifactError(what, where=str(path), do="export it again, or load it without verify")
    sums.require_inactive(path)


def load_checkpoint(
    path: Path,
    dtype: torch.dtype,
    device: torch.device,
    trust_remote_code: bool = False,
    *,
    policy: choice.Policy = "measured",
) -> nn.Module:
    """Load a checkpoint that moeq exported; ArtifactError when it is not one.

    policy: by which its kernels are chosen; where results are recorded it must not be a measurement.
    """
    source = open_source(str(path))
    declared = quantization_of(source.config)
    method = declared.get("quant_method")
    if method != METHOD:
        what, do = "not exported by moeq: nothing in it is packed", "load it with transformers, or pack it"
        if method is not None:
            what = f"packed in another format than moeq's own ({method})"
            do = to_convert(path, declared, NATIVE, OWN)
        raise ArtifactError(what, where=str(path / "config.json"), do=do)
    choice.named()  # before anything is read
    with choice.choosing(policy, at_once=device.type == "cpu"):
        return load_model(source, dtype, device, trust_remote_code)
