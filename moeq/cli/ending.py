"""How a command ends: its result on standard output, an error as one line and an exit code by class."""

from __future__ import annotations

import atexit
import codecs
import contextlib
import errno
import io
import json as jsonlib
import os
import signal
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, NoReturn

import typer

from moeq.arguments import of_system
from moeq.cli.libraries import quiet_libraries
from moeq.cli.usage import asks_json
from moeq.errors import InternalError, MissingError, MoeqError, PlanError, StorageError

SCHEMA_VERSION = 1  # of JSON on standard output: raised when a key goes or changes its meaning
NO_MEMORY = (  # as torch, the system, the loader and Python's threads, which need a stack, say it
    "allocate memory", "out of memory", "failed to map segment", "bad_alloc", "can't start new thread",
)  # fmt: skip
NO_FOLDER = "No usable temporary directory"  # as tempfile says it
SIGNALS = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)  # that end a command
SOON = 0.05  # seconds until an interrupt that was lost comes again
HUNG_UP, INTERRUPTED, CLOSED, TERMINATED = 129, 130, 141, 143  # as shells have it: 128 and the number of the signal


def show(result: Mapping[str, Any], as_text: Callable[[Any], None], *, json: bool, quiet: bool = False) -> None:
    """A result as JSON, an object with its schema_version, or in words unless there are to be none."""
    if json:
        _print_result(result)
    elif not quiet:
        as_text(result)


def _print_result(result: Mapping[str, Any]) -> None:
    """What has a version of its own, such as a file that is shown, keeps it."""
    print_json({"schema_version": SCHEMA_VERSION, **result})


def print_json(value: Mapping[str, Any]) -> None:
    """As JSON, in ASCII alone where standard output has no encoding for all characters."""
    unicode = codecs.lookup(sys.stdout.encoding or "ascii").name.startswith("utf")
    print(jsonlib.dumps(value, indent=1, ensure_ascii=not unicode))


def as_json(error: MoeqError) -> dict[str, Any]:
    """An error as --json shows it: its class, the whole line, the parts of it that there are, and the exit code."""
    parts = {"where": error.where, "what": error.what, "do": error.do}
    return {"error": type(error).__name__, "message": str(error), **parts, "exit_code": error.exit_code}


def refuse(error: MoeqError, *, json: bool) -> None:
    """End with an error behind a result; behind one in JSON there is no second one."""
    if not json:
        raise error
    print(f"moeq: {error}", file=sys.stderr)
    raise typer.Exit(error.exit_code)


def run(app: Callable[[], None]) -> None:
    """Errors become one line on standard error and an exit code by class, never a traceback.

    SIGTERM and SIGHUP, of a terminal that is closed, end a command as Ctrl-C does: what is half-written goes. A library
    may make another error of each.
    """
    quiet_libraries()
    if sys.stdout is None:  # it was closed before: what is said there goes nowhere
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115, it is open to the end
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # of characters without an encoding, as on standard error
    ended_by: list[int] = []
    atexit.register(signal.signal, signal.SIGINT, signal.SIG_IGN)  # before others, so that it is the last one called
    for number in SIGNALS:  # those that nobody has set, as nohup does
        if signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler):
            signal.signal(number, lambda number, _: _interrupt(ended_by, number))
    sys.unraisablehook = partial(_unraisable, ended_by, sys.unraisablehook)
    try:
        _end(app, ended_by)
    except KeyboardInterrupt:  # while another one was told of
        _leave(ended_by)


def _end(app: Callable[[], None], ended_by: list[int]) -> None:
    output = sys.stdout
    try:
        try:
            _check_here()
            app()
        finally:
            sys.stdout.flush()  # a full disk or a closed pipe shows here, not when the interpreter has gone
    except (KeyboardInterrupt, SystemExit) as leaving:
        code = leaving.code if isinstance(leaving, SystemExit) else INTERRUPTED  # typer makes 130 of an interrupt
        if code == INTERRUPTED:
            _leave(ended_by)
        code = code if sys.stdout is output else CLOSED  # typer replaces one that nobody reads, and makes 1 of it
        _end_at_once(code if isinstance(code, int) else int(code is not None))
        sys.exit(code)
    except BrokenPipeError:
        _drop(1)
        sys.exit(CLOSED)
    except Exception as error:
        if ended_by:
            _leave(ended_by)
        known = _as_moeq_error(error)
        if asks_json(sys.argv[1:]):
            with contextlib.suppress(OSError):
                _print_result(as_json(known))
                sys.stdout.flush()
        if isinstance(known, StorageError):
            _drop(1)
        _say(f"moeq: {known}")
        sys.exit(known.exit_code)


