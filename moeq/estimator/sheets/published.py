"""Published figures beside the estimator's: each in or out of an error that was stated before it was worked out."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from moeq.estimator.capacity import largest_gpu_experts
from moeq.estimator.devices import Hardware
from moeq.estimator.estimate import estimate
from moeq.estimator.geometry import ModelGeometry, load_geometry
from moeq.estimator.hardware import load_hardware
from moeq.estimator.placement import uniform_placement
from moeq.estimator.result import Estimate
from moeq.estimator.sheets import Row, Table, filled, paper_002, paper_004, printed
from moeq.estimator.workload import Grid, zipf_popularity

NAME = "published"
GRID = Grid(inputs=(128, 512, 2048), outputs=(512, 2048))  # paper 000's
FITTED = ("gpu.layer_overhead", "link.bandwidth", "policies.hobbit.high_precision_fraction")
WORDS = {
    "speedup": "decode over {over}",
    "request": "whole request over {over}, {which}",
    "tokens": "decode, tokens/s",
    "step": "decode, s a token",
    "first": "first token of {input}, s",
    "share": "DynaExq of static {low} bits",
    "bytes": "GiB of the model",
    "mean": "tokens/s of whole requests, mean",
    "sheet": "{what}",
}
LENGTHS = Grid(inputs=(16, 32, 64, 128), outputs=(16, 32, 64, 128, 256, 512))  # Fiddler's


@dataclass(frozen=True, kw_only=True)
class Held:
    """A printed figure and the estimate; off: the estimate's distance as a share of what is printed."""

    point: Mapping[str, Any]
    estimate: float
    error: float | None

    @property
    def off(self) -> float:
        """How far the estimate is from what is printed; of a least figure how far below, 0 above."""
        off = self.estimate / float(self.point["printed"]) - 1
        return min(off, 0.0) if self.point.get("at_least") else off

    @property
    def within(self) -> bool:
        """Whether it is within the stated error, or at least as large as printed."""
        return abs(self.off) <= (self.error or 0.0)

    @property
    def fitted(self) -> bool:
        """Whether constants were fitted to it."""
        return self.point.get("error") == "paper" or bool(self.point.get("fitted"))

    @property
    def group(self) -> str:
        """What the table's errors are told apart by."""
        return "fitted" if self.fitted else "recomputed" if self.point.get("error") == "recomputed" else "other"


def tables() -> list[Table]:
    """The table, with what could not be worked out."""
    held = points()
    left = [point for point in printed(NAME)["points"] if point["kind"] == "none"]
    figures: dict[str, Any] = {}
    for name in ("fitted", "recomputed", "other"):
        errors = [abs(each.off) for each in held if each.group == name]
        figures |= {f"{name}_points": len(errors), f"{name}_median": statistics.median(errors)}
        figures[f"{name}_worst"] = max(errors)
    figures |= {"within": sum(each.within for each in held), "worked_out": len(held), "left": len(left)}
    rows = [*map(_row, range(1, len(held) + 1), held), *_left_out(left, len(held))]
    return filled(NAME, {"points": rows}, fitted=", ".join(FITTED), **figures)


@cache
def points() -> tuple[Held, ...]:
    """Every printed figure that can be worked out."""
    tree = printed(NAME)
    of_models = ((point, _worked_out(point)) for point in tree["points"] if point["kind"] != "none")
    return tuple(
        Held(point=point, estimate=estimate, error=tree["errors"].get(point.get("error")))
        for point, estimate in (*of_models, *_of_sheets())
    )


def _of_sheets() -> Iterator[tuple[dict[str, Any], float]]:
    """What papers 002 and 004 print, and what their sheets make of it."""
    name, table = "paper 002, Table", printed(paper_002.NAME)["table_1"]
    for kernel in paper_002.kernels():
        for active, given in zip(table["active_experts"], kernel.speedup, strict=True):
            fitted = active in table["fitted_on"]
            setting = f"{kernel.name}, {active} active experts{', fitted' if fitted else ''}"
            point = _sheet_point("GEMM over FP16", setting, given, "gemm", f"{name} 1")
            yield {**point, "fitted": fitted}, paper_002.fitted().speedup(kernel, active)
        mean = statistics.geometric_mean(kernel.speedup)
        yield _sheet_point("geometric mean over FP16", kernel.name, kernel.geomean, "recomputed", f"{name} 1"), mean
    for row in paper_002.deployments():
        setting = f"{row.parameters_billions:g}e9 parameters, batch {row.batch}, {row.hardware}"
        given = row.usd_per_month_and_word_per_second
        yield _sheet_point("USD a month per word/s", setting, given, "recomputed", f"{name} 4"), row.cost
    shapes = paper_004.models()
    for each in paper_004.accelerators().values():
        source = f"paper 004, {each.source}"
        if each.work_gop is not None and each.model is not None:
            work = shapes[each.model].operations / 1e9
            yield _sheet_point("GOP of a frame", each.name, each.work_gop, "recomputed", source), work
        yield _sheet_point("GOPS a watt", each.name, each.gops_per_watt, "recomputed", source), each.efficiency


