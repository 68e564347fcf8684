"""The options of `moeq estimate`."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Self

from typer import Argument

from moeq.errors import RecipeError
from moeq.estimation import kernels
from moeq.folders import is_run
from moeq.options import RunOptions, among, option
from moeq.registry import POLICIES

ALL = "all"  # hardware, of a search
APART = "of an estimate without a run"


def hardware_presets() -> list[str]:
    """Hardware by name, for a shell that asks."""
    from moeq.estimator import known_hardware

    return known_hardware()


def geometries() -> list[str]:
    """Models by name whose sizes are known, for a shell that asks."""
    from moeq.estimator import known_geometries

    return known_geometries()


def sheets() -> list[str]:
    """Sheets by name, for a shell that asks."""
    from moeq.estimator.sheets import known_sheets

    return known_sheets()


@dataclass(frozen=True, kw_only=True)
class EstimateOptions(RunOptions):
    """The command line of `moeq estimate`; recipe: its path, and axes that stand behind --grid's first."""

    recipe: Annotated[
        list[str],
        Argument(
            metavar="RECIPE|RUN",
            help="YAML recipe [default: the one in the run directory], or a run's directory; more axes of --grid.",
        ),
    ] = field(default_factory=list)
    model: str | None = option(
        "Without a recipe: mixtral-8x7b or another known geometry, a config.json, a model directory, a packed "
        "checkpoint, or a hub id; no weights are read.",
        autocompletion=among(geometries),
    )
    out: Path | None = option(
        "Run directory [default: moeq-out/NAME of the recipe]; without a run, where estimate.json, the page and the "
        "timeline go [default: nowhere]."
    )
    hardware: list[str] = option(
        "Preset or YAML file (estimate.hardware) [default: paper-ctxmoe]; with --model several, which are compared; "
        "with --speed all: every preset.",
        default=list,
        sets="estimate.hardware",
        autocompletion=among(hardware_presets),
    )
    assignment: Path | None = option("assignment.json: code bits and place of every expert.", APART)
    manifest: Path | None = option("placement.json of a packed checkpoint, or its directory.", APART)
    trace: Path | None = option(
        "trace.safetensors of `moeq profile` (profile.trace): routing as it was recorded.", APART
    )
    bits: float | None = option("Code bits of every expert off the GPU [default: 3].", APART)
    gpu_experts: int | None = option("Experts a layer on the GPU [default: as many as fit].", APART, min=0)
    gpu_bits: float = option("Code bits of the experts on the GPU; 16: FP16.", APART, default=16.0)
    group_size: int | None = option("Weights that share a scale, with --bits [default: 128].", APART, min=1)
    policy: list[str] = option(
        "Policy that is shown beside the context-aware placement and both MoNDE baselines; may be given several times "
        "[default: all].",
        APART,
        default=list,
        autocompletion=among(POLICIES.names),
    )
    grid: list[str] = option("Lengths and batches: --grid in=128,512,2048 out=512,2048 batch=1,4,16", default=list)
    context: int | None = option(
        "Tokens of keys and values at a decode step [default: 1024].", sets="estimate.context", min=1
    )
    rate: float | None = option(
        "Requests a second that arrive at random, of the first lengths of --grid: waiting, batches and quantiles of a "
        "server that batches continuously.",
        APART,
    )
    cache_bits: float = option(
        "Bits of an element of keys and values, as caches of 8 and 4 bits have them.", APART, default=16.0
    )
    other_bits: float | None = option(
        "Bits of a weight of all but the experts [default: as a packed checkpoint stores them, else 16].", APART
    )
    kv_growth: bool = option("Keys and values grow with the request instead of --context.", APART, default=False)
    zipf: float | None = option("Exponent of Zipf routing, the placement's best experts the most popular.", APART)
    samples: int | None = option(
        "Monte Carlo samples of routing that is not enumerated [default: 256].", APART, min=2, max=65536
    )
    replicas: str | None = option(
        "Widths at which the near-data side keeps every expert beside FP16, or none [default: 1,2,3,4].", APART
    )
    speed: str | None = option(
        "Search hardware, experts on the GPU, bits, batches of --grid and policies for what gives every sequence so "
        "many tokens a second, such as 20tok/s.",
        APART,
    )
    memory: str | None = option("With --speed: of the GPU's memory no more than this, such as 24GiB.", APART)
    cost: list[str] = option(
        "With --speed: dollars an hour of a hardware, such as h100-ndp-cxl=3.2; may be given several times.",
        APART,
        default=list,
    )
    losses: Path | None = option(
        "With --speed: a run whose measured losses say what each setting costs in quality; its scales are counted.",
        APART,
    )
    capacity: bool = option("Only say what fits where; refused with the sum where it does not.", APART, default=False)
    sheet: str | None = option(
        "Print a paper's figures worked out again: paper-002 or paper-004; or published: those of papers and other "
        "systems.",
        APART,
        autocompletion=among(sheets),
    )
    kernels: str | None = option(
        "Cycles, DSPs, block RAMs and datapath widths of paper 004's two kernels on an FPGA, zcu102 or u280, for a "
        "vision transformer (--model vit-tiny, vit-small, vit-base, m3vit-tiny, m3vit-small, a config.json, a "
        "model's directory, an integer forward's or its run); paper-004: beside what it prints.",
        APART,
        autocompletion=among(lambda: ("zcu102", "u280", "paper-004")),
    )
    design: list[str] = option(
        "With --kernels: widths=8/8/4,4/8/4 softmax=log-sqrt2,log2 queries=16 units=4 clock=300MHz; the parallelism "
        "that is left out is the fastest that fits.",
        APART,
        default=list,
    )
    fit: Path | None = option(
        "CSV of measured points (policy, batch, lengths, seconds): fit efficiencies and latencies of the hardware; "
        "--out takes the fitted YAML.",
        APART,
    )

    def in_its_run(self) -> Self:
        if not self.recipe or not is_run(Path(self.recipe[0])):
            return self
        return self.with_run(Path(self.recipe[0]), recipe=self.recipe[1:])

    @property
    def axes(self) -> list[str]:
        """Every word of --grid."""
        return [*self.grid, *filter(_is_axis, self.recipe)] if self.grid else []

    @property
    def design_axes(self) -> list[str]:
        """Every word of --design."""
        return [*self.design, *filter(kernels.is_axis, self.recipe)] if self.design else []

    @property
    def recipe_path(self) -> Path | None:
        """The one word that is no axis; RecipeError for more of them."""
        others = [
            word
            for word in self.recipe
            if not (self.grid and _is_axis(word)) and not (self.design and kernels.is_axis(word))
        ]
        if len(others) > 1:
            raise RecipeError(f"unexpected argument {others[1]!r}", where="estimate", do="give one recipe")
        return Path(others[0]) if others else None

    @property
    def one_hardware(self) -> str | None:
        """The hardware that is named; RecipeError for several."""
        if len(self.hardware) > 1:
            what = f"{len(self.hardware)} times --hardware"
            compared = "" if self.model is not None else ", or several with --model, to compare them"
            raise RecipeError(what, where="estimate", do=f"give one of them{compared}")
        return self.hardware[0] if self.hardware else None

    def changes(self) -> list[str]:
        named = self.one_hardware
        others = replace(self, hardware=[])
        return [*others._changes(), *([] if named is None else [f"estimate.hardware={named}"])]

    def _changes(self) -> list[str]:
        """Those of all options but --hardware."""
        if not self.axes:
            return super().changes()
        from moeq.estimation.grids import AXES, parse_grid

        grid = parse_grid(self.axes)
        return [*super().changes(), *(f"estimate.grid.{axis}={list(getattr(grid, axis))}" for axis in AXES.values())]


def _is_axis(word: str) -> bool:
    """Whether a word is one axis with its sizes, such as in=128,512."""
    from moeq.estimation.grids import AXES

    axis, equals, _ = word.partition("=")
    return bool(equals) and axis in AXES
