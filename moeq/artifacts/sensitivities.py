"""SensitivityTable: what is known of every expert's worth, as sensitivities.parquet.

One row for each layer and expert. `activations` and `activation_frequency` (their share in the layer's), `routing_mass`
(share of the layer's routing weight) and `importance` are of the statistics that the recipe's assignment counts.
`frobenius_hessian_trace`: of the Hessian of the Frobenius norm, summed over the expert's matrices, in closed form;
`sampled_hessian_trace`: the same as the recipe's assignment sampled it, where it did. `hybrid_importance`: activations
times that closed form, each min-max normalized over the model (paper 003, section 3.4). `calibration_hessian_trace`: of
the Hessians that quantized the expert, none where no method took one. `loss_B`, `objective_B` and `bytes_B` at every
width B. `effect` and `effect_measured` where the recipe had effects of experts measured. The file's metadata has the
digest of the model, so that traces are not computed twice, one of the columns and of that, and one of all bytes
(`sealed`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from moeq.artifacts import sealed
from moeq.artifacts.losses import VERSION_KEY, metadata_text, read_parquet, write_parquet
from moeq.artifacts.stage import check_schema_version
from moeq.errors import ArtifactError

SCHEMA_VERSION = 2  # 1 had neither metadata nor the closed form of every run
NAME = "sensitivities.parquet"
REMEDY = "run `moeq assign` again"
MODEL_KEY, COLUMNS_KEY = b"moeq_model_digest", b"moeq_columns_sha256"
OPTIONAL = "calibration_hessian_trace"  # all null where no Hessian was made
NEEDED = (
    "layer", "expert", "activations", "activation_frequency", "routing_mass", "frobenius_hessian_trace",
    "hybrid_importance", OPTIONAL,
)  # fmt: skip


@dataclass(frozen=True)
class SensitivityTable:
    """The table, a column at a time."""

    table: pa.Table

    @property
    def model(self) -> str:
        """Digest of the model that it is of."""
        return metadata_text(self.table, MODEL_KEY, "")

    def experts(self) -> list[int]:
        """Experts of every layer."""
        layers = self.table["layer"].to_numpy()
        return [int((layers == layer).sum()) for layer in range(int(layers.max(initial=-1)) + 1)]

    def column(self, name: str) -> list[np.ndarray]:
        """A column as one float array [E] a layer, NaN where nothing is known."""
        values = self.table[name].to_numpy().astype(float)
        return np.split(values, np.cumsum(self.experts())[:-1])


def write_sensitivities(path: Path, columns: Mapping[str, Sequence[Any]], model: str) -> None:
    """Write columns, ordered by layer and expert, atomically. model: its digest."""
    table = pa.table(dict(columns))
    metadata = {VERSION_KEY: str(SCHEMA_VERSION).encode(), MODEL_KEY: model.encode()}
    metadata |= {COLUMNS_KEY: columns_digest(table, model, whole=True).encode(), sealed.KEY: sealed.BLANK}
    table = table.replace_schema_metadata(metadata)
    write_parquet(path, table, sealed.seal)


def read_sensitivities(path: Path) -> SensitivityTable:
    """Read a table back; ArtifactError when it is missing, damaged, of another version or lacks a column."""
    table = read_parquet(path, REMEDY)
    version = metadata_text(table, VERSION_KEY, "1")
    check_schema_version(version, str(SCHEMA_VERSION), path, remedy=REMEDY)
    missing = [name for name in NEEDED if name not in table.column_names]
    if missing:
        raise ArtifactError(f"no column {missing[0]}", where=str(path), do=REMEDY)
    problem = _problem_with(table)
    if problem is not None:
        raise ArtifactError(problem, where=str(path), do=REMEDY)
    read = SensitivityTable(table)
    wanted = metadata_text(table, COLUMNS_KEY, "")  # "": an earlier moeq wrote it
    whole = sealed.is_sealed(path)
    if whole is False or (wanted and wanted != columns_digest(table, read.model, whole=bool(whole))):
        raise ArtifactError("changed since it was written", where=str(path), do=REMEDY)
    return read


def _problem_with(table: pa.Table) -> str | None:
    """What no table of sensitivities has, or None: they have a row of every expert, layer by layer."""
    twice = next((name for name in table.column_names if table.column_names.count(name) > 1), None)
    if twice is not None:
        return f"column {twice} is there twice"
    for name in NEEDED:
        kind = table[name].type
        absent = name == OPTIONAL and pa.types.is_null(kind)
        if not (absent or pa.types.is_integer(kind) or pa.types.is_floating(kind)):
            return f"column {name} holds no numbers"
    if not len(table):
        return "no rows"
    layer, expert = (table[name].to_numpy() for name in ("layer", "expert"))
    steps = np.diff(layer, prepend=layer[:1])
    begins = np.flatnonzero(np.concatenate([[True], steps[1:] != 0]))
    place = np.arange(len(layer)) - np.repeat(begins, np.diff(begins, append=len(layer)))
    if layer[0] != 0 or not np.isin(steps, (0, 1)).all() or not np.array_equal(expert, place):
        return "not a row of every expert, layer by layer"
    return None


def columns_digest(table: pa.Table, model: str, *, whole: bool) -> str:
    """SHA-256 of the model's digest and the columns: their names, and their values as numpy has them.

    whole: of a table whose file has a digest of all its bytes, too; without that it is another.
    """
    hashing = hashlib.sha256((b"sealed\0" if whole else b"") + model.encode())
    for name in table.column_names:
        values = table[name].to_numpy()
        hashing.update(f"{name}\0{values.dtype}\0".encode())
        hashing.update("\0".join(map(str, values)).encode() if values.dtype == object else values.tobytes())
    return hashing.hexdigest()
