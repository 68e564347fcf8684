"""Runtimes: what loads the checkpoints that moeq writes, each by its one name, with the format that is written for it.

The one list of names that `--for`, `--target`, `--format`, `--to`, `assign.target` and `export.formats` take. A runtime
is called as the target that an exporter declares, or as the exporter that declares none. The names of formats stand in
files, and in recipes of earlier moeqs: each is told as what it is called now.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from moeq.errors import MoeqError, RecipeError, nearest
from moeq.registry import EXPORTERS, LONGEST, NATIVE_FORMAT

NATIVE = "native"  # the runtime whose format a run always writes
ONNX, QONNX, W8A8 = "onnx", "qonnx", "compressed-tensors-w8a8"
OF_FOLDED = (ONNX, W8A8)  # formats of what `moeq reparam` makes: --format and export.formats take them, too


@dataclass(frozen=True, kw_only=True)
class Runtime:
    """exporter: an `exporters.exporter.Exporter`, what writes for it; target: an `artifacts.targets.Target`, what it
    loads of that; None: plain weights. before: what it was called in `export.formats`, and is in keys of stages."""

    name: str
    exporter: Any
    target: Any
    before: str


def runtimes() -> dict[str, Runtime]:
    """Every runtime by its name, the native one first, those of other packages last."""
    found: dict[str, Runtime] = {}
    for exporter in sorted(EXPORTERS, key=lambda one: one.name != NATIVE_FORMAT):
        before = exporter.name
        for target in exporter.targets or (None,):
            name = exporter.name if target is None or target.name in found else target.name
            if name not in found:
                called = target if target is None or target.name == name else replace(target, name=name)
                found[name] = Runtime(name=name, exporter=exporter, target=called, before=before)
                before = ""
    return {name: one if one.before else replace(one, before=name) for name, one in found.items()}


def runtime(name: str) -> Runtime:
    """The runtime of a name, or of a format's; RecipeError where there is none."""
    return runtimes()[named(name)]


def written() -> tuple[str, ...]:
    """Names of the runtimes whose formats are made of the native one."""
    return tuple(one.name for one in runtimes().values() if one.exporter.name != NATIVE_FORMAT)


def formats() -> dict[str, str]:
    """{name of a format: the first runtime that reads it}, but for formats that are called as their runtime."""
    known = runtimes()
    return {one.before: name for name, one in known.items() if one.before not in known}


def of_method(method: str) -> Any:
    """The exporter of checkpoints whose config.json names this quant_method, `dequantized` where it names none; None
    where there is none."""
    return next((one for one in EXPORTERS if method in (one.methods or (one.name,))), None)


def to_convert(path: object, declared: Mapping[str, Any], name: str, makes: str) -> str:
    """What becomes of a packed checkpoint where one for the runtime `name` is wanted, for a message.

    declared: what its config.json says of its quantization.
    """
    if not _is_read(declared):
        return "moeq does not read this format, but the tool that packed it may write it dequantized"
    return f"moeq convert {path} --to {name} --out OTHER makes {makes} of it"


def _is_read(declared: Mapping[str, Any]) -> bool:
    """Whether an exporter reads what is packed as a configuration declares."""
    exporter = of_method(str(declared.get("quant_method", "unknown")))
    if exporter is None or exporter.layout is None:
        return exporter is not None and exporter.opened is not None
    refuses = (ValueError, KeyError, TypeError, AttributeError)
    try:
        with EXPORTERS.blaming(exporter.name, lambda: "layout()", refuses):
            exporter.layout(declared)
    except refuses:
        return False
    return True


def named(word: str, known: Collection[str] | None = None, where: str | None = None) -> str:
    """The runtime that a word names; one of a format is told, once, with what it is called now.

    known: what may be named here, None: every runtime. RecipeError with the nearest name for any other word.
    """
    names = [*(runtimes() if known is None else known)]
    if word in names:
        return word
    alias = formats().get(word)
    if alias in names:
        _tell(word, alias)
        return alias
    raise _refused(word, names, where)


def _refused(word: str, names: Iterable[str], where: str | None) -> MoeqError:
    """The error for a word that names no runtime, or none that fits."""
    if word in EXPORTERS.names() and EXPORTERS.find(word) is None:  # another package's, which cannot be used
        return EXPORTERS.refused(word, names, where=where)
    listed, aliases = [*names], formats()
    if aliases.get(word, word) in runtimes():
        return RecipeError(f"{word} cannot be named here", where=where, do=f"use one of {', '.join(listed)}")
    near = nearest(word.lower(), [*listed, *(name for name, now in aliases.items() if now in listed)])
    do = f"did you mean {aliases.get(near, near)!r}?" if near else f"use one of {', '.join(listed)}"
    return RecipeError(f"unknown runtime {word[:LONGEST]!r}", where=where, do=do)


@cache
def _tell(word: str, now: str) -> None:
    """Say on standard error what a format's name is called now, and who else reads the format."""
    exporter = runtimes()[now].exporter
    others = [one.name for one in runtimes().values() if one.exporter is exporter and one.name != now]
    more = f" (also read by {', '.join(others)})" if others else ""
    print(f"{word} is called {now} now{more}", file=sys.stderr)
