"""Public functions of tensors and arrays say which shapes they take and give, in letters that their file explains."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import moeq

ROOT = Path(moeq.__file__).parent
FILES = sorted(
    path for package in ("numerics", "quantizers", "integers/arithmetic") for path in (ROOT / package).glob("*.py")
)
ARRAYS = re.compile(r"\b(Tensor|ndarray|NDArray|Ints|Floats)\b")
SHAPE = re.compile(r"\[[^\[\]]+\]|\bscalar|\bany shape|\bshape of|\belementwise")
LETTERS = re.compile(r"\b[A-Za-z]\b")


def functions(tree: ast.Module) -> Iterator[tuple[str, ast.FunctionDef]]:
    """Public functions, and public methods of public classes."""
    for node in tree.body:
        inside = node.body if isinstance(node, ast.ClassDef) else [node]
        before = f"{node.name}." if isinstance(node, ast.ClassDef) else ""
        for function in inside:
            if isinstance(function, ast.FunctionDef) and not any(part[:1] == "_" for part in (before, function.name)):
                yield before + function.name, function


def of_arrays(function: ast.FunctionDef) -> bool:
    arguments = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
    annotations = [function.returns, *(argument.annotation for argument in arguments)]
    return any(ARRAYS.search(ast.unparse(annotation)) for annotation in annotations if annotation is not None)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_docstrings_name_shapes(path: Path) -> None:
    tree = ast.parse(path.read_text())
    legend = set(LETTERS.findall(ast.get_docstring(tree) or ""))
    lacking = {}
    for name, function in functions(tree):
        shapes = SHAPE.findall(ast.get_docstring(function) or "")
        unknown = {letter for shape in shapes if shape[0] == "[" for letter in LETTERS.findall(shape)} - legend
        if of_arrays(function) and (unknown or not shapes):
            lacking[name] = f"letters that the file does not explain: {sorted(unknown)}" if shapes else "no shape"
    assert lacking == {}
