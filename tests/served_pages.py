"""The tables of docs/served.json in the documentation: what every runtime makes of every family and mix."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from moeq.artifacts.targets import targets

KEPT = Path(__file__).parents[1] / "docs" / "served.json"
PLAIN = "unquantized"
RIGHT, WRONG, REFUSED, FAILS, NOT_RUN = "right", "wrong", "refused", "fails", "not run"
EXACT = 1e-4  # nats: a runtime that is held to more than that rounds activations, which may send a token elsewhere
Cells = dict[str, dict[str, dict[str, Any]]]  # {family: {mix: cell}}


def kept() -> dict[str, dict[str, Any]]:
    """{reader: what the file has of it}."""
    found: dict[str, dict[str, Any]] = json.loads(KEPT.read_text("utf-8"))
    return found


def number(value: float) -> str:
    """In as few characters as say it."""
    if value == 0:
        return "0"
    return f"{value:.0e}".replace("e-0", "e-") if value < 0.005 else f"{value:.2f}".removeprefix("0")


def right(bound: float, *cells: dict[str, Any]) -> str:
    """How right cells of readers are that are held to so many nats: the largest error of any log-probability, or, of
    those that round activations, the largest divergence."""
    what, mark = ("error", "") if bound <= EXACT else ("divergence", "KL ")
    return f"right ({mark}{number(max(one[what] for one in cells))})"


class Said:
    """Sentences, numbered as they come."""

    def __init__(self) -> None:
        self.numbers: dict[str, int] = {}

    def number(self, sentence: str) -> int:
        return self.numbers.setdefault(sentence, len(self.numbers) + 1)

    def lines(self) -> Iterator[str]:
        for sentence, number in self.numbers.items():
            yield f"{number}. {sentence}"


def cell(found: dict[str, Any], said: Said, bound: float) -> str:
    """One cell of the whole table."""
    verdict = found["verdict"]
    if verdict == RIGHT:
        return right(bound, found)
    return f"{verdict} ({said.number(found['said'])})" if "said" in found else verdict


def header(columns: list[str], *first: str) -> list[str]:
    titles = [*first, *columns]
    return [f"| {' | '.join(titles)} |", "|---" * len(titles) + "|"]


def whole() -> str:
    """Every reader, family and mix; the sentences; the versions."""
    readers, said = kept(), Said()
    lines: list[str] = []
    for given in (False, True):
        some = {name: one for name, one in readers.items() if one["given"] == given and one["cells"]}
        if not some:
            continue
        mixes = list(next(iter(next(iter(some.values()))["cells"].values())))
        lines += ["Given to a runtime that another was meant to be:", ""] if given else []
        lines += header(mixes, "for", "read by", "family")
        for name, one in some.items():
            for number, (family, row) in enumerate(one["cells"].items()):
                start = [f"`{one['runtime']}`", name] if number == 0 else ["", ""]
                lines.append(
                    f"| {' | '.join([*start, family, *(cell(row[mix], said, one['bound']) for mix in mixes)])} |"
                )
        lines.append("")
    return "\n".join([*lines, *said.lines(), "", *versions(readers), ""])


def versions(readers: dict[str, dict[str, Any]]) -> Iterator[str]:
    """What computed, in which type, by the names of readers."""
    yield from header(["computes in", "right within, nats", "versions"], "read by")
    for name, one in readers.items():
        if not one["given"]:
            listed = ", ".join(f"{package} {version}" for package, version in one["versions"].items())
            yield f"| {name} | {one['computes']} | {one['bound']:g} | {listed or 'not run'} |"


def asked_by(runtime: str, iq: str = "") -> str:
    """What a run gives, or for values as they are `moeq convert`, where `--for` takes what rounds scales."""
    target = targets().get(runtime)
    if iq:
        return f"`--for {runtime}`"
    of = [name for name, one in targets().items() if one.rounded == runtime]
    if target is not None and target.rounded:
        return f"`--to {runtime}`"
    return ", ".join([*(f"`--for {name}` in grids" for name in of), f"`--for {runtime}`"])


def short() -> str:
    """A row for readers of one runtime that agree; families: those that are right in some mix."""
    rows: dict[tuple[str, ...], list[str]] = {}
    mixes: list[str] = []
    for name, one in kept().items():
        if one["given"]:
            continue
        cells: Cells = one["cells"]
        mixes = [mix for mix in next(iter(cells.values())) if mix != PLAIN]
        able = [family for family, row in cells.items() if any(row[mix]["verdict"] == RIGHT for mix in mixes)]
        row = (
            asked_by(one["runtime"], one.get("iq", "")),
            ", ".join(able),
            *(in_short(cells, able, mix, one["bound"]) for mix in mixes),
        )
        rows.setdefault(row, []).append(name)
    lines = header(mixes, "asked for by", "read by", "families")
    for (runtime, able, *found), names in rows.items():
        lines.append(f"| {' | '.join([runtime, ', '.join(names), able, *found])} |")
    return "\n".join(lines) + "\n"


def in_short(cells: Cells, able: list[str], mix: str, bound: float) -> str:
    """What most of the families have to say of a mix: of those that are right in some, or of all."""
    found = [row[mix] for family, row in cells.items() if family in able or not able]
    verdicts = {one["verdict"] for one in found}
    if verdicts == {RIGHT}:
        return right(bound, *found)
    return next(iter(verdicts)) if len(verdicts) == 1 else "in part" if RIGHT in verdicts else NOT_RUN
