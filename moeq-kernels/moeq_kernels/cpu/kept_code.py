"""Compiled code kept on disk, one file for each of what it was compiled from, so that processes can share it.

numba's own keeping numbers a function's files and writes the numbers into an index. Two processes that compile at the
same time, such as those of a server's ranks or of a test run, may take the same number; then one later runs the code
of the other's signature, silently (numba 0.68; four writers at once: 70 of 800 entries wrong). Here a file's name is
the digest of all that its code depends on, the file says it again inside, and ends with its own digest:

    signature, CPU, function and closure    as in numba's index
    versions                                numba's and llvmlite's
    source                                  of the function's module and of all that it imports of ours, so that a
                                            change of what emits code is a change of the code

A file that is missing, damaged or of something else is compiled again and replaced. Where files lie, numba's locators
say: beside the module or, where that cannot be written, in the user's cache. Where nothing can be written, every
process compiles for itself. Files of earlier sources are removed.
"""

from __future__ import annotations

import hashlib
import logging
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import llvmlite
import numba
from numba.core.caching import FunctionCache, IndexDataCacheFile, NullCache
from numba.core.ccallback import CFunc
from numba.core.sigutils import normalize_signature

from moeq_kernels.errors import ModelError

IMPORTED = re.compile(r"^from (moeq[\w.]*) import (\([^)]*|.*)", re.MULTILINE)
DIGEST_BYTES = 32
LOG = logging.getLogger("moeq.kernels")


def compiler(**options: Any) -> Callable[[Callable[..., Any]], Any]:
    """`numba.njit` without Python's lock, dividing as numpy does, that keeps its code; options: further ones.

    ModelError where numba is told to compile nothing: what is written here is no Python that could run.
    """
    if numba.config.DISABLE_JIT:
        raise ModelError("numba is told to compile nothing", where="NUMBA_DISABLE_JIT", do="leave it out")
    compiled = numba.njit(nogil=True, error_model="numpy", **options)

    def kept(function: Callable[..., Any]) -> Any:
        dispatcher = compiled(function)
        dispatcher._cache = _kept(function)
        return dispatcher

    return kept


def internal(**options: Any) -> Callable[[Callable[..., Any]], Any]:
    """As `compiler`, of functions that only compiled code calls, in less time: they have nothing that Python could call
    (it would crash), and are not kept but in the code of those that call them."""
    made: Callable[[Callable[..., Any]], Any] = numba.njit(
        nogil=True, error_model="numpy", no_cpython_wrapper=True, no_cfunc_wrapper=True, **options
    )
    return made


def callback(signature: Any, function: Callable[..., Any]) -> Any:
    """`numba.cfunc` of a function, compiled or read from the disk at once; it must be held as long as it is called."""
    compiled: Any = CFunc(function, normalize_signature(signature), locals={}, options={})
    compiled._cache = _kept(function)
    compiled.compile()
    return compiled


def _kept(function: Callable[..., Any]) -> Any:
    """The cache of a function, one that keeps nothing where no folder can be written."""
    try:
        return KeptCode(function)
    except RuntimeError:  # of numba's locators
        _tell_unkept()
        return NullCache()


class KeptCode(FunctionCache):  # type: ignore[misc]
    """numba's cache of a function, in files that need no index."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__(function)
        self._cache_file = _Files(self._cache_path, self._impl.filename_base, self._impl.locator._py_file)

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        found = super().load_overload(sig, target_context)
        if found is None:
            _tell()
        return found

    def save_overload(self, sig: Any, data: Any) -> None:
        """What cannot be written is compiled again the next time."""
        try:
            super().save_overload(sig, data)
        except OSError:
            _tell_unkept()


@cache
def _tell() -> None:
    """Why nothing seems to happen, once."""
    LOG.info("compiling code for this CPU, kept for the next time; it takes up to a minute")


@cache
def _tell_unkept() -> None:
    """Why every process compiles, once."""
    LOG.warning("compiled code cannot be kept; free some space, or name a folder with NUMBA_CACHE_DIR")


class _Files(IndexDataCacheFile):  # type: ignore[misc]
    """The files of one function: `<function>.<digest of sources>.<digest of key>.nbc`."""

    def __init__(self, folder: str, function: str, source: str) -> None:
        super().__init__(folder, function, source)
        self._function = function

    def flush(self) -> None:
        self._remove_all_but("/")

    def load(self, key: Any) -> Any:
        """What was saved for a key; None if nothing was, or if it is damaged."""
        name = self._name(key)
        try:
            stored = Path(self._data_path(name)).read_bytes()
            if hashlib.sha256(stored[:-DIGEST_BYTES]).digest() != stored[-DIGEST_BYTES:]:
                return None
            found, data = self._load_data(name)  # which reads no further than what was dumped
        except OSError:
            return None
        return data if found == key else None

    def save(self, key: Any, data: Any) -> None:
        self._remove_all_but(self._prefix())
        dumped = self._dump((key, data))
        with self._open_for_write(self._data_path(self._name(key))) as file:
            file.write(dumped + hashlib.sha256(dumped).digest())

    def _prefix(self) -> str:
        return f"{self._function}.{digest_of(self._source_stamp)}."

    def _name(self, key: Any) -> str:
        return f"{self._prefix()}{hashlib.sha256(repr(key).encode()).hexdigest()[:16]}.nbc"

    def _remove_all_but(self, current: str) -> None:
        for file in Path(self._cache_path).iterdir():
            own = file.name.startswith(self._function + ".") and file.suffix in (".nbi", ".nbc")
            if own and not file.name.startswith(current):
                with suppress(OSError):  # another process has removed it
                    file.unlink()


@cache
def digest_of(file: str) -> str:
    """Of the versions of the compilers, and of a module's source and all that it imports of ours, directly or not."""
    sources = sorted(_reached(file))
    text = "\0".join([numba.__version__, llvmlite.__version__, *(_source(one) for one in sources)])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _reached(file: str) -> set[str]:
    reached, ahead = {file}, [file]
    while ahead:
        for other in _imports(ahead.pop()):
            if other not in reached:
                reached.add(other)
                ahead.append(other)
    return reached


def _imports(file: str) -> Iterator[str]:
    """Files of the modules that a file imports, or imports from."""
    for module, names in IMPORTED.findall(_source(file)):
        for name in [module, *(f"{module}.{one}" for one in re.findall(r"\w+", names))]:
            found = getattr(sys.modules.get(name), "__file__", None)
            if found is not None:
                yield found


@cache
def _source(file: str) -> str:
    return Path(file).read_text("utf-8")
