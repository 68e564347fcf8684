"""How a mark on a tensor passes through operations that move, join or copy rows and leave channels alone.

Letters: D channels of a norm, along the marked dimension.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Mark:
    """A tensor holds what `norm` gives, its channels along `dim`.

    exact: it is the output itself; false where rows were multiplied by numbers, so that a shift of the channels would
    come out multiplied too.
    """

    norm: str
    dim: int
    exact: bool = True


UNREAD = {  # operations that read sizes, not values
    "aten::zeros_like", "aten::ones_like", "aten::empty_like", "aten::full_like", "aten::rand_like", "aten::new_zeros",
    "aten::new_ones", "aten::new_empty", "aten::new_full", "aten::new_empty_strided", "aten::is_same_size",
}  # fmt: skip

_Rule = Callable[[Mark, Tensor, Sequence[Any], dict[str, Any], Tensor], Mark | None]


def follow(
    name: str, args: Sequence[Any], kwargs: dict[str, Any], outputs: Sequence[Tensor], marks: dict[int, Mark]
) -> Mark | None:
    """The mark of an operation's outputs, None where it uses what it is given; marks: of inputs, by their id."""
    rule = RULES.get(name)
    if rule is None or not outputs:
        return None
    if name in _JOINS:
        return _joined(args, kwargs, marks, new=name == "aten::stack")
    source = args[0]
    if id(source) not in marks or len(marks) > 1:
        return _scaled_by(args, marks, outputs[0]) if name in _SCALINGS else None
    mark = rule(marks[id(source)], source, args, kwargs, outputs[0])
    width = source.shape[marks[id(source)].dim]
    if mark is None or any(output.dim() <= mark.dim or output.shape[mark.dim] != width for output in outputs):
        return None
    return mark


def _dim(value: int, tensor: Tensor) -> int:
    return value % max(1, tensor.dim())


def _same(mark: Mark, source: Tensor, args: Sequence[Any], kwargs: dict[str, Any], output: Tensor) -> Mark | None:
    return mark


def _reshaped(mark: Mark, source: Tensor, args: Sequence[Any], kwargs: dict[str, Any], output: Tensor) -> Mark | None:
    """The dimension of the same size with as many elements after it."""
    width, after = source.shape[mark.dim], math.prod(source.shape[mark.dim + 1 :])
    for dim, size in enumerate(output.shape):
        if size == width and math.prod(output.shape[dim + 1 :]) == after:
            return replace(mark, dim=dim)
    return None


def _permuted(mark: Mark, source: Tensor, args: Sequence[Any], kwargs: dict[str, Any], output: Tensor) -> Mark | None:
    return replace(mark, dim=[_dim(value, source) for value in args[1]].index(mark.dim))


def _transposed(mark: Mark, source: Tensor, args: Sequence[Any], kwargs: dict[str, Any], output: Tensor) -> Mark | None:
    first, second = (_dim(value, source) for value in (args[1:3] if len(args) > 2 else (0, 1)))
    return replace(mark, dim={first: second, second: first}.get(mark.dim, mark.dim))


def _expanded(mark: Mark, source: Tensor, args: Sequence[Any], kwargs: dict[str, Any], output: Tensor) -> Mark | None:
    return replace(mark, dim=mark.dim + output.dim() - source.dim())


def _unsqueezed(mark: Mark, source: Tensor, args: Sequence[Any], kwargs: dict[str, Any], output: Tensor) -> Mark | None:
    at = args[1] % output.dim()
    return replace(mark, dim=mark.dim + (at <= mark.dim))


def _squeezed(mark: Mark, source: Tensor, args: Sequence[Any], kwargs: dict[str, Any], output: Tensor) -> Mark | None:
    named = range(source.dim()) if len(args) < 2 else [args[1]] if isinstance(args[1], int) else args[1]
    gone = {_dim(value, source) for value in named if source.shape[value] == 1}
    return None if mark.dim in gone else replace(mark, dim=mark.dim - sum(dim < mark.dim for dim in gone))


def _selected(mark: Mark, source: Tensor, args: Sequence[Any], kwargs: dict[str, Any], output: Tensor) -> Mark | None:
    """One index of a dimension, which goes away."""
    at = _dim(args[1] if len(args) > 1 else 0, source)
    return None if at == mark.dim else replace(mark, dim=mark.dim - (at < mark.dim))


def _along_rows(mark: Mark, source: Tensor, args: Sequence[Any], kwargs: dict[str, Any], output: Tensor) -> Mark | None:
    """Picks of a dimension that is not the channels'."""
    return None if _dim(args[1], source) == mark.dim else mark


