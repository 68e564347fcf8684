"""What `moeq estimate --kernels` answers: paper 004's two kernels for a vision transformer on an FPGA, by --design."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moeq.bounded import is_number
from moeq.errors import ArtifactError, EstimateError, QuantizationError, RecipeError, hint
from moeq.folders import checkpoint_of, expanded

if TYPE_CHECKING:
    from moeq.integers.hardware.design import Design, Device
    from moeq.integers.hardware.from_program import Known
    from moeq.integers.hardware.parts import Arithmetic
    from moeq.integers.hardware.registers import Registers
    from moeq.integers.hardware.vision import VisionSizes

WHERE = "--design"
EXAMPLE = "write widths=8/8/4,4/8/4 softmax=log-sqrt2,log2 queries=16 units=4"
PAPER = "paper-004"
MOST_NUMBER = 4096
MOST_DESIGNS = 64
WORDS: dict[str, tuple[str, ...]] = {  # axes whose values are words
    "softmax": ("log-sqrt2", "log2", "uniform"),
    "denominator": ("quantized", "exact"),
    "weights": ("streamed", "preloaded"),
}
PARALLEL = ("queries", "lanes", "ends", "units", "inputs", "outputs", "norm")
QUANTITIES = {"clock": "hertz", "bandwidth": "byte/second"}
DEVICE = {"dsps": "dsps", "brams": "block_rams", "clock": "clock_hertz", "bandwidth": "bytes_per_second"}  # its fields
AXES = ("widths", *WORDS, *PARALLEL, *DEVICE)
MANIFEST = "manifest.json"
FORWARD = "reparam/integer"  # in a run
LEAST = {"weights": 2, "activations": 3, "attention": 2}  # bits, as reparam.integer has them
Value = str | int | float | tuple[int, int, int]


def is_axis(word: str) -> bool:
    """Whether a word is one axis of --design with its values."""
    axis, equals, _ = word.partition("=")
    return bool(equals) and axis in AXES


def parse_design(texts: Sequence[str]) -> dict[str, tuple[Value, ...]]:
    """`widths=8/8/4,4/8/4 units=4` (one text or several) as {axis: values}; every combination is a design.

    Raises RecipeError for an unknown or repeated axis, a value that it cannot have, or too many combinations.
    """
    found: dict[str, tuple[Value, ...]] = {}
    count = 1
    for word in " ".join(texts).split():
        axis, equals, values = word.partition("=")
        if not equals:
            raise RecipeError(f"{word[:80]!r} is no axis", where=WHERE, do=EXAMPLE)
        if axis not in AXES:
            raise RecipeError(f"unknown axis {axis[:80]!r}", where=WHERE, do=hint(axis[:80], AXES, "axes are "))
        if axis in found:
            raise RecipeError(f"{axis} is there twice", where=WHERE, do="write its values with commas")
        found[axis] = tuple(dict.fromkeys(_value(axis, text) for text in values.split(",")))
        count *= len(found[axis])
        if count > MOST_DESIGNS:
            raise RecipeError(f"{count} designs", where=WHERE, do=f"give at most {MOST_DESIGNS}")
    return found


def _value(axis: str, text: str) -> Value:
    where = f"{WHERE} {axis}"
    if axis in WORDS:
        if text not in WORDS[axis]:
            raise RecipeError(f"{text[:80]!r} is none of them", where=where, do=f"give {', '.join(WORDS[axis])}")
        return text
    if axis in QUANTITIES:
        from moeq.estimator.units import parse_quantity

        try:
            amount = parse_quantity(text, QUANTITIES[axis])
        except ValueError as error:
            raise RecipeError(str(error), where=where, do="write 300MHz, or 21GB/s") from None
        if not 0 < amount < float("inf"):
            raise RecipeError(f"{text[:80]!r} is out of reach", where=where, do="give a positive number")
        return amount
    if axis == "widths":
        return _widths(text)
    return _number(text, MOST_NUMBER if axis in PARALLEL else 1 << 20, where)


def _number(text: str, most: int, where: str, least: int = 1) -> int:
    if not (is_number(text, 8) and least <= int(text) <= most):
        raise RecipeError(f"{text[:80]!r} is no whole number from {least} to {most}", where=where, do=EXAMPLE)
    return int(text)


def _widths(text: str) -> tuple[int, int, int]:
    """W/A/Attn."""
    parts = text.split("/")
    if len(parts) != len(LEAST):
        raise RecipeError(f"{text[:80]!r} is no W/A/Attn", where=f"{WHERE} widths", do="write 8/8/4")
    w, a, attention = (
        _number(part, 8, f"{WHERE} widths, {name}", least)
        for part, (name, least) in zip(parts, LEAST.items(), strict=True)
    )
    return w, a, attention


@dataclass(frozen=True, kw_only=True)
class Made:
    """Designs, in the order of the combinations, and what refuses them all: an error where none fits."""

    designs: tuple[Design, ...]
    refused: tuple[str, ...]
    refusal: EstimateError | None


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A vision transformer; known: of an integer forward its widths and registers, None of sizes alone."""

    sizes: VisionSizes
    known: Known | None = None


