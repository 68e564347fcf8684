"""Registries: the members of a kind (allocators, exporters, quantizers, policies) by name, moeq's own and others'.

Own members are found by themselves: every module of the kind's package that declares one (`ALLOCATOR = ...`) is one,
and gives it its name; a module that declares none is a helper. Other packages name theirs in the entry points of a
group (`moeq.allocators`). Names are listed without importing any; a member that cannot be loaded is left out, and what
another's member raises becomes one line that names its package.
"""

from __future__ import annotations

import copy
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, redirect_stdout
from dataclasses import dataclass, field
from functools import cached_property, wraps
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moeq.errors import ArtifactError, AssignmentError, EstimateError, MoeqError, QuantizationError, RecipeError, hint

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

LONGEST = 80  # characters of an unknown name that are shown
NATIVE_FORMAT = "moeq"  # the exporter whose format a run always writes, and all others are made of


@dataclass(frozen=True, kw_only=True, eq=False)
class Registry:
    """One kind of member, which modules of `package` declare in capitals (KIND = ...), other packages in `group`.

    base: "module:Class" that all of the kind are of; error: what others' failures become; guarded: functions of theirs
    that see to this by themselves, the rest is called within `blaming`; gives: "module:Class" that some of them must
    return. separator: what a name has for an underscore of
    its module's.
    """

    kind: str
    group: str
    package: str
    base: str
    error: type[MoeqError]
    guarded: tuple[str, ...]
    gives: Mapping[str, str] = field(default_factory=dict)
    separator: str = "-"

    def names(self) -> tuple[str, ...]:
        """moeq's own by the alphabet, then others'; nothing is imported."""
        return (*self.own, *self._entries[0])

    def get(self, name: str, error: type[MoeqError] = RecipeError) -> Any:
        """The member of a name; `error` where there is none that can be used."""
        if (member := self.find(name)) is None:
            raise self.refused(name, self.names(), error)
        return member

    def find(self, name: str) -> Any | None:
        """The member of a name, None where there is none that can be used."""
        member = self._load(name) if name in self.names() else None
        return None if isinstance(member, MoeqError) else member

    def refused(
        self, name: str, known: Iterable[str], error: type[MoeqError] = RecipeError, where: str | None = None
    ) -> MoeqError:
        """The error for a name that is none of the known ones: the nearest, or what is wrong with another's package."""
        broken = self._load(name) if name in self._entries[0] else None
        if isinstance(broken, MoeqError):
            return error(broken.what, where=broken.where, do=broken.do)
        return error(f"unknown {self.kind} {name[:LONGEST]!r}", where=where, do=hint(name, known))

    def __iter__(self) -> Iterator[Any]:
        """Every member that can be loaded, in the order of names."""
        return (member for member in map(self._load, self.names()) if not isinstance(member, MoeqError))

    def origin(self, name: str) -> str | None:
        """The package, with its version, that another's member is of; None of moeq's own."""
        return None if name in self.own else _package(self._entries[0][name])

    @contextmanager
    def blaming(self, name: str, at: Callable[[], str], expected: tuple[type[Exception], ...] = ()) -> Iterator[None]:
        """Raise what another's member raises as one error that names its package; at: where it failed.

        Errors of moeq, those of its own members, and those that callers expect stay as they are. What another's prints
        goes to standard error: standard output is that of the command, such as its JSON.
        """
        try:
            with nullcontext() if name in self.own else redirect_stdout(sys.stderr):
                yield
        except MoeqError:
            raise
        except expected:
            raise
        except (Exception, SystemExit) as error:
            package = self.origin(name)
            if package is None:
                raise
            raise self.error(
                f"{self.kind} {name!r} failed at {at()} ({type(error).__name__}: {error})",
                where=package,
                do=f"report it to the authors of that package, or use another {self.kind}",
            ) from error

    def problems(self) -> list[str]:
        """A line for every entry point that cannot be used: its package, its name and why."""
        loaded = [*self._entries[1], *map(self._load, self._entries[0])]
        return [str(problem) for problem in loaded if isinstance(problem, MoeqError)]

    def reset(self) -> None:
        """Forget what was found, as a new process would: for tests that add packages."""
        for name in ("own", "_entries", "_loaded"):
            vars(self).pop(name, None)

    @cached_property
    def own(self) -> dict[str, str]:
        """{name: module} of moeq's own members; their sources are read, not run."""
        declared = re.compile(rf"^{self.kind.upper()}\b", re.MULTILINE)
        folder = Path(__file__).parent.joinpath(*self.package.split(".")[1:])
        modules = [path.stem for path in folder.glob("*.py") if declared.search(path.read_text("utf-8"))]
        return {name.replace("_", self.separator): f"{self.package}.{name}" for name in sorted(modules)}

    @cached_property
    def _entries(self) -> tuple[dict[str, EntryPoint], list[MoeqError]]:
        """Others' entry points by name, and what is wrong with those whose name another has."""
        from importlib.metadata import entry_points

        entries: dict[str, EntryPoint] = {}
        taken = []
        for entry in sorted(entry_points(group=self.group), key=lambda entry: (entry.name, _package(entry))):
            if entry.name in self.own or entry.name in entries:
                holder = "moeq" if entry.name in self.own else _package(entries[entry.name])
                taken.append(_broken(entry, f"{holder} has {self.kind} {entry.name!r}"))
            else:
                entries[entry.name] = entry
        return entries, taken

    @cached_property
    def _loaded(self) -> dict[str, Any]:
        return {}

    def _load(self, name: str) -> Any:
        """The member of a known name, or the error that says what is wrong with it."""
        if name not in self._loaded:
            own = self.own.get(name)
            self._loaded[name] = (
                self._other(self._entries[0][name]) if own is None else getattr(import_module(own), self.kind.upper())
            )
        return self._loaded[name]

    def _other(self, entry: EntryPoint) -> Any:
        try:
            with redirect_stdout(sys.stderr):
                member = entry.load()
        except (Exception, SystemExit) as error:  # whatever another's module does, this program goes on
            return _broken(entry, f"{type(error).__name__}: {error}")
        base: Any = _class(self.base)
        if not isinstance(member, base):
            return _broken(entry, f"a {type(member).__name__} is no {self.base}")
        return self._guard(member) if member.name == entry.name else _broken(entry, f"it is named {member.name!r}")

    def _guard(self, member: Any) -> Any:
        """A copy of another's member whose guarded functions raise one error that names its package."""
        member = copy.copy(member)
        for name in self.guarded:
            if (function := getattr(member, name)) is not None:
                object.__setattr__(member, name, self._guarded(member.name, function, self.gives.get(name)))
        return member

    def _guarded(self, name: str, function: Callable[..., Any], kind: str | None) -> Callable[..., Any]:
        @wraps(function)
        def guarded(*arguments: Any, **named: Any) -> Any:
            with self.blaming(name, lambda: f"{function.__name__}()"):
                result = function(*arguments, **named)
                result = list(result) if isinstance(result, Iterator) else result
                if kind is not None and not isinstance(result, _class(kind)):
                    raise TypeError(f"it returns a {type(result).__name__}, no {kind}")
                return result

        return guarded


