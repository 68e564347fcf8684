"""Targets: Parquet and rows of cells."""

from __future__ import annotations

import hashlib
import random

import numpy as np
import pyarrow as pa
from robustness.fuzzing.mutations import cells_bytes, parquet_bytes, table_bytes
from robustness.fuzzing.target import BytesTarget, Check, Place, Target

from moeq.artifacts import sealed, sensitivities
from moeq.artifacts.losses import SCHEMA, WHOLE, LossTable, read_losses, summarize
from moeq.artifacts.sums import NAME as SUMS
from moeq.artifacts.sums import check_sums
from moeq.estimator.measured import read_points
from moeq.evaluation.translation import read_pairs
from moeq.recipe.eval import TranslationSection


def loss_table() -> pa.Table:
    """Two layers of two experts at two widths."""
    rows = [
        {
            "layer": layer, "layer_name": f"layers.{layer}", "expert": expert, "projection": WHOLE, "method": "gptq",
            "bits": bits, "group_size": 64, "symmetric": False, "loss": 0.5 / bits, "relative_loss": 0.1,
            "calibration_tokens": 9, "heldout_tokens": 3, "fallback": "none", "measured_on": "heldout", "bytes": 100,
            "weighted_loss": 0.25, "hessian_trace": 1.0,
        }
        for layer in range(2)
        for expert in range(2)
        for bits in (2, 4)
    ]  # fmt: skip
    return pa.Table.from_pylist(rows, schema=SCHEMA)


class ParquetTarget(Target):
    """One of Parquet files; pyarrow's memory is its own."""

    table: pa.Table
    per_byte = 0

    def valid(self) -> bytes:
        return table_bytes(self.table)

    def mutated(self, chance: random.Random) -> bytes:
        return parquet_bytes(self.table, chance)


class Losses(ParquetTarget):
    """losses.parquet: what assigners and reports ask of it is there."""

    name = "losses"

    def prepare(self, place: Place) -> None:
        self.table = loss_table()

    def read(self, data: bytes) -> Check:
        found = read_losses(self.file("losses.parquet", data))
        return lambda: _is_loss_table(found)


def _is_loss_table(found: LossTable) -> None:
    for method in (*found.listed_methods(), "best"):
        for layer in found.matrix(method):
            for bits, losses in layer.items():
                assert 1 <= bits <= 16
                assert np.isnan(losses).any() or (losses >= 0).all()
    summarize(found)


class Sensitivities(ParquetTarget):
    """sensitivities.parquet: a number of every expert of every layer, in order."""

    name = "sensitivities"

    def prepare(self, place: Place) -> None:
        columns = {name: [0.5, 1.0, 1.5, 2.0] for name in sensitivities.NEEDED} | {
            "layer": [0, 0, 1, 1], "expert": [0, 1, 0, 1], "activations": [4, 3, 2, 1],
        }  # fmt: skip
        path = self.folder / "valid.parquet"
        sensitivities.write_sensitivities(path, columns, "0" * 64)
        import pyarrow.parquet as pq

        table = pq.read_table(path)
        unsealed = {key: value for key, value in table.schema.metadata.items() if key != sealed.KEY}
        unsealed[sensitivities.COLUMNS_KEY] = sensitivities.columns_digest(table, "0" * 64, whole=False).encode()
        self.table = table.replace_schema_metadata(unsealed)  # as an earlier moeq wrote it: all else is looked at

    def read(self, data: bytes) -> Check:
        found = sensitivities.read_sensitivities(self.file("sensitivities.parquet", data))
        return lambda: _is_sensitivity_table(found)


def _is_sensitivity_table(found: sensitivities.SensitivityTable) -> None:
    experts = found.experts()
    assert sum(experts) == found.table.num_rows
    assert found.model.isprintable()
    for name in sensitivities.NEEDED:
        assert [len(column) for column in found.column(name)] == experts


MEASURED = """policy,batch,input_tokens,output_tokens,geometry,bits,gpu_experts,decode_seconds_per_token,prefill_seconds
GPU only,1,128,32,mixtral-8x7b,4,2,0.01,0.5
GPU only,2,128,32,,,,0.02,
"""


class Measured(BytesTarget):
    """Measured points: settings that are whole numbers, seconds that are more than none."""

    name = "measured"
    per_byte = 40  # the cells of a row are texts of their own

    def prepare(self, place: Place) -> None:
        from moeq.estimator.policies import by_label

        self.data = MEASURED.replace("GPU only", next(iter(by_label()))).encode()

    def mutated(self, chance: random.Random) -> bytes:
        return cells_bytes(self.data.decode(), chance)

    def read(self, data: bytes) -> None:
        for point in read_points(self.file("measured.csv", data)):
            assert point.batch >= 1
            assert 0 < point.seconds < float("inf")


class Sums(BytesTarget):
    name = "sums"

    def prepare(self, place: Place) -> None:
        for name in "ab":
            self.file(name, b"")
        self.data = "".join(f"{hashlib.sha256(b'').hexdigest()}  {name}\n" for name in "ab").encode()

    def read(self, data: bytes) -> None:
        self.file(SUMS, data)
        check_sums(self.folder)


class Pairs(BytesTarget):
    """Parallel text in cells: as many sentences on either side, none empty."""

    name, suffix = "pairs_tsv", ".tsv"
    per_byte = 40
    data = b"source\ttarget\nein Satz\ta sentence\nnoch einer\tanother\n"

    def mutated(self, chance: random.Random) -> bytes:
        return cells_bytes(self.data.decode(), chance, "\t")

    def read(self, data: bytes) -> None:
        section = TranslationSection(source=str(self.file(f"pairs{self.suffix}", data)))
        pairs = read_pairs(section)
        assert len(pairs.sources) == len(pairs.references) > 0
        assert all(text.strip() for text in (*pairs.sources, *pairs.references))


class PairsOfLines(Pairs):
    """Parallel text in JSON lines."""

    name, suffix = "pairs_jsonl", ".jsonl"
    data = b'{"source": "ein Satz", "target": "a sentence"}\n{"source": "noch", "target": "more"}\n'

    def mutated(self, chance: random.Random) -> bytes:
        return cells_bytes(self.data.decode(), chance, '"')
