"""What a model whose experts' precision follows its workload decided, as JSON lines (`--dynamic-log`).

The first line says of what; then one for every decision, with what is asked to change and with the sums of what
happened until then; the last one has the sums at the end. A log without it is of a run that goes on, or was killed.

Letters: L MoE layers, E experts of a layer.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from moeq.artifacts.reading import parse_json, read_bounded
from moeq.artifacts.stage import Frozen, check_schema_version
from moeq.errors import ArtifactError
from moeq.recipe.wording import refusal_of

KIND, SCHEMA_VERSION = "moeq dynamic log", 1
REMEDY = "give a file that --dynamic-log wrote"
MOST_BYTES = 64 << 20

Model = TypeVar("Model", bound=BaseModel)
NO_SUMS = ("step", "high", "switches", "end", "said")
Count = Annotated[int, Field(ge=0, le=2**63 - 1)]
Mask = Annotated[str, Field(pattern=r"^[0-9a-f]{1,1024}$")]  # bit e: expert e is in high precision


class Head(Frozen):
    """Of what a log is. settings: as `DynamicSettings` has them; layers: their names [L]; experts: [L]; places: of high
    precision in every layer; high: which were there at the beginning [L]."""

    kind: Literal["moeq dynamic log"] = "moeq dynamic log"
    schema_version: int = SCHEMA_VERSION
    moeq_version: str
    settings: dict[str, Any]
    other_bytes: dict[str, Count]
    pool_bytes: Count
    layers: tuple[str, ...]
    experts: tuple[Annotated[int, Field(ge=1, le=4096)], ...]
    places: Count
    high: tuple[Mask, ...]

    @model_validator(mode="after")
    def _of_its_layers(self) -> Head:
        if not len(self.layers) == len(self.experts) == len(self.high) > 0:
            raise ValueError(f"{len(self.layers)} layers, {len(self.experts)} numbers, {len(self.high)} sets")
        return self


class Switch(Frozen):
    """An expert that is to be in low (0) or high (1) precision from now on."""

    layer: Count
    expert: Count
    version: Literal[0, 1]


class Sums(BaseModel):
    """What happened until a step (forward pass): further sums may follow by name. said: what went wrong since then."""

    model_config = ConfigDict(extra="allow", frozen=True)
    __pydantic_extra__: dict[str, Count]
    step: Count
    promotions: Count = 0
    demotions: Count = 0
    failures: Count = 0
    host_hits: Count = 0
    host_misses: Count = 0
    copied_bytes: Count = 0
    said: tuple[str, ...] = ()


class Decision(Sums):
    """high: which experts are there [L], before what is asked for."""

    high: tuple[Mask, ...]
    switches: tuple[Switch, ...]


class End(Sums):
    end: Literal[True]
    high: tuple[Mask, ...]


class DynamicLog(Frozen):
    """A whole log; end: None where it goes on, or was killed."""

    head: Head
    decisions: tuple[Decision, ...]
    end: End | None

    @property
    def sums(self) -> Sums:
        """The last that are known."""
        last = self.end or (self.decisions[-1] if self.decisions else None)
        return last or Sums(step=0)

    @property
    def sets(self) -> list[tuple[int, tuple[int, ...]]]:
        """Steps, and which experts [L] were in high precision then, as bits of a number."""
        later = [(line.step, line.high) for line in self.decisions]
        later += [] if self.end is None else [(self.end.step, self.end.high)]
        return [(step, tuple(int(mask, 16) for mask in masks)) for step, masks in [(0, self.head.high), *later]]


def mask(high: Iterable[bool]) -> str:
    """Which of a layer's experts [E] are in high precision, as the log has it."""
    return format(sum(1 << expert for expert, there in enumerate(high) if there), "x")


def is_log(path: Path) -> bool:
    """Whether a file begins as a log does."""
    with path.open("rb") as file:
        return f'"{KIND}"'.encode() in file.readline(4096)