def _class(named: str) -> type:
    """The class of a "module:Class"."""
    module, _, name = named.partition(":")
    found: type = getattr(import_module(module), name)
    return found


def _package(entry: EntryPoint) -> str:
    return "a package without a name" if entry.dist is None else f"{entry.dist.name} {entry.dist.version}"


def _broken(entry: EntryPoint, reason: str) -> MoeqError:
    what = f"entry point {entry.name} = {entry.value} of {entry.group} cannot be used ({reason})"
    return MoeqError(what, where=_package(entry), do="update or remove that package")


ALLOCATORS = Registry(
    kind="allocator",
    group="moeq.allocators",
    package="moeq.assigners",
    base="moeq.assigners.allocator:Allocator",
    error=AssignmentError,
    guarded=("assign", "trials", "at_bytes", "foreseen", "remark", "refuse"),
    gives={"assign": "moeq.artifacts.assignment:Assignment"},
)
EXPORTERS = Registry(
    kind="exporter",
    group="moeq.exporters",
    package="moeq.exporters",
    base="moeq.exporters.exporter:Exporter",
    error=ArtifactError,
    guarded=("write", "check", "size", "opened", "described"),
)
QUANTIZERS = Registry(
    kind="quantizer",
    group="moeq.quantizers",
    package="moeq.quantizers",
    base="moeq.quantizers.quantizer:Quantizer",
    error=QuantizationError,
    guarded=("memory", "operations"),
)
POLICIES = Registry(
    kind="policy",
    group="moeq.policies",
    package="moeq.estimator.policies",
    base="moeq.estimator.policies:Policy",
    error=EstimateError,
    guarded=("decode", "prefill", "migration", "refusal"),
    separator="_",
)
