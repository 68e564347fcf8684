"""Opening an exported checkpoint with transformers, with every silent failure made an error."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from moeq.errors import ArtifactError
from moeq.models.loading import load_model
from moeq.models.source import open_source
from moeq.runtime import hf_quantizer

CARD = "README.md"


def load_checkpoint(path: Path, dtype: torch.dtype, device: torch.device, trust_remote_code: bool = False) -> nn.Module:
    """Load a checkpoint that moeq exported; ArtifactError when it is not one."""
    source = open_source(str(path))
    method = source.config.get("quantization_config", {}).get("quant_method")
    if method != hf_quantizer.METHOD:
        raise ArtifactError(
            f"not exported by moeq (quant_method {method!r})",
            where=str(path / "config.json"),
            do="give the checkpoint directory of a moeq run",
        )
    return load_model(source, dtype, device, trust_remote_code)
