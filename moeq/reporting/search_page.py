"""The page of `moeq estimate --speed`: tokens a second against bytes of every point, the front, what was refused."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from moeq.estimator.policies import titled
from moeq.estimator.search import Point, SearchResult
from moeq.reporting import formats, svg
from moeq.reporting.frame import document
from moeq.reporting.html import Drawing, Raw, Section, details, figure, lead, paragraph, table
from moeq.tables import human_bytes

WIDTH, HEIGHT = 760, 420
LEFT, BELOW, ABOVE, RIGHT = 60, 44, 10, 200
HEAD = ("hardware", "policy", "such as", "points")
MOST = 100  # of a policy's points that are not on the front


def render(name: str, searches: Sequence[SearchResult], cases: Sequence[str]) -> str:
    """The page; its bytes depend only on what was found."""
    sections = [
        _section(found, case, f"search-{n}") for n, (found, case) in enumerate(zip(searches, cases, strict=True), 1)
    ]
    text = (
        "Every combination of hardware, experts on the GPU, bits, batch and policy was worked out by a model of the "
        "hardware, not measured; those that do not fit are refused."
    )
    return document(f"{name} · moeq estimate", name, [lead(text)], sections)


def best_text(found: SearchResult) -> str:
    """What keeps most at the speed, in a sentence."""
    speed, best = f"{found.speed:g} tokens a second", found.best
    if best is None:
        fastest = max(found.points, key=lambda point: point.tokens_per_second, default=None)
        if fastest is None:
            return f"Nothing fits at {speed}."
        at_most = f"the fastest that fits gives {formats.number(fastest.tokens_per_second)}"
        return f"Nothing gives {speed}; {at_most}: {_where(fastest, found)}."
    return (
        f"{speed}: {_kept(best)} with {_where(best, found)}, {formats.number(best.tokens_per_second)} tokens a second "
        f"in {human_bytes(best.gpu_bytes)} of GPU memory and "
        f"{human_bytes(best.near_bytes) if best.near_bytes else 'nothing'} beside it."
    )


def asked_text(found: SearchResult) -> str:
    """What was asked about, and whether something is better."""
    if found.asked is None:
        return f"What was asked about ({found.asked_setting}, context_aware) does not fit, or was not measured."
    asked, better = found.asked, found.better_than_asked
    meets = "meets the speed" if asked.meets else "is too slow"
    text = (
        f"What was asked about ({found.asked_setting}, context_aware on {asked.hardware}) gives "
        f"{formats.number(asked.tokens_per_second)} and {meets}"
    )
    if better is None:
        return f"{text}; nothing on the same hardware keeps as much and is faster."
    faster = formats.ratio(better.tokens_per_second / asked.tokens_per_second)
    kept = _kept(better if asked.loss is not None else better.model_copy(update={"loss": None}))
    return f"{text}; {_where(better, found)} keeps no less ({kept}) and is {faster} as fast."


def unpriced_text(found: SearchResult) -> str | None:
    """Hardware of points that meet the speed without a price, where some of it has one: money then decides nothing."""
    meeting = [point for point in found.points if point.meets]
    without = list(dict.fromkeys(point.hardware for point in meeting if point.dollars is None))
    if not without or all(point.dollars is None for point in found.points):
        return None
    return f"Money is no part of the front: no --cost of {', '.join(without)}."


def _kept(point: Point) -> str:
    return f"{point.bits:.2f} bits a weight" if point.loss is None else f"a loss of {point.loss:.3g}"


def _where(point: Point, found: SearchResult) -> str:
    return f"{point.policy} on {point.hardware}, {point.text(found.num_experts)}"


def _section(found: SearchResult, case: str, anchor: str) -> Section:
    shown = [point for point in found.points if point.gpu_bytes > 0]
    label = f"Tokens a second against GPU memory of {len(shown)} points; filled ones are on the front"
    caption = (
        f"Each point is a policy at a setting that fits (of those not on the front about {MOST} a policy). Filled: "
        "those that meet the speed (the line) and are not beaten in speed, bytes on the GPU and beside "
        "it, bits or loss, energy and money together."
    )
    parts: list[Raw] = [
        paragraph(best_text(found), kind="reading"),
        paragraph(asked_text(found), kind="reading"),
        *([paragraph(unpriced, kind="reading")] if (unpriced := unpriced_text(found)) else []),
        *([figure(_drawing(anchor, label, shown, found), caption)] if shown else []),
        _front(found),
        *([details("What was refused", _refused(found))] if found.refused else []),
    ]
    return Section(anchor, case, parts)


def _drawing(name: str, label: str, points: Sequence[Point], found: SearchResult) -> Drawing:
    policies = list(dict.fromkeys(point.policy for point in points))

    def fill(figure: Any) -> None:
        plane = svg.axes(figure, LEFT, BELOW, WIDTH - LEFT - RIGHT, HEIGHT - BELOW - ABOVE)
        for index, policy in enumerate(policies):
            colour, marker = svg.SERIES[index % len(svg.SERIES)], svg.MARKERS[index % len(svg.MARKERS)]
            for on_front in (False, True):
                same = [p for p in points if p.policy == policy and p.on_front == on_front]
                same = same if on_front else same[:: max(1, len(same) // MOST)]
                plane.plot(
                    [p.gpu_bytes / 2**30 for p in same],
                    [p.tokens_per_second for p in same],
                    marker,
                    markersize=5 if on_front else 3,
                    linestyle="none",
                    alpha=1.0 if on_front else 0.45,
                    markerfacecolor=colour if on_front else svg.PAPER,
                    markeredgecolor=colour,
                )
            plane.plot([], [], marker, color=colour, markersize=5, linestyle="none", label=titled(policy).short)
        plane.axhline(found.speed, color=svg.INK, linewidth=1.0, linestyle="--")
        plane.set(yscale="log", xlabel="GPU memory, GiB", ylabel="tokens a second of a sequence")
        plane.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        plane.yaxis.set_minor_formatter(lambda value, _: "")
        plane.set_xlim(left=0)
        plane.grid()
        plane.legend(loc="upper left", bbox_to_anchor=(1.01, 1.0), borderaxespad=0.0)

    return svg.draw(name, label, WIDTH, HEIGHT, fill)


def _front(found: SearchResult) -> Raw:
    rows = found.front
    columns: dict[str, Callable[[Point], str]] = {
        "hardware": lambda point: point.hardware,
        "policy": lambda point: titled(point.policy).short,
        "experts, code bits": lambda point: point.short(found.num_experts),
        "batch": lambda point: str(point.batch),
        "tokens/s": lambda point: formats.number(point.tokens_per_second),
        "of the batch": lambda point: formats.number(point.all_tokens_per_second),
        "bits": lambda point: f"{point.bits:.2f}",
        "GPU": lambda point: human_bytes(point.gpu_bytes),
        "beside it": lambda point: human_bytes(point.near_bytes),
    }
    for field, title in (("loss", "loss"), ("joules", "J/token"), ("dollars", "$ a million")):
        if any(getattr(point, field) is not None for point in rows):
            columns[title] = partial(_known, field)
    return table(
        f"What gives {found.speed:g} tokens a second of every sequence and is not beaten, the fastest first. Experts: "
        "those on the GPU first, times their code bits; bits: mean stored bits of a weight that experts compute with.",
        list(columns),
        [tuple(cell(point) for cell in columns.values()) for point in rows],
        texts=3,
    )


def _known(field: str, point: Point) -> str:
    value = getattr(point, field)
    return formats.MISSING if value is None else formats.number(value)


def _refused(found: SearchResult) -> Raw:
    rows = [
        (row.hardware, titled(row.policy).short, row.example, f"{row.points:,}")
        for row in sorted(found.refused, key=lambda row: -row.points)
    ]
    return table(
        "Points that do not fit, and why the first of them does not.",
        HEAD,
        rows,
        texts=3,
    )
