"""ExpertEffects: what quantizing one expert alone does to the model's output (expert_effects.json).

`divergence`: the mean Kullback-Leibler divergence, in nats a token, of the output's distribution from the exact one
when this expert, and no other, is at `bits` by `method`; of every expert of every layer. Where `is_measured` is false
it is `fit` of its layer times what was expected: its weighted loss times the tokens it is given. Experts are measured
in an order that the inputs decide, so that their number (`measured`) decides the rest of the file.

While experts are measured, and afterwards, what is there stands in a hidden file beside it (Measured), which also says
how long that took: it depends on the clock, and is in no digest.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from moeq.artifacts.files import write_json
from moeq.artifacts.stage import Frozen, read_model
from moeq.errors import ArtifactError

SCHEMA_VERSION = 1
NAME = "expert_effects.json"
MEASURED = ".expert_effects.json"
REMEDY = "run `moeq losses` again"


class ExpertEffects(Frozen):
    """divergence, is_measured: [E] a layer; fit: of every layer, in nats a token for what was expected."""

    schema_version: int = SCHEMA_VERSION
    bits: int
    method: str
    sequences: int
    tokens: int
    measured: int
    divergence: tuple[tuple[float, ...], ...]
    is_measured: tuple[tuple[bool, ...], ...]
    fit: tuple[float, ...]


class Measured(Frozen):
    """The first experts of the order; inputs: digest of all that decides the order and their values."""

    schema_version: int = SCHEMA_VERSION
    inputs: str
    seconds: float = 0.0
    divergence: tuple[float, ...] = ()


def write_effects(directory: Path, effects: ExpertEffects) -> None:
    write_json(directory / NAME, effects.model_dump(mode="json"))


def read_effects(directory: Path) -> ExpertEffects | None:
    """The effects; None where the recipe asked for none. ArtifactError when they are damaged."""
    path = directory / NAME
    return read_model(path, ExpertEffects, SCHEMA_VERSION, remedy=REMEDY) if path.is_file() else None


def write_measured(directory: Path, measured: Measured) -> None:
    write_json(directory / MEASURED, measured.model_dump(mode="json"))


def read_measured(directory: Path, inputs: str) -> Measured:
    """What was measured of the same inputs; nothing of others, or when it is damaged."""
    with suppress(ArtifactError):
        measured = read_model(directory / MEASURED, Measured, SCHEMA_VERSION, remedy=REMEDY)
        if measured.inputs == inputs:
            return measured
    return Measured(inputs=inputs)


def remove_effects(directory: Path) -> None:
    """Take away the effects of an earlier recipe; what was measured stays, should it be asked for again."""
    (directory / NAME).unlink(missing_ok=True)