def _sheet_point(what: str, setting: str, given: float, error: str, source: str) -> dict[str, Any]:
    return {"kind": "sheet", "what": what, "setting": setting, "printed": given, "error": error, "source": source}


def _row(number: int, held: Held) -> Row:
    point = held.point
    at_least = bool(point.get("at_least"))
    return (
        number,
        WORDS[point["kind"]].format(**point),
        _setting(point),
        point.get("hardware"),
        f"at least {point['printed']:g}" if at_least else float(point["printed"]),
        held.estimate,
        round(100 * held.off, 1),
        None if held.error is None else round(100 * held.error),
        "in" if held.within else "out",
        point["source"],
    )


def _left_out(left: list[Mapping[str, Any]], before: int) -> Iterator[Row]:
    for number, point in enumerate(left, before + 1):
        verdict = f"not worked out: {point['reason']}"
        yield (number, point["what"], "", None, None, None, None, None, verdict, point["source"])


def _setting(point: Mapping[str, Any]) -> str:
    if "setting" in point:
        return str(point["setting"])
    bits = point.get("bits", point.get("high", 16))
    text = f"{point['model']}, {bits:g} bits"
    if point["kind"] == "share":
        text = f"{point['model']}, {point['high']:g} over {point['low']:g} bits, {point.get('routing', 'uniform')}"
    return f"{text}, {point['gpu_experts']} on the GPU" if "gpu_experts" in point else text


def _worked_out(point: Mapping[str, Any]) -> float:
    kind, geometry = point["kind"], load_geometry(point["model"])
    if kind == "bytes":
        experts = geometry.num_layers * geometry.num_experts * geometry.expert_bytes(point["bits"], None)
        return float(experts + geometry.non_expert_bytes) / 2**30
    if kind == "share":
        return _share(point, geometry)
    made = _estimate(point, geometry)
    policy = point.get("policy", "context_aware")
    if kind == "speedup":
        return made.speedups_over(point["over"], batch=1)[0].decode
    if kind == "request":
        ratios = [row.end_to_end for row in made.speedups_over(point["over"], batch=1)]
        return min(ratios) if point["which"] == "least" else max(ratios)
    if kind == "mean":
        own = [each for each in made.points if each.policy == policy]
        return statistics.mean(each.output_tokens / each.end_to_end_seconds for each in own)
    first = next(each for each in made.points if each.policy == policy)
    if kind == "first":
        return first.time_to_first_token_seconds
    return first.decode_seconds_per_token if kind == "step" else first.decode_tokens_per_second


def _estimate(point: Mapping[str, Any], geometry: ModelGeometry) -> Estimate:
    hardware = load_hardware(point["hardware"])
    if "cache" in point:
        hardware = _caching(hardware, geometry, point["cache"])
    one = Grid(inputs=(point.get("input", 128),), outputs=(128,))
    grid = {"speedup": GRID, "request": GRID, "mean": LENGTHS}.get(point["kind"], one)
    policy = point.get("policy", point.get("over"))
    return estimate(
        geometry,
        hardware,
        uniform_placement(geometry, bits=point.get("bits", 16), hot_experts=_hot(point, geometry, hardware)),
        group_size=128 if "gpu_experts" in point else None,
        policies=(policy,),
        grid=grid,
        context=point.get("context", 1024),
        changes=False,
    )


def _hot(point: Mapping[str, Any], geometry: ModelGeometry, hardware: Hardware) -> int:
    """Experts of a layer on the GPU: as stated, or as many as fit where a system's own choice is that."""
    if point["kind"] != "mean":
        return int(point.get("gpu_experts", 0))
    return largest_gpu_experts(geometry, hardware, batch=1, context=1024, stored_bits=16) or 0


def _caching(hardware: Hardware, geometry: ModelGeometry, share: float) -> Hardware:
    """With a cache of FP16 experts in what a share of GPU memory leaves beside all else, and nothing skipped."""
    room = share * hardware.all_gpus.memory_capacity_bytes - geometry.non_expert_bytes
    places = int(room // (geometry.num_layers * geometry.expert_bytes(16, None)))
    hobbit: dict[str, float | str] = {"cached_experts": max(0, places), "high_precision_fraction": 1.0}
    return hardware.model_copy(update={"policies": {**hardware.policies, "hobbit": hobbit}})


def _share(point: Mapping[str, Any], geometry: ModelGeometry) -> float:
    """Decode throughput of DynaExq over that of all experts at its low width."""
    hardware = load_hardware(point["hardware"])
    widths: dict[str, float | str] = {
        "high_precision_bits": point["high"],
        "low_precision_bits": point["low"],
    }
    hardware = hardware.model_copy(update={"policies": {**hardware.policies, "dynaexq": widths}})
    popularity = zipf_popularity(geometry.num_experts, 1.0) if point.get("routing") == "zipf" else None
    made = estimate(
        geometry,
        hardware,
        uniform_placement(geometry, bits=point["low"], hot_experts=0),
        popularity=popularity,
        policies=("dynaexq", "static_mixed"),
        grid=Grid(inputs=(128,), outputs=(128,)),
        changes=False,
    )
    steps = {each.policy: each.decode_seconds_per_token for each in made.points}
    return steps["static_mixed"] / steps["dynaexq"]
