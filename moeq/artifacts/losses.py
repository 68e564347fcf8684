"""LossTable: what every expert loses at every width, as losses.parquet.

One row for each layer, expert, projection, method and width. `projection` is gate_proj, up_proj or down_proj (only this
one is quantized) or expert (all of them). `loss` is the mean squared error of the expert's output, over held-out
tokens and output features; `relative_loss` is divided by the mean square of the exact output. `calibration_tokens` and
`heldout_tokens` count the expert's own tokens. `fallback` says what stood in for missing tokens or a failed
factorization, and where float16 lacks range for scales (none, borrowed_hessian, left_out_tokens, raised_damping,
float64, rounded, scale_underflow, scale_overflow; joined by +), `measured_on` where the
loss was taken (heldout: the expert's own held-out tokens; borrowed: held-out tokens of its layer). `bytes` counts
codes, scales and zero points. `weighted_loss` is `loss` with every token's error multiplied by its squared
routing weight. `hessian_trace`: of the Hessians that quantized it (means of x x^T over calibration tokens), summed over
the matrices; none for methods that take none. Both are none in tables of schema version 1. `energy` is the mean square
of the exact output on the same tokens, and `weighted_energy` that with every token multiplied by its squared routing
weight: what `loss` and `weighted_loss` are for an expert that is dropped. Both are none in tables before version 3.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute
import pyarrow.parquet as pq

from moeq.artifacts.files import write_atomically
from moeq.artifacts.stage import check_schema_version
from moeq.errors import ArtifactError
from moeq.recipe import BEST, DEFAULT_QUANTIZER

SCHEMA_VERSION = 3
ADDED = {2: ("weighted_loss", "hessian_trace"), 3: ("energy", "weighted_energy")}  # by which version
ENERGIES = {"loss": "energy", "weighted_loss": "weighted_energy"}  # what is lost of a dropped expert
NAME = "losses.parquet"
WHOLE = "expert"
REMEDY = "run `moeq losses` again"
MOST_ROWS = 1 << 24  # that are read: a model of 100,000 experts has some millions
VERSION_KEY = b"moeq_schema_version"
BEYOND = {"scale_underflow": "small", "scale_overflow": "large"}  # what `grids.beyond_float16` finds

SCHEMA = pa.schema(
    [
        ("layer", pa.int32()),
        ("layer_name", pa.string()),
        ("expert", pa.int32()),
        ("projection", pa.string()),
        ("method", pa.string()),
        ("bits", pa.int8()),
        ("group_size", pa.int32()),
        ("symmetric", pa.bool_()),
        ("loss", pa.float64()),
        ("relative_loss", pa.float64()),
        ("calibration_tokens", pa.int64()),
        ("heldout_tokens", pa.int64()),
        ("fallback", pa.string()),
        ("measured_on", pa.string()),
        ("bytes", pa.int64()),
        ("weighted_loss", pa.float64()),
        ("hessian_trace", pa.float64()),
        ("energy", pa.float64()),
        ("weighted_energy", pa.float64()),
    ],
    metadata={"moeq_schema_version": str(SCHEMA_VERSION)},
)


@dataclass(frozen=True)
class LossTable:
    """The table, with the two look-ups that the other rooms need."""

    table: pa.Table

    def rows(self, projection: str | None = None) -> list[dict[str, Any]]:
        """All rows, or those of one projection."""
        chosen = self.table if projection is None else self.table.filter(pa.compute.field("projection") == projection)
        return chosen.to_pylist()  # type: ignore[no-any-return]

    def methods(self) -> list[str]:
        return sorted(set(self.table["method"].to_pylist()))

    def listed_methods(self) -> list[str]:
        """The methods in the order in which the table has them: that of losses.methods."""
        return self.table["method"].unique().to_pylist()  # type: ignore[no-any-return]

    def experts(self) -> list[int]:
        """Experts of every layer, by whatever method they were measured."""
        layer, expert = self.table["layer"].to_numpy(), self.table["expert"].to_numpy()
        counts = np.zeros(int(layer.max(initial=-1)) + 1, np.int64)
        np.maximum.at(counts, layer, expert + 1)
        return counts.tolist()  # type: ignore[no-any-return]

    def bits(self) -> list[int]:
        return sorted(set(self.table["bits"].to_pylist()))

    def has(self, projections: Collection[str]) -> bool:
        """Whether each of these projections was measured alone."""
        return set(projections) <= set(self.table["projection"].unique().to_pylist())

    def matrix(self, method: str, column: str = "loss", projection: str = WHOLE) -> list[dict[int, np.ndarray]]:
        """Per layer: {bits: column [E]} of one method and projection.

        method `best`: of every expert and width, the column of the best method. ArtifactError when there are no such
        rows.
        """
        if method == BEST:
            return self._best_matrix(column, projection)
        frame = self.table.filter(
            (pa.compute.field("method") == method) & (pa.compute.field("projection") == projection)
        )
        if frame.num_rows == 0:
            asked = method in set(self.table["method"].unique().to_pylist())
            do = REMEDY if asked else f"measure it: `moeq losses` on this run with --quantizer {method}"
            raise ArtifactError(f"no rows for method {method} and projection {projection}", where=NAME, do=do)
        layer, expert = frame["layer"].to_numpy(), frame["expert"].to_numpy()
        bits, value = frame["bits"].to_numpy(), frame[column].to_numpy()
        result: list[dict[int, np.ndarray]] = []
        for index, count in enumerate(self.experts()):
            here = layer == index
            widths: dict[int, np.ndarray] = {}
            for width in sorted(set(bits[here].tolist())):
                pick = here & (bits == width)
                widths[width] = np.full(count, np.nan)
                widths[width][expert[pick]] = value[pick]
            result.append(widths)
        return result

    def energies(self, column: str) -> list[np.ndarray] | None:
        """What `loss` or `weighted_loss` is for experts that are dropped, [E] a layer; None where it is not known."""
        if self.table[ENERGIES[column]].null_count:
            return None
        tables = self.matrix(self.listed_methods()[0], ENERGIES[column])
        return [next(iter(widths.values())).astype(float) for widths in tables]

    def best(self) -> list[dict[int, np.ndarray]]:
        """Per layer: {bits: method [E]} with the lowest held-out loss of the whole expert; of equals, the first."""
        methods = np.array(self.listed_methods())
        layers = []
        for tables in zip(*(self.matrix(str(method)) for method in methods), strict=True):
            widths = sorted(set().union(*tables))
            layers.append({width: methods[_stack(tables, width).argmin(0)] for width in widths})
        return layers

    def _best_matrix(self, column: str, projection: str) -> list[dict[int, np.ndarray]]:
        methods, best = self.listed_methods(), self.best()
        values = [self.matrix(method, column, projection) for method in methods]
        return [
            {
                width: np.choose(
                    [methods.index(name) for name in names], [_column(table[layer], width, names) for table in values]
                )
                for width, names in best[layer].items()
            }
            for layer in range(len(best))
        ]


def _column(table: dict[int, np.ndarray], width: int, like: np.ndarray) -> np.ndarray:
    """One width of a layer's table; what it lacks is not a number."""
    return table.get(width, np.full(len(like), np.nan))


