"""Errors that a user can act on: one line that says what, where and what to do, and an exit code by class.

| exit code | class | meaning |
|---|---|---|
| 1 | InternalError | a bug in moeq (an unexpected exception; the log holds the traceback) |
| 2 | RecipeError | a recipe, an option or a command line |
| 3 | ModelError | the model directory, its configuration, its weights or its tokenizer |
| 4 | CorpusError | calibration or evaluation text |
| 5 | QuantizationError | losses or quantization |
| 6 | AssignmentError | bits, placement or budget that cannot be met |
| 7 | ArtifactError | a missing, damaged or foreign file of an earlier stage |
| 8 | StorageError | the disk: full, read-only, in use |
| 9 | EvaluationError | evaluation: tasks, generation, a checkpoint that does not load right |
| 10 | EstimateError | hardware files and the performance estimate |
| 11 | PlanError | a plan that does not fit this machine: memory, disk |
| 12 | FormatError | a format or a runtime that cannot carry what is asked |
| 13 | MissingError | a path that is named and is not there |
| 14 | GateError | a finished run that does not keep to the recipe's gates, a checkpoint made again that differs |
| 15 | PushError | the hub, where a checkpoint is uploaded: token, permission, network, what is there already |
| 129, 130, 143 | | interrupted: a closed terminal (SIGHUP), Ctrl-C, SIGTERM |
"""

from __future__ import annotations

import difflib
import re
import sys
from collections.abc import Iterable
from contextlib import suppress
from os import PathLike, fsencode
from os.path import isdir, islink

from moeq_kernels.errors import ArtifactError as ArtifactError
from moeq_kernels.errors import ModelError as ModelError
from moeq_kernels.errors import MoeqError as MoeqError

PATH_CHARACTERS = 400  # of a path in a message
NOWHERE = "a link that leads to nothing"
ADDRESS = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+:)/+(.*)", re.DOTALL)  # with the slash that a path leaves of them


class InternalError(MoeqError):
    exit_code = 1


class RecipeError(MoeqError):
    exit_code = 2


class CorpusError(MoeqError):
    exit_code = 4


class QuantizationError(MoeqError):
    exit_code = 5


class NotFiniteError(QuantizationError):
    """Weights or activations that are infinite or not numbers."""


class AllZeroError(QuantizationError):
    """Activations that are 0 everywhere, of which no loss can be measured."""


class AssignmentError(MoeqError):
    exit_code = 6


class BudgetError(AssignmentError):
    """A budget, or a limit of latency, that no assignment keeps."""


class StorageError(MoeqError):
    exit_code = 8


class EvaluationError(MoeqError):
    exit_code = 9


class EstimateError(MoeqError):
    exit_code = 10


class PlanError(MoeqError):
    exit_code = 11


class FormatError(MoeqError):
    exit_code = 12


class MissingError(MoeqError):
    exit_code = 13


class GateError(MoeqError):
    exit_code = 14


class PushError(MoeqError):
    exit_code = 15


def is_utf8(name: object) -> bool:
    """Whether a name is text: of bytes that are none Python makes halves of surrogate pairs."""
    return not any("\ud800" <= character <= "\udfff" for character in str(name))


def name_trouble(name: object, otherwise: str) -> tuple[str, str]:
    """What is wrong with a name that is no text, and what to do: its bytes (then `otherwise`), or the locale alone."""
    with suppress(UnicodeError):
        fsencode(str(name)).decode("utf-8")
        here = sys.getfilesystemencoding()
        return f"its name is UTF-8, which this locale's names are not ({here})", "set PYTHONUTF8=1, or LC_ALL=C.UTF-8"
    return "its name is no UTF-8", otherwise


def missing(path: str | PathLike[str], do: str, problem: str = "no such file or directory") -> MissingError:
    """The error for a path that is named and is not there; problem: what the system says of it."""
    where, address = str(path), address_of(path)
    if address is not None:
        where, problem, do = address, "an address, where a path is wanted", "give the path of a copy on this machine"
    elif islink(path):
        problem = NOWHERE
    return MissingError(problem, where=where[:PATH_CHARACTERS] + "..." * (len(where) > PATH_CHARACTERS), do=do)


def address_of(path: str | PathLike[str]) -> str | None:
    """The address, such as s3://BUCKET/FOLDER, that stands where a path should; None where a path does."""
    found = ADDRESS.fullmatch(str(path))
    if found is None or isdir(found[1]):
        return None
    return f"{found[1]}{'///' if found[1] == 'file:' else '//'}{found[2]}"


def as_named(path: str | PathLike[str]) -> str:
    """A path as messages name it: an address with all of its slashes."""
    return address_of(path) or str(path)


def first_line(error: BaseException, otherwise: str | None = None) -> str:
    """The first line of what an error of somebody else's says; of one that says nothing its type, or `otherwise`."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__ if otherwise is None else otherwise


def hint(word: str, known: Iterable[str], otherwise: str = "known: ") -> str:
    """What to do about a word that is not among known ones: the nearest, or all of them."""
    known = list(known)
    close = nearest(word, known)
    return f"did you mean {close!r}?" if close else f"{otherwise}{', '.join(known)}"


def nearest(word: str, known: Iterable[str], alike: float = 0.5) -> str | None:
    """The known word closest to a misspelt one, or None when nothing is close; alike: 0 to 1, as difflib measures."""
    matches = difflib.get_close_matches(word, list(known), n=1, cutoff=alike)
    return matches[0] if matches else None
