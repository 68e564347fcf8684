"""The held-out text on which `losses` measures effects, in the batches that it will make."""

from __future__ import annotations

import torch

from moeq.planning.sizes import ModelSizes, Work
from moeq.quantizers.layer_data import heldout_stride
from moeq.quantizers.memory import working_memory
from moeq.recipe import ExpertEffectsSection, LayerEffectsSection, LossesSection
from moeq.stages.effects import sequences_at_once
from moeq.stages.expert_effects import AT_ONCE


def heldout(
    sizes: ModelSizes,
    work: Work,
    losses: LossesSection,
    section: LayerEffectsSection | ExpertEffectsSection,
    device: torch.device | str = "cpu",
) -> tuple[float, int]:
    """Mean tokens of a batch, and the number of batches."""
    text = work.calibration
    there = max(1, min(section.sequences, text.sequences // heldout_stride(losses.heldout_fraction)))
    memory = working_memory(losses.working_memory, device)
    rows = min(there, sequences_at_once(memory, sizes.vocabulary, text.length, kept(sizes, section)))
    batches = -(-there // rows)
    return there * text.length / batches, batches


def kept(sizes: ModelSizes, section: LayerEffectsSection | ExpertEffectsSection) -> int:
    """Numbers of every token that are kept beside its outputs: what goes into the layers of a few experts."""
    return AT_ONCE * sizes.hidden_size if isinstance(section, ExpertEffectsSection) else 0