def _indexed(mark: Mark, source: Tensor, args: Sequence[Any], kwargs: dict[str, Any], output: Tensor) -> Mark | None:
    """Rows by index tensors, which stand next to one another and not at the channels."""
    places: list[int] = []
    at = dims = 0
    for index in args[1]:
        takes = index.dim() if index is not None and index.dtype in _BOOLEAN else 1
        if index is not None:
            places += range(at, at + takes)
            dims = max(dims, 1 if index.dtype in _BOOLEAN else index.dim())
        at += takes
    if not places or mark.dim in places or places != list(range(places[0], places[-1] + 1)):
        return None
    return replace(mark, dim=mark.dim if mark.dim < places[0] else mark.dim - len(places) + dims)


def _padded(mark: Mark, source: Tensor, args: Sequence[Any], kwargs: dict[str, Any], output: Tensor) -> Mark | None:
    """Rows of zeros beside the rows."""
    value = args[2] if len(args) > 2 else kwargs.get("value", 0)
    return replace(mark, exact=False) if value in (0, None) and output.dim() == source.dim() else None


def _repeated(mark: Mark, source: Tensor, args: Sequence[Any], kwargs: dict[str, Any], output: Tensor) -> Mark | None:
    added = output.dim() - source.dim()
    return replace(mark, dim=mark.dim + added) if args[1][mark.dim + added] == 1 else None


def _masked(mark: Mark, source: Tensor, args: Sequence[Any], kwargs: dict[str, Any], output: Tensor) -> Mark | None:
    """Rows set to zero."""
    one_a_row = _constant_over(args[1], output, mark.dim) and output.shape == source.shape
    value = args[2]
    return replace(mark, exact=False) if one_a_row and not isinstance(value, Tensor) and value == 0 else None


def _scaled(mark: Mark, source: Tensor, args: Sequence[Any], kwargs: dict[str, Any], output: Tensor) -> Mark | None:
    """Rows times (or divided by) numbers."""
    added = output.dim() - source.dim()
    constant = not isinstance(args[1], Tensor) or _constant_over(args[1], output, mark.dim + added)
    return replace(mark, dim=mark.dim + added, exact=False) if constant else None


def _scaled_by(args: Sequence[Any], marks: dict[int, Mark], output: Tensor) -> Mark | None:
    """Numbers times rows, in this order."""
    if len(marks) > 1 or len(args) < 2 or id(args[1]) not in marks:
        return None
    return _scaled(marks[id(args[1])], args[1], (args[1], args[0]), {}, output)


def _constant_over(other: Tensor, output: Tensor, dim: int) -> bool:
    """Whether a tensor that is spread over the output is the same all along a dimension of it."""
    at = dim - (output.dim() - other.dim())
    return at < 0 or other.shape[at] == 1 or other.stride(at) == 0


def _joined(args: Sequence[Any], kwargs: dict[str, Any], marks: dict[int, Mark], *, new: bool) -> Mark | None:
    """Rows one after another, all of the same norm."""
    parts = [part for part in args[0] if part.numel()]
    if any(id(part) not in marks for part in parts):
        return None
    given = {replace(marks[id(part)], exact=True) for part in parts}
    if len(given) != 1:
        return None
    mark = replace(given.pop(), exact=all(marks[id(part)].exact for part in parts))
    along = (args[1] if len(args) > 1 else kwargs.get("dim", 0)) % (parts[0].dim() + new)
    if new:
        return replace(mark, dim=mark.dim + (along <= mark.dim))
    return None if along == mark.dim else mark


_JOINS = {"aten::cat", "aten::stack"}
_SCALINGS = {"aten::mul"}
_BOOLEAN = {torch.bool, torch.uint8}
_VIEWS: dict[str, _Rule] = {
    **dict.fromkeys(("alias", "detach", "clone", "_to_copy", "contiguous", "lift_fresh"), _same),
    **dict.fromkeys(("slice", "narrow", "split", "split_with_sizes", "chunk"), _same),  # parts of the channels are none
    **dict.fromkeys(("view", "_unsafe_view", "reshape", "_reshape_alias"), _reshaped),
    **dict.fromkeys(("t", "transpose"), _transposed),
    "permute": _permuted,
    "expand": _expanded,
    "unsqueeze": _unsqueezed,
    "squeeze": _squeezed,
    "select": _selected,
    "unbind": _selected,
}
RULES: dict[str, _Rule] = {
    f"aten::{name}": rule
    for name, rule in {
        **_VIEWS,
        **dict.fromkeys(("cat", "stack"), _same),
        **dict.fromkeys(("index_select", "gather"), _along_rows),
        **dict.fromkeys(("mul", "div"), _scaled),
        "index": _indexed,
        "constant_pad_nd": _padded,
        "repeat": _repeated,
        "masked_fill": _masked,
    }.items()
}
FOLLOWED = {f"aten::{name}" for name in _VIEWS}  # what is a view or a copy of a parameter
RESHAPES = {f"aten::{name}" for name, rule in _VIEWS.items() if rule in (_same, _reshaped)} - {"aten::slice"}
