"""Which families of transformers moeq streams, quantizes and exports: a record that the tests measure anew.

`answer` says of one model, from its config.json and the record alone, whether it is one that works.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

from moeq.errors import ModelError, nearest
from moeq.models.configuration import TOP_K
from moeq.models.declared import DEQUANTIZED, quantization_of
from moeq.models.source import ModelSource
from moeq.models.stored_experts import LAYERS, expert_counts, stated

RECORD = Path(__file__).with_name("families.json")
DENSE = Path(__file__).with_name("dense.json")  # model types of transformers without a word of experts in their code
NO_EXPERTS = "not a Mixture-of-Experts model: no module holds routed experts"
USE_ANOTHER = "moeq quantizes routed experts; use a dense quantizer for this model"
ONE_BY_ONE = re.compile(r"\.experts\.\d+\.([^.]+)\.")  # in the names of what is one expert's alone: of which matrix
IN_MEMORY = "down_proj gate_proj up_proj"  # what transformers calls the matrices of all of them
TAKEN_APART = ("llama4", "llama4_text")  # families whose stacks transformers takes apart for compressed-tensors
TURNS = "experts whose rows of gate and up the family has in turns"
SWITCHES = ("enable_moe_block", "is_moe")  # keys that say whether a family of both kinds has experts
TRY = "try `moeq plan --model MODEL`, with --trust-remote-code where it brings its own code that you have read"


@dataclass(frozen=True, kw_only=True)
class Support:
    """What the tests found for one family.

    model_type and model: its names in transformers; experts: how it keeps them; streamed: whether its layers run from
    disk with the same logits; quantized: whether a run, its export and the loading of that give the dequantized logits;
    separate: whether every matrix of an expert is a tensor of its own on disk, without biases, as most formats of other
    runtimes want it; matrices: what these are called on disk, if separate; remark: why not, or what is left alone;
    since: the first transformers that has it, empty where all that moeq takes do.
    """

    model_type: str
    model: str
    experts: str
    streamed: bool
    quantized: bool
    separate: bool
    remark: str = ""
    since: str = ""
    matrices: str = IN_MEMORY

    @property
    def is_here(self) -> bool:
        """Whether the installed transformers has it."""
        return not self.since or _numbers(version("transformers")) >= _numbers(self.since)

    @property
    def told(self) -> str:
        """The remark, and which transformers it takes."""
        return "; ".join(filter(None, (self.remark, self.since and f"transformers {self.since} or later")))


@dataclass(frozen=True, kw_only=True)
class Answer:
    """Whether a model is one that works, in a line, and what to do where it is not.

    verdict: works, untried (only a part of it was), refused (its experts are of a kind that is not supported), dense,
    quantized (already: it is no original), or unknown. family: its row of the record. layers, experts,
    experts_a_token: as config.json states them, None where it does not.
    """

    model_type: str
    verdict: Literal["works", "untried", "refused", "dense", "quantized", "unknown"]
    line: str
    do: str | None = None
    family: Support | None = None
    layers: int | None = None
    experts: int | None = None
    experts_a_token: int | None = None

    @property
    def refused(self) -> bool:
        """Whether a run of it is refused for certain."""
        return self.verdict in ("refused", "dense")


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


def _numbers(text: str) -> tuple[int, ...]:
    """Major and minor of a version."""
    return tuple(map(int, re.findall(r"\d+", text)[:2]))


def has(name: str) -> bool:
    """Whether any family's model_type or class contains a name."""
    try:
        return bool(families(name))
    except ModelError:
        return False


def dense_types() -> frozenset[str]:
    """Model types of transformers whose code knows no experts."""
    return frozenset(json.loads(DENSE.read_text("utf-8")))