def read_log(path: Path) -> DynamicLog:
    """ArtifactError for a file that is missing, damaged or of another version."""
    try:
        lines = list(_lines(read_bounded(path, MOST_BYTES)))
        first = parse_json(lines[0]) if lines else None
        if not isinstance(first, dict) or first.get("kind") != KIND:
            raise ValueError("no log of dynamic precision")
    except (OSError, ValueError) as error:
        raise ArtifactError(str(error), where=str(path), do=REMEDY) from None
    check_schema_version(first.get("schema_version"), SCHEMA_VERSION, path, remedy=REMEDY)
    head, decisions = _line(path, 1, lines[0], Head), list[Decision]()
    end: End | None = None
    line: Decision | End
    for number, text in enumerate(lines[1:], 2):
        line = _line(path, number, text, End) if '"end"' in text else _line(path, number, text, Decision)
        wrong = "behind the end" if end is not None else _wrong(head, line, decisions[-1].step if decisions else 0)
        if wrong is not None:
            raise ArtifactError(wrong, where=f"{path}, line {number}", do=REMEDY)
        if isinstance(line, Decision):
            decisions.append(line)
        else:
            end = line
    return DynamicLog(head=head, decisions=tuple(decisions), end=end)


def _line(path: Path, number: int, text: str, model: type[Model]) -> Model:
    data = None
    try:
        data = parse_json(text)
        return model.model_validate(data)
    except ValidationError as error:
        what = refusal_of(error, data).sentence() if isinstance(data, dict) else "no object"
    except ValueError as error:
        what = str(error)
    raise ArtifactError(what, where=f"{path}, line {number}", do=REMEDY)


def _lines(data: bytes) -> Iterator[str]:
    """Whole lines: what is behind the last end of a line was being written when it was killed."""
    text = data.decode("utf-8")
    yield from text[: text.rfind("\n") + 1].splitlines()


def _wrong(head: Head, line: Decision | End, before: int) -> str | None:
    """Why a line cannot be: experts and layers that the head has not, steps that go back."""
    if len(line.high) != len(head.layers):
        return f"sets of {len(line.high)} layers, not of {len(head.layers)}"
    if any(int(there, 16) >> experts for there, experts in zip(line.high, head.experts, strict=True)):
        return "an expert that its layer has not"
    if line.step < before:
        return f"step {line.step} behind step {before}"
    for one in line.switches if isinstance(line, Decision) else ():
        if one.layer >= len(head.layers) or one.expert >= head.experts[one.layer]:
            return f"no expert {one.expert} of layer {one.layer}"
    return None


def described(log: DynamicLog) -> dict[str, Any]:
    """What `moeq inspect` says of a log."""
    settings, sums = log.head.settings, log.sums
    ever = [0] * len(log.head.layers)
    for _, sets in log.sets:
        ever = [before | now for before, now in zip(ever, sets, strict=True)]
    changed: dict[int, int] = {}
    for one in (switch for decision in log.decisions for switch in decision.switches):
        changed[one.layer] = changed.get(one.layer, 0) + 1
    most = max(changed, key=lambda layer: (changed[layer], -layer), default=None)
    lookups = sums.host_hits + sums.host_misses
    return {
        "kind": "log of dynamic precision",
        "high_bits": settings.get("high"),
        "low_bits": settings.get("low"),
        "memory_bytes": settings.get("memory_bytes"),
        "pool_bytes": log.head.pool_bytes,
        "layers": len(log.head.layers),
        "experts_a_layer": sorted(set(log.head.experts)),
        "high_experts_a_layer": log.head.places,
        "experts_that_were_high": sum(one.bit_count() for one in ever),
        "decisions": len(log.decisions),
        "forward_passes": sums.step,
        **{name: value for name, value in sums.model_dump().items() if name not in NO_SUMS},
        "host_hit_rate": None if not lookups else sums.host_hits / lookups,
        "went_wrong": [text for line in (*log.decisions, *([log.end] if log.end else [])) for text in line.said],
        "layer_that_changed_most": None if most is None else f"{log.head.layers[most]}: {changed[most]} switches",
        "ended": "yes" if log.end is not None else "no: it goes on, or was killed; the sums are of the last decision",
    }
