"""Experts that moeq cannot quantize, each with its reason."""

from __future__ import annotations

from torch import nn

from moeq.models.kinds.base import GATED


def reason_to_refuse(module: nn.Module) -> str | None:
    """Why the experts of a module cannot be quantized; None for every module that is not recognized as such."""
    if isinstance(module, nn.ModuleDict) and "expert_0" in module and hasattr(module["expert_0"], "fc1"):
        return "this transformers runs only its experts 0 and 1 (it one-hot encodes a mask of zeros and ones)"
    if all(isinstance(getattr(module, name, None), nn.Embedding) for name in ("down_embed", "up_embed")):
        return "its experts are single rows of two embeddings, not matrices"
    if type(module).__name__ == "VitPoseBackboneMoeMLP":
        return "its experts are chosen by the data set, not by a router"
    if type(module).__name__.startswith("DiffusionGemma") and hasattr(module, "gate_up_proj"):
        return "its encoder and decoder share them, and it is no causal language model"
    if hasattr(module, "text_moe") and hasattr(module, "vision_moe"):
        return "its text and vision experts share tensors on disk, and no text reaches the vision experts"
    experts = getattr(module, "experts", None)
    if isinstance(experts, nn.ModuleList) and len(experts) > 1 and any(map(_is_mlp, experts)):
        return "its experts are a list of modules (code of the checkpoint, not of transformers)"
    return None


def _is_mlp(module: nn.Module) -> bool:
    return all(isinstance(getattr(module, name, None), nn.Linear) for name in GATED)
