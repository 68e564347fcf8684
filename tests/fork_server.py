"""A process that has imported what takes long and forks for each request a `moeq` command line, or another program.

A process takes 0.1 s instead of 5 s. Run as a program it is the server; `ForkServer` is the client's side. Every
command is the leader of a process group of its own and goes through `moeq.cli.main`, as the installed command does.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import json
import os
import resource
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

MOEQ = (
    "moeq.cli",
    "moeq.pipeline",
    "moeq.results",
    "moeq.terminal",
    "moeq.inspection",
    "moeq.generation",
    "transformers.models.mixtral.modeling_mixtral",
    "transformers.models.llama.tokenization_llama",
    "transformers.generation",
    "lm_eval",
    "lm_eval.evaluator",
    "lm_eval.models.huggingface",
    "lm_eval.tasks",
    "matplotlib.backends.backend_svg",
    "matplotlib.figure",
    "numba.np.arrayobj",
    "pint",
)
TRANSFORMERS = (
    "transformers.generation",
    "transformers.modeling_utils",
    "transformers.models.auto.modeling_auto",
    "transformers.models.mixtral.modeling_mixtral",
    "transformers.models.qwen3_moe.modeling_qwen3_moe",
)
DEADLINE_SECONDS = 120  # a command that takes longer hangs


@dataclass(frozen=True)
class Finished:
    """Exit code (negative: the signal that ended it) and what was printed."""

    code: int
    stdout: str
    stderr: str


@dataclass
class Running:
    """A moeq process. `stderr` is its standard error, to be read line by line while it runs."""

    pid: int
    stderr: Any
    _connection: socket.socket
    _stdout: Any
    _lines: list[str] = field(default_factory=list)

    def line(self) -> str:
        """The next line of its standard error; empty at the end."""
        line: str = self.stderr.readline()
        self._lines.append(line)
        return line

    def signal(self, number: signal.Signals) -> None:
        """Signal the whole process group; nothing happens when it is gone."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, number)

    def wait(self) -> Finished:
        """Read until the end and return what came out."""
        watch = threading.Timer(DEADLINE_SECONDS, self.signal, [signal.SIGKILL])
        watch.start()
        while self.line():
            pass
        status = json.loads(self._connection.makefile().readline())
        watch.cancel()
        self._connection.close()
        self.stderr.close()
        self._stdout.seek(0)
        with self._stdout as stdout:
            return Finished(os.waitstatus_to_exitcode(status), stdout.read(), "".join(self._lines))


