"""The table at the end of a run: every assignment's size beside its quality, and what the words in it mean."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from rich.table import Table

from moeq.papers import terms_in
from moeq.tables import human_size, kl_caption

BESIDE = 130  # columns from which sizes stand beside quality, in one table
NARROW = 78  # columns below which tables leave out what the others imply


def empty_table(name: str, figures: Iterable[str] = (), **first: Any) -> Table:
    """An empty table; its first column is text, the others figures, none of which is broken."""
    made = Table(box=None, pad_edge=False, header_style="bold", collapse_padding=True)
    made.add_column(name, **first)
    for title in figures:
        made.add_column(title, justify="right", no_wrap=True)
    return made


@dataclass(frozen=True)
class Column:
    """A column of the final table; implied: narrow windows leave it out."""

    title: str
    cell: Callable[[dict[str, Any]], str]
    implied: bool = False


BITS = Column("bits", lambda row: figure(row["bits_per_weight"], "{:.3g}"))
SPEED = Column("speed-up", lambda row: _speed(row))
_ACCURACY = Column("acc", lambda row: figure(row["accuracy"], "{:.1%}"))
QUALITY = (
    Column("ppl", lambda row: figure(row["perplexity"], "{:.2f}")),
    Column("+", lambda row: figure(row["perplexity_change"], "{:+z.1%}"), implied=True),
    Column("KL", lambda row: figure(row["kl"], "{:.3g}")),
    Column("top-1", lambda row: figure(row["same_top"], "{:.1%}")),
    _ACCURACY,
)
IMAGE_QUALITY = (
    Column("cross-ent.", lambda row: figure(row["cross_entropy"], "{:.4f}")),
    Column("logit error", lambda row: figure(row["logit_error"], "{:.2%}")),
    _ACCURACY,
)
SIZES = (
    Column("all bits", lambda row: figure(row["stored_bits"], "{:.3g}")),
    Column("experts", lambda row: human_size(row["expert_bytes"])),
    Column("of orig.", lambda row: figure(row["expert_share"], "{:.1%}"), implied=True),
    Column("whole", lambda row: "-" if row["checkpoint_bytes"] is None else human_size(row["checkpoint_bytes"])),
    Column("of orig.", lambda row: figure(row["checkpoint_share"], "{:.1%}"), implied=True),
)


def columns(rows: Sequence[dict[str, Any]]) -> tuple[list[Column], list[Column]]:
    """What is shown of quality and of sizes: only what some row has; the speed-up stands beside the sizes."""
    measured = IMAGE_QUALITY if all("logit_error" in row for row in rows) else QUALITY
    quality = [column for column in measured if any(column.cell(row) != "-" for row in rows)]
    return quality, [*SIZES, *([SPEED] if has_speed(rows) else [])]


def tables(rows: Sequence[dict[str, Any]], width: int) -> Iterator[Table]:
    """One table, or two in a window that cannot hold it."""
    quality, sizes = columns(rows)
    if width >= BESIDE:
        yield _table(rows, [BITS, *sizes, *quality])
        return
    for part in ([BITS, *quality], sizes):
        yield _table(rows, [column for column in part if width >= NARROW or not column.implied])


def has_speed(rows: Sequence[dict[str, Any]]) -> bool:
    """Whether a speed-up was estimated that says something of the model."""
    return any(row["speedup_over_monde_cost_optimal"] is not None for row in rows)


def caption(
    rows: Sequence[dict[str, Any]],
    estimated: dict[str, Any] | None,
    width: int,
    replicas: int = 0,
    *,
    edited: bool = False,
) -> str:
    """What the columns mean that a window of that width holds; estimated: the summary of the stage `estimate`, which
    rows without speeds do without.

    replicas: bytes of what the checkpoint holds of experts at other widths; edited: whether the assignment was, by
    hand.
    """
    from moeq.artifacts.assignment import EDITED

    exported = f"* exported, edited {EDITED}" if edited else "* exported"
    others = f" but {human_size(replicas)} of other replicas, which only the whole has" if replicas else ""
    whole = ", everything else stored alike in all rows but the original" if _others_differ(rows) else ""
    errors = [row["accuracy_stderr"] for row in rows if row["accuracy_stderr"] is not None]
    accuracy = f" acc: accuracy, standard error {100 * max(errors):.1f} points." if errors else ""
    speed = "" if estimated is None or not has_speed(rows) else _speeds(estimated)
    told = width >= NARROW and any(row["perplexity_change"] is not None for row in rows)
    changed = " +: perplexity over the original's." if told else ""
    return (
        f"{exported}. bits: stored for a weight of the experts; all bits: of all tensors{others}; scales and zero "
        "points counted, as they are in all bytes. whole: every file of the checkpoint, at most, as --size limits "
        f"it{whole}.{changed}{kl_caption(rows)}{accuracy}{speed}"
    )


def _speeds(estimated: dict[str, Any]) -> str:
    of = "this model" if estimated["geometry_is_the_models"] else f"{estimated['geometry']} with this bit mix"
    return f" speed-up: estimated decode speed over MoNDE by its bandwidth rule / cost-optimal, for {of}."


def explanations(rows: Sequence[dict[str, Any]], said: str) -> Iterator[tuple[str, str]]:
    """Every method's name in the rows or what was said of them that comes from a paper: what it means, and whose."""
    text = " ".join([said, *(row["label"] for row in rows)])
    for term in terms_in(text):
        if term.paper is not None:
            yield term.name, f"{term.meaning} ({term.paper.short}, {term.paper.link})"


def _table(rows: Sequence[dict[str, Any]], shown: Sequence[Column]) -> Table:
    made = empty_table("assignment", (column.title for column in shown), overflow="fold")
    for row in rows:
        name = f"{row['label']} *" if row["exported"] else row["label"]
        made.add_row(name, *(column.cell(row) for column in shown), style="bold" if row["exported"] else None)
    return made


def _others_differ(rows: Sequence[dict[str, Any]]) -> bool:
    """Whether the rest of the checkpoint has not one size: packed, too, or dequantized where the original has FP8."""
    known = [row["total_bytes"] - row["expert_bytes"] for row in rows if row["total_bytes"] is not None]
    return len(known) == len(rows) and len(set(known)) > 1


def figure(value: float | None, form: str) -> str:
    """A figure, or a dash where there is none."""
    return "-" if value is None else form.format(value)


def _speed(row: dict[str, Any]) -> str:
    rule, best = row["speedup_over_monde_bandwidth_rule"], row["speedup_over_monde_cost_optimal"]
    return "-" if rule is None else f"{rule:.1f}x / {best:.1f}x"
