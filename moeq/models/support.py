"""Which families of transformers moeq streams, quantizes and exports: a record that the tests measure anew."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from moeq.errors import ModelError, nearest

RECORD = Path(__file__).with_name("families.json")


@dataclass(frozen=True, kw_only=True)
class Support:
    """What the tests found for one family.

    model_type and model: its names in transformers; experts: how it keeps them; streamed: whether its layers run from
    disk with the same logits; quantized: whether a run, its export and the loading of that give the dequantized logits;
    remark: why not, or what is left alone.
    """

    model_type: str
    model: str
    experts: str
    streamed: bool
    quantized: bool
    remark: str = ""


def families(name: str | None = None) -> list[Support]:
    """The record, by model_type; or those whose model_type or class contains a name (ModelError when none does)."""
    rows = [Support(**row) for row in json.loads(RECORD.read_text("utf-8"))]
    if name is None:
        return rows
    wanted = name.lower().replace("-", "_")
    named = [row for row in rows if wanted in row.model_type.replace("-", "_") or wanted in row.model.lower()]
    if not named:
        guess = nearest(wanted, [row.model_type for row in rows])
        hint = f"did you mean {guess!r}?" if guess else "run `moeq families` for the list"
        raise ModelError("no family of this name", where=name, do=hint)
    return named
