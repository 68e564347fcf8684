"""Which families of transformers moeq streams, quantizes and exports: a record that the tests measure anew."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

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


def families() -> list[Support]:
    """The record, by model_type."""
    return [Support(**row) for row in json.loads(RECORD.read_text("utf-8"))]


def markdown(rows: list[Support]) -> str:
    """The record as a table of the README."""
    mark = {True: "yes", False: "no"}
    lines = ["| model_type | class | experts | streams | quantizes, exports, loads |", "|---|---|---|---|---|"]
    for row in rows:
        whole = f"{mark[row.quantized]}: {row.remark}" if row.remark else mark[row.quantized]
        lines.append(f"| {row.model_type} | {row.model} | {row.experts} | {mark[row.streamed]} | {whole} |")
    return "\n".join(lines)