def read_vision(name: str | None, *, trust_remote_code: bool = False) -> Subject:
    """A vision transformer: a known name, a config.json, a model directory, a hub id, or an integer forward's folder.

    Raises RecipeError without a name, ModelError for one that is not known, is of another kind, or lacks a size,
    ArtifactError for a damaged integer forward.
    """
    from moeq.integers.hardware.vision import KNOWN, from_config, known

    if name is None:
        do = f"give --model {', '.join(KNOWN)}, a config.json or a model's directory"
        raise RecipeError("--kernels needs a vision transformer", where="estimate", do=do)
    if name in KNOWN or not (expanded(name).exists() or "/" in name or name.startswith("bundled:")):
        return Subject(sizes=known(name))
    folder = expanded(name)
    if (folder / MANIFEST).is_file():
        from moeq.integers.forward.saved import read
        from moeq.integers.hardware import from_program

        manifest, program, _ = read(folder)
        try:
            found = from_program.known(program, folder.name if manifest.model is None else manifest.model.name)
        except (KeyError, IndexError, AssertionError, StopIteration, RuntimeError, ZeroDivisionError):
            what, do = "its operations are those of no vision transformer", "write the integer forward again"
            raise ArtifactError(what, where=str(folder), do=do) from None
        return Subject(sizes=found.sizes, known=found)
    from moeq.models.source import open_config

    source = open_config(name, beside=(), trust_remote_code=trust_remote_code)
    return Subject(sizes=from_config(source.config, source.name))


def forward_of(run: Path) -> Path:
    """The integer forward that a run has written, else its checkpoint; RecipeError for a run with several."""
    forward = run / FORWARD
    if not expanded(forward).is_dir():
        return checkpoint_of(run)
    if (expanded(forward) / MANIFEST).is_file():
        return forward
    what = "this run has an integer forward for every task"
    raise RecipeError(what, where=str(run), do=f"name one of them, such as {forward / 'task-0'}")


def designs(subject: Subject, fpga: Device, axes: Mapping[str, Sequence[Value]]) -> Made:
    """A design for every combination of axes; what of the parallelism is left out is the fastest that fits.

    Widths that 32-bit registers do not hold are left out with the reason. EstimateError where none is left, RecipeError
    for widths of an integer forward, which has its own.
    """
    from moeq.integers.hardware.design import fastest

    if subject.known is not None:
        taken = [axis for axis in ("widths", "softmax", "denominator") if axis in axes]
        if taken:
            what = f"an integer forward has its own {taken[0]}"
            raise RecipeError(what, where=WHERE, do="leave it out, or give the model's config.json")
    made: list[Design] = []
    refused: list[str] = []
    for values in product(*axes.values()):
        at: dict[str, Any] = dict(zip(axes, values, strict=True))
        start = _start(subject, fpga, at)
        given = {name: at[name] for name in PARALLEL if name in at}
        try:
            made.append(fastest(start, given))
        except QuantizationError as error:
            refused.append(f"{start.arithmetic.text}, {start.arithmetic.softmax}: {error}")
    if not made:
        raise EstimateError(refused[0], where="--kernels", do="give other widths")
    refusal = made[0].refusal() if all(one.shortage is not None for one in made) else None
    return Made(designs=tuple(made), refused=tuple(refused), refusal=refusal)


