"""How well a quantized classifier does: accuracy, cross-entropy, distance of the logits from the float model's."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import cross_entropy

from moeq.integers.artifacts.integer_report import QualityRow


def quality(logits: Tensor, reference: Tensor, labels: Tensor) -> QualityRow:
    """logits and the float model's, [B, L]; labels: whole numbers [B]."""
    return QualityRow(
        accuracy=float((logits.argmax(-1) == labels).double().mean()),
        cross_entropy=float(cross_entropy(logits.double(), labels)),
        logit_error=float((logits - reference).norm() / reference.norm()),
    )
