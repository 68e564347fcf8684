"""CoactivationTable: which experts follow which, as a checkpoint with replicas carries it (coactivation.json).

Measured on the profile's trace; a runtime whose experts' precision follows the workload reads ahead by it (paper 001,
section 3.3). Letters: L MoE layers, E experts of a layer, F of the next one.
"""

from __future__ import annotations

import binascii
from base64 import b64decode, b64encode
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from moeq.artifacts.files import canonical_json, write_json
from moeq.artifacts.stage import Frozen, read_model
from moeq.version import __version__

SCHEMA_VERSION = 1
NAME = "coactivation.json"
REMEDY = "export again, with profile.trace: true and quantize.replicas: all"
WHOLE = 65535  # what a share of 1 is stored as
SHARE_BYTES = 2
MOST_EXPERTS = 32767  # as a trace has


class LayerExperts(Frozen):
    """One MoE layer: the path of its experts module, and how many they are."""

    name: str
    num_experts: int = Field(ge=1, le=MOST_EXPERTS)


class CoactivationTable(Frozen):
    """shares: for every layer but the last, uint16 [E, F] in base64: of what the next layer chose for tokens that chose
    an expert here, the share of each of its experts, in units of 1 / 65535. tokens: that were looked at; text: digest
    of their sequences."""

    schema_version: int = SCHEMA_VERSION
    moeq_version: str = __version__
    tokens: int = Field(ge=0)
    text: str
    layers: tuple[LayerExperts, ...]
    shares: tuple[str, ...]

    @model_validator(mode="after")
    def _is_whole(self) -> CoactivationTable:
        if len(self.shares) != max(0, len(self.layers) - 1):
            raise ValueError(f"shares of {len(self.shares)} layers, and {len(self.layers)} layers")
        for number, ((here, there), text) in enumerate(zip(pairwise(self.layers), self.shares, strict=True)):
            wanted = SHARE_BYTES * here.num_experts * there.num_experts
            if len(text) != -(-wanted // 3) * 4:
                raise ValueError(f"shares[{number}] does not have {here.num_experts} x {there.num_experts} numbers")
            try:
                b64decode(text, validate=True)
            except (binascii.Error, ValueError):
                raise ValueError(f"shares[{number}] is not base64") from None
        return self

    @classmethod
    def of(
        cls, layers: Sequence[tuple[str, int]], follows: Sequence[NDArray[np.float64]], tokens: int, text: str
    ) -> CoactivationTable:
        """layers: names and numbers of experts; follows: shares [E, F] of every layer but the last."""
        return cls(
            tokens=tokens,
            text=text,
            layers=tuple(LayerExperts(name=name, num_experts=experts) for name, experts in layers),
            shares=tuple(
                b64encode(np.rint(share * WHOLE).astype("<u2").tobytes()).decode("ascii") for share in follows
            ),
        )

    def follows(self) -> list[NDArray[np.float64]]:
        """Shares [E, F] of every layer but the last."""
        return [
            np.frombuffer(b64decode(text), "<u2").reshape(here.num_experts, there.num_experts) / WHOLE
            for (here, there), text in zip(pairwise(self.layers), self.shares, strict=True)
        ]


def most_bytes(layers: Sequence[tuple[str, int]]) -> int:
    """What the file takes at most; layers: names and numbers of experts."""
    longest = CoactivationTable.model_construct(
        tokens=10**15,
        text="0" * 64,
        layers=tuple(LayerExperts(name=name, num_experts=experts) for name, experts in layers),
        shares=tuple("A" * (-(-SHARE_BYTES * here * there // 3) * 4) for (_, here), (_, there) in pairwise(layers)),
    )
    return len(canonical_json(longest.model_dump(mode="json")).encode())


def write_coactivation(directory: Path, table: CoactivationTable) -> None:
    """Write it into a checkpoint's directory."""
    write_json(directory / NAME, table.model_dump(mode="json"))


def read_coactivation(directory: Path) -> CoactivationTable | None:
    """A checkpoint's table, None where it has none; ArtifactError for one that is damaged."""
    path = directory / NAME
    return read_model(path, CoactivationTable, SCHEMA_VERSION, remedy=REMEDY) if path.exists() else None