def _start(subject: Subject, fpga: Device, at: Mapping[str, Any]) -> Design:
    from moeq.integers.hardware.design import Design
    from moeq.integers.hardware.parts import Parallelism

    changed = {field: at[axis] for axis, field in DEVICE.items() if axis in at}
    known = subject.known
    return Design(
        sizes=subject.sizes,
        arithmetic=_arithmetic(at) if known is None else known.arithmetic,
        at=Parallelism(**dict.fromkeys(PARALLEL, 1)),
        device=replace(fpga, **changed),
        weights=at.get("weights", "streamed"),
        sums={} if known is None else known.sums,
    )


def _arithmetic(at: Mapping[str, Any]) -> Arithmetic:
    from moeq.integers.hardware.parts import Arithmetic

    w, a, attention = at.get("widths", (8, 8, 4))
    words = {name: at[name] for name in ("softmax", "denominator") if name in at}
    return Arithmetic(weights=w, activations=a, attention=attention, **words)


def figures(design: Design, own: Mapping[str, Registers] | None = None) -> dict[str, Any]:
    """A design as JSON: what it is, what it takes, every layer, multiplier and memory, every register's width.

    own: registers of an integer forward's operations, None: of the kernels by sizes alone.
    """
    datapaths = own or design.registers
    totals = {
        "dsps": design.dsps,
        "block_rams": design.block_rams,
        "cycles": design.cycles,
        "worst_routing_cycles": design.worst_cycles,
        "busy_cycles": dict(design.busy_cycles),
        "latency_seconds": design.seconds,
        "images_per_second": design.images_per_second,
        "operations_per_second": design.operations_per_second,
        "macs": design.sizes.macs,
        "does_not_fit": design.shortage,
    }
    stated = {
        "model": asdict(design.sizes),
        "device": asdict(design.device),
        "arithmetic": asdict(design.arithmetic),
        "parallelism": asdict(design.at),
        "weights": design.weights,
    }
    return (
        stated
        | totals
        | {
            "layers": [asdict(one) | {"cycles": one.cycles} for one in design.layers],
            "multipliers": [asdict(one) for one in design.multipliers],
            "memories": [asdict(one) | {"block_rams": one.block_rams} for one in design.memories],
            "registers": {
                name: [
                    {"role": one.role, "bits": one.bits, "low": one.interval.low, "high": one.interval.high,
                     "reached": one.reached}
                    for one in held
                ]
                for name, held in datapaths.items()
            },
        }
    )  # fmt: skip


def paper_runs() -> list[tuple[Any, Design]]:
    """Paper 004's four runs, each with the fastest design within the DSPs and block RAMs that Table 3 prints for it."""
    from moeq.estimator.sheets import printed
    from moeq.estimator.sheets.paper_004 import NAME, runs
    from moeq.integers.hardware.design import device, fastest
    from moeq.integers.hardware.vision import known

    paper, found = printed(NAME), []
    names = {run["row"]: (run["platform"].lower(), run["kernels"]) for run in paper["runs"]}
    used = {name.lower(): platform["used_block_rams"] for name, platform in paper["platforms"].items()}
    for run in runs():
        platform, model = names[run.row.name]
        fpga = replace(device(platform), dsps=run.used_dsps, block_rams=used[platform], clock_hertz=run.clock_hertz)
        found.append((run, fastest(_start(Subject(sizes=known(model)), fpga, {}), {})))
    return found
