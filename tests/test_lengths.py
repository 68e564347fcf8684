"""No file of the program is longer than 450 lines, and no function longer than 60."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FILES = [
    path.relative_to(ROOT).as_posix()
    for room in ("moeq", "moeq-kernels", "benchmarks")
    for path in sorted((ROOT / room).rglob("*.py"))
]
MOST_OF_A_FILE, MOST_OF_A_FUNCTION = 450, 60
COMPILERS = {"jit", "njit", "compiler", "internal"}  # Triton's, numba's and those of moeq_kernels.cpu.kept_code


def too_long(source: str) -> Iterator[str]:
    """Functions of a module that are too long, kernels apart.

    A compiled kernel is one loop over what lies in registers: parts of it cannot become functions of their own without
    handing all of that on, or being compiled into it anyway.
    """
    module = ast.parse(source)
    compilers = COMPILERS | {
        name.id
        for node in module.body
        if isinstance(node, ast.Assign) and name_of(node.value) in COMPILERS
        for name in node.targets
        if isinstance(name, ast.Name)
    }
    for node in ast.walk(module):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or node.end_lineno is None:
            continue
        first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
        lines = node.end_lineno - first + 1
        if lines > MOST_OF_A_FUNCTION and not any(name_of(one) in compilers for one in node.decorator_list):
            yield f"{node.name}: {lines} lines"


def name_of(expression: ast.expr) -> str:
    """The last name of what is called or named: njit of `numba.njit(cache=True)`."""
    if isinstance(expression, ast.Call):
        return name_of(expression.func)
    return expression.attr if isinstance(expression, ast.Attribute) else getattr(expression, "id", "")


@pytest.mark.cases(106)
@pytest.mark.parametrize("file", FILES)
def test_no_file_and_no_function_is_too_long(file: str) -> None:
    source = (ROOT / file).read_text("utf-8")
    assert len(source.splitlines()) <= MOST_OF_A_FILE
    assert not list(too_long(source))


@pytest.mark.parametrize("decorator", ["njit", "numba.njit(cache=True)", "triton.jit", "compiled"])
def test_what_is_too_long_is_found_and_kernels_are_none_of_it(decorator: str) -> None:
    function = "def f():\n" + "    x = 0\n" * MOST_OF_A_FUNCTION
    assert list(too_long(function)) == [f"f: {MOST_OF_A_FUNCTION + 1} lines"]
    assert not list(too_long(function.removesuffix("    x = 0\n")))
    assert list(too_long("class A:\n    @cache\n" + "".join(f"    {line}\n" for line in function.splitlines()[:-1])))
    assert not list(too_long(f"compiled = njit(nogil=True)\n\n@{decorator}\n{function}"))