def answer(config: Mapping[str, Any]) -> Answer:
    """Whether the model of a configuration is one that works.

    A model of several parts is judged by itself where the record has it, otherwise by the parts that it names.
    """
    kind = str(config["model_type"])
    numbers: dict[str, Any] = {
        "model_type": kind,
        "layers": stated(config, LAYERS),
        "experts": next((count for count in expert_counts(config) if count > 1), None),
        "experts_a_token": stated(config, TOP_K),
    }
    rows = {row.model_type: row for row in families()}
    parts = list(_model_types(config))
    family = next((rows[name] for name in parts if name in rows), None)
    if family is not None and _has_none(config):
        return Answer(verdict="dense", line=_dense(kind, ", as its config.json has it"), do=USE_ANOTHER, **numbers)
    if family is None:
        return _unlisted(config, parts, numbers)
    if not family.quantized:
        what = f"experts of {family.model} are not supported: {family.remark}"
        do = "`moeq families` lists what is supported"
        return Answer(verdict="refused", line=what, do=do, family=family, **numbers)
    if not family.is_here:
        what = f"{family.model} is of transformers {family.since}, here is {version('transformers')}"
        return Answer(verdict="refused", line=what, do="install that one or a later one", family=family, **numbers)
    method = quantization_of(dict(config)).get("quant_method")
    if method is not None and method not in DEQUANTIZED:
        line, do = f"already quantized ({method})", "give the original model to quantize it; see `moeq inspect`"
        return Answer(verdict="quantized", line=line, do=do, family=family, **numbers)
    streams = "streams from disk, quantizes" if family.streamed else "does not stream from disk, but quantizes"
    does = f"{family.model} {streams}, exports and loads{f'; {family.remark}' if family.remark else ''}"
    if family.model_type == kind:
        return Answer(verdict="works", line=f"it works: {does}", family=family, **numbers)
    line = f"not tried: {kind} as a whole; its part {family.model_type} works: {does}"
    return Answer(verdict="untried", line=line, do=TRY, family=family, **numbers)


def is_packed_apart(source: ModelSource) -> bool:
    """Whether compressed-tensors packed experts one by one as transformers does not load them: of a family that it
    keeps in stacks, or by other names than the family's own."""
    if quantization_of(source.config).get("quant_method") != "compressed-tensors":
        return False
    family = answer(source.config).family
    if family is None or family.model_type in TAKEN_APART:
        return False
    return not matrices_one_by_one(source) <= set(family.matrices.split() if family.separate else ())


def gate_and_up_in_turns(source: ModelSource) -> bool:
    """Whether experts were packed one by one of a family whose own rows hold gate and up in turns."""
    family = answer(source.config).family
    return family is not None and "interleaved" in family.experts and bool(matrices_one_by_one(source))


def matrices_one_by_one(source: ModelSource) -> set[str]:
    """What the matrices of experts are called that lie in a checkpoint as tensors of one expert's alone."""
    return {match[1] for match in map(ONE_BY_ONE.search, source.tensors) if match}


def _unlisted(config: Mapping[str, Any], parts: list[str], numbers: dict[str, Any]) -> Answer:
    """The answer for a model none of whose parts the record has."""
    kind, dense = parts[0], dense_types()
    if numbers["experts"] is None and kind in dense and all(name in dense for name in parts):
        return Answer(verdict="dense", line=_dense(kind), do=USE_ANOTHER, **numbers)
    if config.get("auto_map"):
        why = f"{kind} is no family of the record; the model brings its own Python code"
    elif kind in dense:
        why = f"{kind} is dense in transformers, but config.json speaks of other parts or of experts"
    else:
        why = f"{kind} is no family of the record, nor a dense one that transformers has"
    return Answer(verdict="unknown", line=f"not known: {why}", do=TRY, **numbers)


def _dense(kind: str, how: str = "") -> str:
    return f"it is dense ({kind}{how}), not a Mixture-of-Experts model: moeq has nothing to do"


def _has_none(config: Mapping[str, Any]) -> bool:
    """Whether a configuration of a family of both kinds says that this model has no experts."""
    text = config.get("text_config")
    parts = [part for part in (config, text) if isinstance(part, dict)]
    counts = expert_counts(config)
    off = any(part.get(key) is False for part in parts for key in SWITCHES)
    return off or (bool(counts) and max(counts) < 2)


def _model_types(config: Mapping[str, Any]) -> Iterator[str]:
    """The model types of a configuration and of its parts, its own first."""
    yield str(config["model_type"])
    for key, part in config.items():
        if key.endswith("_config") and isinstance(part, dict) and isinstance(part.get("model_type"), str):
            yield from _model_types(part)