def _end_at_once(code: int) -> None:
    """From now on, when all is done or taken back, a signal ends the process with this code, not in a traceback. The
    interpreter, when it goes, takes such handlers away: then an interrupt is ignored, which would make another code."""
    _on_signals(lambda *_: os._exit(code))


def _on_signals(handler: Callable[..., None]) -> None:
    """Of those that are not ignored."""
    for number in SIGNALS:
        if callable(signal.getsignal(number)):
            signal.signal(number, handler)


def _say(line: str) -> None:
    """On standard error, where that takes it: what is still buffered for one that does not goes nowhere."""
    try:
        print(line, file=sys.stderr)
    except OSError:
        _drop(2)


def _interrupt(ended_by: list[int], number: int) -> None:
    """A signal as an interrupt; it is noted."""
    ended_by.append(number)
    if number == signal.SIGHUP:  # which may come of the terminal and of the shell
        signal.signal(number, signal.SIG_IGN)
    raise KeyboardInterrupt


def _unraisable(ended_by: list[int], tell: Callable[[Any], Any], ignored: Any) -> None:
    """What Python drops because it comes where nothing can be raised, as while an object is freed: it is told; an
    interrupt comes again a moment later, in the code that goes on."""
    if not (ended_by and isinstance(ignored.exc_value, KeyboardInterrupt)):
        tell(ignored)
        return
    number = ended_by[-1]
    signal.signal(number, lambda number, _: _interrupt(ended_by, number))  # which SIGHUP is ignored by now
    again = threading.Timer(SOON, signal.pthread_kill, [threading.main_thread().ident, number])
    again.daemon = True
    again.start()


def _leave(ended_by: list[int]) -> NoReturn:
    """End as somebody who is interrupted does."""
    codes = {signal.SIGTERM: TERMINATED, signal.SIGHUP: HUNG_UP}
    code = next((code for number, code in codes.items() if number in ended_by), INTERRUPTED)
    _on_signals(lambda *_: None)  # until it is told
    from moeq.artifacts.run import STAGES

    goes_on = sys.argv[1:2] and sys.argv[1] in ("run", *STAGES)
    with contextlib.suppress(OSError):  # of a terminal that is gone
        print("interrupted; run the same command to go on" if goes_on else "interrupted", file=sys.stderr)
    _end_at_once(code)
    sys.exit(code)


def _check_here() -> None:
    """MissingError where a command stands in a folder that has been removed: there torch's library of products, which
    looks for its parts, ends the process in words of its own."""
    try:
        os.getcwd()
    except FileNotFoundError:
        what = "the folder that this was started in has been removed"
        raise MissingError(what, do="go to one that is there, be it of the same name") from None


def _drop(stream: int) -> None:
    """What is still buffered for standard output, 1, or standard error, 2, goes nowhere."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream)


def _as_moeq_error(error: Exception) -> MoeqError:
    """An error of moeq's as it is, unless memory ran out behind it; an unexpected one as one line, its traceback goes
    to a file."""
    if any(_says_no_memory(one) for one in _behind(error)):
        return PlanError("out of memory", do="free some or raise the limit; `moeq plan` says what every stage takes")
    if isinstance(error, MoeqError):
        return error
    if isinstance(error, OSError) and error.filename is None and error.errno in (errno.ENOSPC, errno.EIO, errno.EFBIG):
        return StorageError(error.strerror or str(error), where="standard output", do="free some space")
    if isinstance(error, OSError) and (known := of_system(error)) is not None:
        return known
    if isinstance(error, FileNotFoundError) and NO_FOLDER in str(error):
        return StorageError("no folder for temporary files can be written", where="TMPDIR", do="set it to one that can")
    return InternalError(f"{type(error).__name__}: {error}", where="bug in moeq", do=f"please report it{_logged()}")


def _logged() -> str:
    """Where the traceback was written, for the report of a bug."""
    try:
        with tempfile.NamedTemporaryFile("w", prefix="moeq-", suffix=".log", delete=False) as log:
            log.write(traceback.format_exc())
    except OSError:  # a full disk
        return "; its log could not be written"
    return f" with {log.name}"


def _behind(error: BaseException) -> Iterator[BaseException]:
    """An error and those that it was made of, or raised while they were handled."""
    one: BaseException | None = error
    while one is not None:
        yield one
        one = one.__cause__ or one.__context__


def _says_no_memory(error: BaseException) -> bool:
    if isinstance(error, MoeqError):
        return False
    return isinstance(error, MemoryError) or any(words in str(error) for words in NO_MEMORY)
