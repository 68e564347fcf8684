"""How well a quantized classifier does: accuracy, cross-entropy, distance of the logits from the float model's."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any

from torch import Tensor
from torch.nn.functional import cross_entropy


@dataclass(frozen=True, kw_only=True)
class Quality:
    """accuracy: a share; cross_entropy in nats; logit_error: ||z - z0|| / ||z0|| over all images."""

    accuracy: float
    cross_entropy: float
    logit_error: float

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def of(cls, found: dict[str, Any]) -> Quality:
        """From a mapping that has its figures."""
        return cls(**{field.name: found[field.name] for field in fields(cls)})


def quality(logits: Tensor, reference: Tensor, labels: Tensor) -> Quality:
    """logits and the float model's, [B, L]; labels: whole numbers [B]."""
    return Quality(
        accuracy=float((logits.argmax(-1) == labels).double().mean()),
        cross_entropy=float(cross_entropy(logits.double(), labels)),
        logit_error=float((logits - reference).norm() / reference.norm()),
    )