def _stack(tables: tuple[dict[int, np.ndarray], ...], width: int) -> np.ndarray:
    """Losses of all methods at one width, [methods, E]; what a method lacks is infinite."""
    there = next(table[width] for table in tables if width in table)
    stacked = np.stack([_column(table, width, there) for table in tables])
    return np.where(np.isnan(stacked), np.inf, stacked)


def write_losses(path: Path, parts: Iterable[list[dict[str, Any]]]) -> None:
    """Write rows given in parts, ordered as given, atomically; the bytes depend only on the rows.

    Rows are columns as soon as they come: the Python objects of a large model's would take over a gigabyte.
    """
    tables = [pa.Table.from_pylist(rows, schema=SCHEMA) for rows in parts]
    table = pa.concat_tables(tables).combine_chunks()
    write_parquet(path, table)


def write_parquet(path: Path, table: pa.Table, finish: Callable[[Path], None] = lambda written: None) -> None:
    """Write a table atomically. finish: what is still done to the file."""

    def write(partial: Path) -> None:
        pq.write_table(table, partial.absolute(), compression="zstd")  # a relative path a:b is an address to it
        finish(partial)

    write_atomically(path, write)


def read_parquet(path: Path, remedy: str = REMEDY) -> pa.Table:
    """A Parquet file; ArtifactError when it is missing or damaged, or would take more than tables of moeq do."""
    try:
        with pq.ParquetFile(path.absolute()) as file:
            if file.metadata.num_rows > MOST_ROWS:
                raise ValueError(f"{file.metadata.num_rows} rows, at most {MOST_ROWS} are read")
            table = file.read()
        table.validate(full=True)  # that texts are UTF-8, among other things
        return table
    except FileNotFoundError:
        raise ArtifactError("no such file", where=str(path), do=remedy) from None
    except (OSError, ValueError, pa.ArrowException) as error:
        raise ArtifactError(f"cannot be read as Parquet ({error})", where=str(path), do=remedy) from None