class ForkServer:
    """Starts the server, which imports `modules`; `start` and `run` are moeq command lines, or those of a program."""

    def __init__(
        self, modules: tuple[str, ...] = MOEQ, *, python: str = sys.executable, env: dict[str, str] | None = None
    ) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="moeq-fork-")
        self._address = str(Path(self._folder.name) / "socket")
        environment = (os.environ if env is None else env) | {"HF_HUB_OFFLINE": "1"}
        self._server = subprocess.Popen(
            [python, __file__, self._address, *modules],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        assert self._server.stdout is not None
        assert self._server.stdout.readline() == "ready\n", "the fork server did not start"

    def start(
        self,
        *arguments: str | Path,
        program: Path | None = None,
        cwd: Path | str = "/",
        env: dict[str, str] | None = None,
        stdout: str | None = None,
        file_bytes: int | None = None,
        more_bytes: int | None = None,
        cpu_seconds: int | None = None,
        die_at_rename: int | None = None,
    ) -> Running:
        """Start `moeq ARGUMENTS`.

        program: a Python script instead of moeq; stdout: a path to print to; file_bytes: no file may grow larger
        (RLIMIT_FSIZE); more_bytes: of address space beyond what the server has (RLIMIT_AS); cpu_seconds: then SIGXCPU
        ends it; die_at_rename: SIGKILL before the n-th os.replace.
        """
        output = tempfile.TemporaryFile("w+")  # noqa: SIM115
        reading, writing = os.pipe()
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(self._address)
        request = {
            "arguments": list(map(str, arguments)),
            "program": program and str(program),
            "cwd": str(cwd),
            "env": env or {},
            "stdout": stdout,
            "file_bytes": file_bytes,
            "more_bytes": more_bytes,
            "cpu_seconds": cpu_seconds,
            "die_at_rename": die_at_rename,
        }
        socket.send_fds(connection, [json.dumps(request).encode()], [output.fileno(), writing])
        os.close(writing)
        pid = int.from_bytes(connection.recv(8, socket.MSG_WAITALL), "little")
        return Running(pid, os.fdopen(reading, "r"), connection, output)

    def run(self, *arguments: str | Path, **options: Any) -> Finished:
        return self.start(*arguments, **options).wait()

    def close(self) -> None:
        self._server.communicate("")
        self._folder.cleanup()


@functools.cache
def shared(*modules: str, python: str = sys.executable) -> ForkServer:
    """A server for as long as the tests run; other interpreters do not see PYTHONPATH."""
    own = () if python == sys.executable else ("PYTHONPATH",)
    return ForkServer(modules, python=python, env={name: os.environ[name] for name in os.environ if name not in own})


def _serve(address: str, modules: list[str]) -> None:
    """Import, then answer each connection by a forked handler until standard input ends."""
    sys.path[:] = [path for path in sys.path if path != str(Path(__file__).parent)]
    gc.disable()
    for name in modules:
        importlib.import_module(name)
    gc.enable()
    gc.freeze()  # a child neither looks through what was imported for garbage nor copies its pages
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(address)
    listener.listen()
    print("ready", flush=True)
    while True:
        ready, _, _ = select.select([listener, sys.stdin], [], [])
        if sys.stdin in ready:
            return
        connection, _ = listener.accept()
        if os.fork() == 0:
            listener.close()
            _handle(connection)
            os._exit(0)
        connection.close()


def _handle(connection: socket.socket) -> None:
    """Fork the command, send its process id, wait for it and send its status."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs are born ignoring it
    message, files, _, _ = socket.recv_fds(connection, 1 << 16, 2)
    pid = os.fork()
    if pid == 0:
        connection.close()
        _command(json.loads(message), *files)
    for file in files:
        os.close(file)
    os.setpgid(pid, pid)
    connection.sendall(pid.to_bytes(8, "little"))
    connection.sendall(f"{os.waitpid(pid, 0)[1]}\n".encode())


def _command(request: dict[str, Any], stdout: int, stderr: int) -> None:
    """Become `moeq ARGUMENTS`, or a program."""
    os.setpgid(0, 0)
    os.dup2(stdout if request["stdout"] is None else os.open(request["stdout"], os.O_WRONLY), 1)
    os.dup2(stderr, 2)
    os.close(stdout)
    os.close(stderr)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    sys.stdin, sys.stdout, sys.stderr = os.fdopen(0), os.fdopen(1, "w"), os.fdopen(2, "w", buffering=1)
    os.chdir(request["cwd"])
    os.environ |= request["env"]
    if request["file_bytes"] is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (request["file_bytes"],) * 2)
    if request["more_bytes"] is not None:
        mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (mapped + request["more_bytes"],) * 2)
    if request["cpu_seconds"] is not None:
        resource.setrlimit(resource.RLIMIT_CPU, (request["cpu_seconds"],) * 2)
    if request["die_at_rename"] is not None:
        _die_at_rename(request["die_at_rename"])
    sys.argv = [request["program"] or "moeq", *request["arguments"]]
    code = 0
    try:
        if request["program"] is None:
            from moeq.cli import main

            main()
        else:
            sys.path.insert(0, str(Path(request["program"]).parent))
            runpy.run_path(request["program"], run_name="__main__")
    except SystemExit as leaving:
        code = leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
    except BaseException:
        import traceback

        traceback.print_exc()
        code = 1
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except OSError:
        code = 120  # as the interpreter does
    os._exit(code)


def _die_at_rename(number: int) -> None:
    """Kill this process group just before the n-th time that a finished file or directory is renamed to its place."""
    replace, count = os.replace, 0

    def counting(*names: Any) -> None:
        nonlocal count
        count += 1
        if count == number:
            os.killpg(0, signal.SIGKILL)
        replace(*names)

    os.replace = counting  # type: ignore[assignment]


if __name__ == "__main__":
    _serve(sys.argv[1], sys.argv[2:])
