"""What functions are called with from Python: values of another type than theirs are refused by name."""

from __future__ import annotations

import errno
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache, wraps
from inspect import Parameter, signature
from numbers import Real
from os import PathLike, fspath
from os.path import expanduser
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, ParamSpec, TypeVar, Union, get_args, get_origin, get_type_hints

from moeq.bounded import shortened, shown
from moeq.errors import RecipeError, StorageError
from moeq.folders import expanded

P = ParamSpec("P")
Result = TypeVar("Result")
NOTHING = "nothing"
NUMBER = (Real, str)  # a number may stand as text, as a command line has it; which one, the function says itself
KINDS: dict[Any, tuple[tuple[type, ...], str]] = {
    bool: ((bool,), "true or false"),
    int: (NUMBER, "a whole number"),
    float: (NUMBER, "a number"),
    str: ((str,), "text"),
    Path: ((PathLike,), "a path"),
    NoneType: ((NoneType,), NOTHING),
}


def checked(function: Callable[P, Result]) -> Callable[P, Result]:
    """A function that raises RecipeError for an argument of a type that it does not take, and for an empty path,
    which would be the working directory; what else it does not take it refuses itself. Paths may begin with ~. What the
    system refuses is a StorageError."""
    form = signature(function)

    @wraps(function)
    def called(*args: P.args, **kwargs: P.kwargs) -> Result:
        bound = form.bind(*args, **kwargs)
        for name, value in bound.arguments.items():
            parameter = form.parameters[name]
            several = parameter.kind is Parameter.VAR_POSITIONAL
            if parameter.kind is not Parameter.VAR_KEYWORD:
                hint = _hint(str(parameter.annotation), function.__module__)
                found = tuple(_taken(one, hint) for one in (value if several else (value,)))
                for one in found:
                    check(name, one, hint)
                bound.arguments[name] = found if several else found[0]
        try:
            return function(*bound.args, **bound.kwargs)
        except OSError as error:
            if (known := of_system(error)) is None:
                raise
            raise known from error

    return called


def of_system(error: OSError) -> StorageError | None:
    """What the system says of a path, or of a disk, as an error of moeq's; None where it says it of something else."""
    what = error.strerror or str(error)
    if error.filename is not None:
        return StorageError(what, where=shortened(str(error.filename), 400), do="check the disk and the path")
    on_disk = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EFBIG)
    return StorageError(what, do="check the disk") if on_disk else None


def check(name: str, value: Any, hint: Any) -> None:
    """RecipeError where a value is none that a type hint has."""
    wanted = [_refused(value, one) for one in _alternatives(hint)]
    if None not in wanted:
        do = " or ".join(dict.fromkeys(words for words in wanted if words and words != NOTHING))
        raise RecipeError(f"{name} is {shown(value)}", do=f"give {do}")
    if Path in _alternatives(hint) and isinstance(value, str | PathLike) and not fspath(value):
        raise RecipeError(f"{name} is empty", do="give a path, or leave it out")


def _taken(value: Any, hint: Any) -> Any:
    """A path with a home in place of its ~, which no shell has done; of what can be read only once a list."""
    kinds = _alternatives(hint)
    if isinstance(value, Iterator) and any(get_origin(kind) is Sequence for kind in kinds):
        return list(value)
    if Path not in kinds or not isinstance(value, str | PathLike):
        return value
    return expanduser(value) if isinstance(value, str) else expanded(value)


def _alternatives(hint: Any) -> tuple[Any, ...]:
    if get_origin(hint) in (Union, UnionType):
        return tuple(part for one in get_args(hint) for part in _alternatives(one))
    return (hint,)


def _refused(value: Any, hint: Any) -> str | None:
    """What one type wants instead of a value; None where it takes it."""
    origin = get_origin(hint) or hint
    if origin is Literal:
        return None if isinstance(value, str) else "text"
    if origin in KINDS:
        kinds, words = KINDS[origin]
        return None if isinstance(value, kinds) and (bool in kinds or not isinstance(value, bool)) else words
    if origin is Any or not isinstance(origin, type):
        return None
    if issubclass(origin, Mapping) and isinstance(value, Mapping) and get_args(hint):
        wanted = next(filter(None, (_refused(one, get_args(hint)[1]) for one in value.values())), None)
        return wanted and f"a mapping, each value {wanted}"
    if not issubclass(origin, Sequence):
        return None if isinstance(value, origin) else f"a {origin.__name__.lower()}"
    return _refused_list(value, get_args(hint)[0] if get_args(hint) else Any)


def _refused_list(value: Any, of: Any) -> str | None:
    if isinstance(value, str | bytes | Mapping) or not isinstance(value, Iterable):
        return "a list"
    kinds = _alternatives(of)
    wrong = (
        [one for one in value if all(_refused(one, kind) for kind in kinds)] if isinstance(value, list | tuple) else []
    )
    return f"a list, each {_refused(wrong[0], kinds[0])}" if wrong else None


@cache
def _hint(annotation: str, module: str) -> Any:
    """The type that an annotation names; Any for one that is known to type checkers alone."""

    def of_one() -> None: ...

    of_one.__annotations__ = {"value": annotation}
    try:
        return get_type_hints(of_one, vars(sys.modules[module]))["value"]
    except NameError:
        return Any
