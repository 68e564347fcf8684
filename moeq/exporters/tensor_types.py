"""The widths of an assignment as `llama-quantize` takes them: a type of llama.cpp's for every stack of experts.

It is told by patterns of tensors' names (`--tensor-type PATTERN=TYPE`, or `--tensor-type-file`: the same, separated by
white space), of which the first that is found in a name counts; names are lower case there. All else gets what the
command's own type gives it. Source: tools/quantize/quantize.cpp of llama.cpp.
"""

from __future__ import annotations

import shlex
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from moeq.artifacts.assignment import Width, read_assignment, width_of
from moeq.artifacts.files import write_text
from moeq.artifacts.manifest import NAME as MANIFEST
from moeq.artifacts.manifest import read_manifest
from moeq.errors import ArtifactError, FormatError, RecipeError
from moeq.exporters.gguf import STACKS
from moeq.models.stored_experts import LAYER
from moeq_kernels.iq_types import SETS

Kind = Literal["k", "iq"]
ASSIGNMENT = "assignment.json"
TYPES: dict[Kind, dict[int, str]] = {
    "k": {2: "q2_K", 3: "q3_K", 4: "q4_K", 5: "q5_K", 6: "q6_K", 8: "q8_0", 16: "bf16"},
    "iq": {1: "iq1_m", 2: "iq2_xs", 3: "iq3_s", 4: "iq4_xs", 5: "q5_K", 6: "q6_K", 8: "q8_0", 16: "bf16"},
}
ONLY_WITH_IMATRIX = ("iq1_m", "iq1_s", "iq2_xxs", "iq2_xs", "iq2_s")
WIDER = "give every layer's experts one width (assign.granularity: layer or projection), or --widen to the widest"

Layers = Sequence[tuple[str, Sequence[Width]]]  # a layer's name, and the widths of its experts


def types_of(layers: Layers, kind: Kind, *, widen: bool = False, codebook: str = "") -> dict[str, str]:
    """{pattern of tensors' names: type} of the stacks of all layers.

    codebook: the set of i-quants that they have already, whose types are those of iq then; widen: whether a stack
    of several widths gets the widest of them. FormatError for one without it, for a width that has no type, and for
    experts in no numbered layer.
    """
    numbers: dict[tuple[str, str], list[int]] = defaultdict(list)
    known = TYPES[kind]
    if kind == "iq" and codebook in SETS:
        known = known | {bits: type_name.lower() for bits, type_name in SETS[codebook].items()}
    for name, widths in layers:
        found = LAYER.search(name)
        if found is None:
            raise FormatError("experts are in no numbered layer", where=name, do="quantize it with `moeq run`")
        for projection in STACKS:
            numbers[projection, _type(f"{name}, {projection}", widths, projection, kind, known, widen)].append(
                int(found[1])
            )
    return {
        rf"^blk\.({'|'.join(map(str, sorted(blocks)))})\.{STACKS[projection]}\.weight$": name
        for (projection, name), blocks in numbers.items()
    }


def _type(
    where: str, widths: Sequence[Width], projection: str, kind: Kind, known: Mapping[int, str], widen: bool
) -> str:
    """The type of one stack; known: that of every width."""
    used = sorted({width_of(width, projection) for width in widths})
    if len(used) > 1 and not widen:
        listed = ", ".join(map(str, used))
        raise FormatError(f"{listed} bits among its experts; llama.cpp has one type for all", where=where, do=WIDER)
    if used[-1] not in known:
        do = "take iq" if used[-1] in TYPES["iq"] else f"assign {', '.join(map(str, known))}"
        raise FormatError(f"{used[-1]} bits; no type of {kind} is as narrow", where=where, do=do)
    return known[used[-1]]


def told(path: Path, kind: Kind, out: Path | None = None, *, widen: bool = False) -> dict[str, Any]:
    """What llama-quantize's command line needs, in one line; the file of types is written, where one is named.

    path: a native checkpoint, an assignment, or a run that has one. Raises ArtifactError for others, RecipeError for an
    `out` that is there, FormatError as `types_of`.
    """
    if out is not None and out.exists():
        raise RecipeError("is there already", where=f"--out {out}", do="name another, or remove it")
    layers, codebook = _assigned(path)
    found = types_of(layers, kind, widen=widen, codebook=codebook)
    pairs = [f"{pattern}={name}" for pattern, name in found.items()]
    if out is not None:
        write_text(out, "".join(f"{pair}\n" for pair in pairs))
    words = ["--tensor-type-file", str(out)] if out else [word for pair in pairs for word in ("--tensor-type", pair)]
    needed = sorted({*found.values()} & {*ONLY_WITH_IMATRIX})
    return {
        "for": "llama-quantize",
        "arguments": shlex.join(words),
        "needs_an_imatrix": ", ".join(needed) or "no",
    } | ({} if out is None else {"path": str(out)})


def _assigned(path: Path) -> tuple[Layers, str]:
    """Layers and the widths of their experts, as a checkpoint or an assignment has them, and its codebook."""
    if (path / MANIFEST).is_file():
        manifest = read_manifest(path)
        layers = [(layer.name, [expert.widths for expert in layer.experts]) for layer in manifest.layers]
        return layers, manifest.encoding.codebook
    file = next((one for one in (path, path / ASSIGNMENT, path / "assign" / ASSIGNMENT) if one.is_file()), None)
    if file is None:
        do = "give a native checkpoint, an assignment.json, or a run that has one"
        raise ArtifactError("no assignment of widths", where=str(path), do=do)
    assignment = read_assignment(file)
    layers = [(layer.name, [choice.widths for choice in layer.experts]) for layer in assignment.layers]
    return layers, assignment.encoding.codebook
