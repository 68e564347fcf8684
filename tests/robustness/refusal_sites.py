"""Which `raise` of a MoeqError subclass a refusal came from, of all that stand in moeq."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

import moeq

ROOT = Path(moeq.__file__).parent
Site = tuple[str, int]  # file below moeq, first line of the statement


def _called(node: ast.expr | None) -> str:
    """The last name of what an expression calls."""
    called = node.func if isinstance(node, ast.Call) else None
    return getattr(called, "attr", None) or getattr(called, "id", "")


def _error_names(trees: list[ast.Module]) -> set[str]:
    """MoeqError and its subclasses, and the functions that return one."""
    found, before = {"MoeqError"}, 0
    nodes = [node for tree in trees for node in ast.walk(tree)]
    while len(found) > before:
        before = len(found)
        for node in nodes:
            if isinstance(node, ast.ClassDef):
                bases = {getattr(base, "attr", None) or getattr(base, "id", "") for base in node.bases}
                found |= {node.name} if bases & found else set()
    makers = (node for node in nodes if isinstance(node, ast.FunctionDef) and node.returns is not None)
    return found | {node.name for node in makers if ast.unparse(node.returns or node) in found}


def all_sites() -> dict[Site, int]:
    """Every raise of moeq's errors, with its last line."""
    trees = {path: ast.parse(path.read_text("utf-8")) for path in sorted(ROOT.rglob("*.py"))}
    names = _error_names(list(trees.values()))
    return {
        (path.relative_to(ROOT).as_posix(), node.lineno): node.end_lineno or node.lineno
        for path, tree in trees.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Raise) and _called(node.exc) in names
    }


def raised_at(error: BaseException | None, sites: dict[Site, int]) -> Iterator[Site]:
    """The sites that an error, and those that it came from, was raised at."""
    while error is not None:
        place = _innermost(error.__traceback__)
        if place is not None:
            file, line = place
            yield from (
                (name, first) for (name, first), last in sites.items() if name == file and first <= line <= last
            )
        error = error.__cause__ or error.__context__


def _innermost(trace: TracebackType | None) -> Site | None:
    """Where in moeq an error was raised."""
    if trace is None:
        return None
    while trace.tb_next is not None:
        trace = trace.tb_next
    path = Path(trace.tb_frame.f_code.co_filename)
    return (path.relative_to(ROOT).as_posix(), trace.tb_lineno) if path.is_relative_to(ROOT) else None
