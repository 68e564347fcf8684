"""What a run knows of its quantized modules outside of the routed experts: others.json, and where the store has them.

others.json is a small table: a row for each module with its class, width, method and grid; `relative_error`, the mean
squared error of its output on held-out rows divided by the output's mean square (for the embeddings: of the rows looked
up by held-out text; None where no held-out row reached it); what stood in for a failed factorization or missing rows
(`fallback`, as in the loss table); its bytes. `tied`: the module that uses the same tensor. `left`: modules of the
classes asked for that stay in full precision, with the reason; `absent`: classes that the model does not have.

In the store such modules lie as experts do, under a set of their own: a file for every decoder layer, and a last one
for what lies in none; an entry is a class of modules, a method and a width; each module is a stack of one.
"""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from moeq.artifacts.files import write_json
from moeq.artifacts.replicas import SCHEMA_VERSION as STORE_VERSION
from moeq.artifacts.replicas import Made, ReplicaIndex
from moeq.artifacts.stage import Frozen, read_model
from moeq_kernels.widths import Encoding

SCHEMA_VERSION = 1
NAME = "others.json"
INDEX = "others-replicas.json"
REMEDY = "run `moeq losses` again"


class OtherRow(Frozen):
    """One quantized module."""

    module: str
    kind: str
    bits: int
    method: str
    group_size: int
    symmetric: bool
    rows: int
    inputs: int
    relative_error: float | None
    calibration_rows: int
    heldout_rows: int
    fallback: str
    bytes: int
    tied: str | None = None

    @property
    def encoding(self) -> Encoding:
        """How its codes stand for values."""
        return Encoding(group_size=self.group_size, symmetric=self.symmetric)


class OtherTable(Frozen):
    schema_version: int = SCHEMA_VERSION
    modules: tuple[OtherRow, ...]
    left: dict[str, str] = Field({})
    absent: tuple[str, ...] = ()

    @property
    def bytes(self) -> int:
        return sum(row.bytes for row in self.modules)


class MadeOthers(Made):
    """A class of modules by a method at a width, and the names of what the store has of it."""

    kind: str


class OtherIndex(ReplicaIndex):
    """What a run has in the store; `layers`: {entry: SHA-256} of every decoder layer, and of what lies in none."""

    made: tuple[MadeOthers, ...]

    def entry_of(self, kind: str) -> str:
        """Name of a class's entry."""
        return str(next(made.entry for made in self.made if made.kind == kind))


def write_table(directory: Path, table: OtherTable) -> None:
    write_json(directory / NAME, table.model_dump(mode="json"))


def read_table(directory: Path) -> OtherTable:
    """ArtifactError when it is missing, damaged or of another schema version."""
    return read_model(directory / NAME, OtherTable, SCHEMA_VERSION, remedy=REMEDY)


def write_index(directory: Path, index: OtherIndex) -> None:
    write_json(directory / INDEX, index.model_dump(mode="json"))


def read_index(directory: Path) -> OtherIndex:
    """ArtifactError when it is missing, damaged or of another schema version."""
    return read_model(directory / INDEX, OtherIndex, STORE_VERSION, remedy=REMEDY)
