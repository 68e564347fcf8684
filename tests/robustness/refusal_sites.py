"""Which `raise` of a MoeqError subclass a refusal came from, of all that stand in moeq."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

import moeq
import moeq_kernels

ROOTS = [Path(package.__file__).parent for package in (moeq, moeq_kernels) if package.__file__ is not None]
Site = tuple[str, int]  # file, from its package on, and first line of the statement


def _named(path: Path) -> str | None:
    """A file from its package on, None for one of others'."""
    root = next((root for root in ROOTS if path.is_relative_to(root)), None)
    return None if root is None else path.relative_to(root.parent).as_posix()


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
    files = [path for root in ROOTS for path in sorted(root.rglob("*.py"))]
    trees = {path: ast.parse(path.read_text("utf-8")) for path in files}
    names = _error_names(list(trees.values()))
    return {
        (str(_named(path)), node.lineno): node.end_lineno or node.lineno
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
    name = _named(Path(trace.tb_frame.f_code.co_filename))
    return None if name is None else (name, trace.tb_lineno)