def metadata_text(table: pa.Table, key: bytes, otherwise: str) -> str:
    """What the metadata of a table has under a key, whatever its bytes are."""
    return (table.schema.metadata or {}).get(key, otherwise.encode()).decode("utf-8", "replace")  # type: ignore[no-any-return]


def read_losses(path: Path) -> LossTable:
    """Read a loss table; ArtifactError when it is missing, damaged or of another schema version."""
    table = read_parquet(path)
    version = metadata_text(table, VERSION_KEY, "none")
    later = [name for since, names in ADDED.items() if version in map(str, range(1, since)) for name in names]
    if later and not set(later) & set(table.schema.names):
        for name in later:
            table = table.append_column(name, pa.nulls(len(table), pa.float64()))
    else:
        check_schema_version(version, str(SCHEMA_VERSION), path, remedy=REMEDY)
    if not table.schema.equals(SCHEMA):
        raise ArtifactError("not a loss table: other columns", where=str(path), do=REMEDY)
    problem = _problem_with(table)
    if problem is not None:
        raise ArtifactError(f"not a loss table: {problem}", where=str(path), do=REMEDY)
    return LossTable(table)


def _problem_with(table: pa.Table) -> str | None:
    """What no loss table has, or None."""
    if WHOLE not in table["projection"].unique().to_pylist():
        return f"no row of a whole {WHOLE}"
    if BEST in table["method"].unique().to_pylist():
        return f"a method that is called {BEST}"
    late = {name for names in ADDED.values() for name in names}
    empty = next((name for name in table.schema.names if name not in late and table[name].null_count), None)
    if empty is not None:
        return f"{empty} is empty in a row"
    for name, least, most in (("layer", 0, len(table) - 1), ("expert", 0, len(table) - 1), ("bits", 1, 16)):
        values = table[name].to_numpy()
        if values.min() < least or values.max() > most:
            return f"{name} is not within {least} to {most}"
    if not (table["loss"].to_numpy() >= 0).all():
        return "a loss that is below 0 or no number"
    for name in ENERGIES.values():
        values = table[name].drop_null().to_numpy()
        if not ((values >= 0) & np.isfinite(values)).all():
            return f"{name} that is below 0 or no number"
    return None


def summarize(table: LossTable) -> dict[str, Any]:
    """Mean relative loss by method and width, fallbacks and coverage."""
    whole = table.rows(WHOLE)
    relative = {
        method: {
            str(bits): float(np.mean(losses))
            for bits in table.bits()
            if (losses := [r["relative_loss"] for r in whole if r["method"] == method and r["bits"] == bits])
        }
        for method in table.methods()
    }
    method = DEFAULT_QUANTIZER if DEFAULT_QUANTIZER in table.methods() else table.methods()[0]
    once = [row for row in whole if row["bits"] == table.bits()[0] and row["method"] == method]
    once = once or list({(row["layer"], row["expert"]): row for row in whole}.values())
    fallbacks = Counter(name for row in once for name in row["fallback"].split("+") if name not in ("none", *BEYOND))
    beyond = {name: len({(r["layer"], r["expert"]) for r in whole if name in r["fallback"]}) for name in BEYOND}
    return {
        "experts": len(once),
        "mean_relative_loss": relative,
        "fallbacks": dict(sorted(fallbacks.items())),
        "beyond_float16": {name: count for name, count in beyond.items() if count},
        "measured_on_borrowed_tokens": sum(row["measured_on"] == "borrowed" for row in once),
        "fewest_calibration_tokens": min(row["calibration_tokens"] for row in once),
    }
