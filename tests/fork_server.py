"""A process that has imported what takes long and forks for each request a `moeq` command line, or another program.

A process takes 0.1 s instead of 5 s. Run as a program it is the server; `ForkServer` is the client's side. Every
command is the leader of a process group of its own and goes through `moeq.cli.main`, as the installed command does;
what it exports is verified in its own process, but where a test asks for a fresh one.

All pytest-xdist's workers share the servers: the first that needs one starts it, below the folder that the environment
names, and it lives as long as the process that made that folder.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import functools
import gc
import hashlib
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
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

LIBRARIES = (
    "transformers.models.mixtral.modeling_mixtral",
    "transformers.models.llama.tokenization_llama",
    "transformers.quantizers.auto",
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
MOEQ = (
    "moeq.cli",
    "moeq.pipeline",
    "moeq.results",
    "moeq.terminal",
    "moeq.inspection",
    "moeq.generation",
    "moeq.api",
    "moeq.verification.launch",
    *LIBRARIES,
)
TRANSFORMERS = (
    "transformers.generation",
    "transformers.modeling_utils",
    "transformers.models.auto.modeling_auto",
    "transformers.models.mixtral.modeling_mixtral",
    "transformers.models.qwen3_moe.modeling_qwen3_moe",
)
SERVERS = "MOEQ_TEST_SERVERS"  # in the environment: the folder of all servers
DEADLINE_SECONDS = 300  # a command that takes longer hangs, also on a slow machine with other tests beside it


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

    def wait(self, deadline: float = DEADLINE_SECONDS) -> Finished:
        """Read until the end, for so many seconds at most, and return what came out."""
        watch = threading.Timer(deadline, self.signal, [signal.SIGKILL])
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


@dataclass(frozen=True)
class ForkServer:
    """A running server, by its socket's path; `start` and `run` are moeq command lines, or those of a program."""

    address: str

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
        package: Path | None = None,
        fresh_probe: bool = False,
    ) -> Running:
        """Start `moeq ARGUMENTS`.

        program: a Python script instead of moeq; stdout: a path to print to; file_bytes: no file may grow larger
        (RLIMIT_FSIZE); more_bytes: of address space beyond what the server has (RLIMIT_AS); cpu_seconds: then SIGXCPU
        ends it; die_at_rename: SIGKILL before the n-th os.replace; package: a folder of modules and entry points that
        is on the path; fresh_probe: exports are verified in a process that imports everything, as outside of tests.
        """
        output = tempfile.TemporaryFile("w+")  # noqa: SIM115
        reading, writing = os.pipe()
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(self.address)
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
            "package": package and str(package),
            "fresh_probe": fresh_probe,
        }
        socket.send_fds(connection, [json.dumps(request).encode()], [output.fileno(), writing])
        os.close(writing)
        pid = int.from_bytes(connection.recv(8, socket.MSG_WAITALL), "little")
        return Running(pid, os.fdopen(reading, "r"), connection, output)

    def run(self, *arguments: str | Path, **options: Any) -> Finished:
        return self.start(*arguments, **options).wait()


def shared_folder() -> Path:
    """Of all servers. Made by the first process that asks, before it starts any other; they end with it."""
    if SERVERS not in os.environ:
        folder = tempfile.TemporaryDirectory(prefix="moeq-fork-")
        alive = Path(folder.name) / "alive"
        os.mkfifo(alive)
        os.open(alive, os.O_RDWR)  # the servers' standard input, which ends with this process
        atexit.register(folder.cleanup)
        os.environ[SERVERS] = folder.name
    return Path(os.environ[SERVERS])


@functools.cache
def shared(*modules: str, python: str = sys.executable) -> ForkServer:
    """The server that has imported `modules`, started where none has been; others' interpreters see no PYTHONPATH."""
    name = hashlib.sha256("\n".join([python, *modules]).encode()).hexdigest()[:16]
    folder = shared_folder()
    own = () if python == sys.executable else ("PYTHONPATH",)
    environment = {key: os.environ[key] for key in os.environ if key not in own} | {"HF_HUB_OFFLINE": "1"}
    with (folder / f"{name}.lock").open("w") as lock, (folder / "alive").open() as alive:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / name).exists():
            command = [python, __file__, str(folder / name), *modules]
            server = subprocess.Popen(command, stdin=alive, stdout=subprocess.PIPE, text=True, env=environment)
            assert server.stdout is not None
            assert server.stdout.readline() == "ready\n", "the fork server did not start"
    return ForkServer(str(folder / name))


def _serve(address: str, modules: list[str]) -> None:
    """Import, then answer each connection by a forked handler until standard input ends."""
    sys.path[:] = [path for path in sys.path if path != str(Path(__file__).parent)]
    gc.disable()
    for name in modules:
        importlib.import_module(name)
    if "moeq.cli" in modules:
        _make_command_once()
    if "numba.np.arrayobj" in modules:  # what numba does when it compiles or loads its first function
        importlib.import_module("numba.core.registry").cpu_target.target_context.refresh()
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


def _make_command_once() -> None:
    """What typer makes of moeq's functions at every start, made before the first fork."""
    import typer.main

    from moeq.cli import app

    typer.main.get_command = functools.cache(typer.main.get_command)
    typer.main.get_command(app)


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
    if request["package"] is not None:
        _install(request["package"])
    if not request["fresh_probe"] and "lm_eval" in sys.modules:  # a server for moeq, not for a peer
        _probe_here()
    os.fsync = unsynced  # type: ignore[assignment]
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


def unsynced(descriptor: int) -> None:
    """In os.fsync's place: an error where it would be one, and no waiting for the disk."""
    os.fstat(descriptor)


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


def _install(package: str) -> None:
    """A package is there, for this process and those it starts."""
    assert "moeq" not in sys.modules, "it has looked already: use the server without moeq"
    sys.path.insert(0, package)
    os.environ["PYTHONPATH"] = os.pathsep.join([package, *filter(None, [os.environ.get("PYTHONPATH")])])
    importlib.invalidate_caches()


def _probe_here() -> None:
    """What moeq and transformers load is verified in this process; peers, which change it, in one of their own."""
    from moeq.verification import launch, probe
    from moeq_kernels import names

    fresh = launch.started

    @contextmanager
    def started(wanted: launch.Request, python: str | None) -> Iterator[Any]:
        if python is not None or not wanted.packages.keys() <= {"moeq", "torch", "transformers"}:
            with fresh(wanted, python) as process:
                yield process
            return
        with tempfile.TemporaryDirectory() as folder:
            launch.write_request(Path(folder), wanted)
            with (
                patch.dict(os.environ, {names.VARIABLE: names.REFERENCE}),
                open(os.devnull, "w") as log,
                contextlib.redirect_stdout(log),
                contextlib.redirect_stderr(log),  # as what a process of its own prints is nobody's
            ):
                probe.main(Path(folder))
            yield SimpleNamespace(args=[folder], wait=lambda timeout: 0)

    launch.started = started  # type: ignore[assignment]


if __name__ == "__main__":
    _serve(sys.argv[1], sys.argv[2:])
