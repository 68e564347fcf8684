"""Running the probe in a fresh process of the target's interpreter."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import Tensor

from moeq.errors import EvaluationError, MoeqError, RecipeError, StorageError, missing
from moeq.folders import bytes_in
from moeq.tables import human_seconds
from moeq.verification import probe
from moeq_kernels import names


class NotInstalledError(RecipeError):
    """The target's package is not there."""


BASE_SECONDS = 600  # that a target may take whatever the size: to import, and to compile kernels
ROOM = 1 << 16  # bytes that a folder must have room for, where there is no answer in it
BYTES_PER_SECOND = 10e6  # of a checkpoint, that the slowest loader on a slow disk reads, unpacks and runs in that time


@dataclass(frozen=True, kw_only=True)
class Request:
    """What the probe is to do; target: the loader's name; packages, load, environment, logits_only: see
    `exporters.exporter.Loader`;
    loading: what from_pretrained is told beside; inputs: tokens or pixels by the names of the model's arguments;
    stored: the type of most weights; layers: {experts module: number of experts}, and hidden: their rows' length; rows:
    of experts alone."""

    checkpoint: Path
    target: str
    packages: Mapping[str, str]
    load: str
    environment: Mapping[str, str]
    logits_only: bool
    loading: Mapping[str, str]
    method: str
    architecture: str
    dtype: str
    stored: str
    inputs: Mapping[str, Tensor]
    layers: Mapping[str, int]
    hidden: Mapping[str, int]
    rows: int
    trust_remote_code: bool


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What the target's loader complained about (None: it does not say), its packages' versions, and the tensors."""

    loading: dict[str, list[str]] | None
    versions: dict[str, str]
    tensors: Any

    def layer(self, name: str) -> dict[str, Tensor]:
        """What was recorded of one MoE layer; empty where it was not called in a way that can be repeated."""
        start = f"{name}."
        keys = [key for key in self.tensors.keys() if key.startswith(start)]  # noqa: SIM118
        return {key.removeprefix(start): self.tensors.get_tensor(key) for key in keys}

    def part(self, name: str, part: str) -> Tensor | None:
        """One of the tensors of a layer, None where it was not recorded."""
        key = f"{name}.{part}"
        return self.tensors.get_tensor(key) if key in self.tensors.keys() else None  # noqa: SIM118

    def logits(self) -> Tensor:
        logits: Tensor = self.tensors.get_tensor("logits")
        return logits


@contextmanager
def started(request: Request, python: str | None) -> Iterator[subprocess.Popen[bytes]]:
    """Start the probe; RecipeError when there is no such interpreter, StorageError without room for what it is asked.

    Its folder is `process.args[-1]`.
    """
    with tempfile.TemporaryDirectory(prefix="moeq-verify-") as folder:
        write_request(Path(folder), request)
        with (Path(folder) / "log").open("wb") as log:
            try:
                process = subprocess.Popen(
                    [_absolute(python or sys.executable), str(Path(probe.__file__).resolve()), folder],
                    cwd=folder,  # gptqmodel leaves logs where it is run
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env=_environment(request.packages) | dict(request.environment),
                )
            except FileNotFoundError:
                raise missing(python or sys.executable, "give a Python interpreter to --python") from None
            except OSError as error:
                raise RecipeError(
                    f"cannot be run ({error.strerror})", where=f"--python {python}", do="give a Python interpreter"
                ) from None
            try:
                yield process
            finally:
                if process.poll() is None:
                    process.kill()
                    process.wait()


@contextmanager
def _room(folder: Path) -> Iterator[None]:
    """StorageError where what is written to the folder finds no room."""
    try:
        yield
    except OSError as error:
        raise _unwritten(folder, error.strerror or str(error)) from error


def _unwritten(folder: Path, what: str) -> StorageError:
    return StorageError(f"cannot write: {what}", where=str(folder.parent), do="free some space there, or set TMPDIR")


def _absolute(python: str) -> str:
    """An interpreter by its path, or by a name that is looked up."""
    return str(Path(python).absolute()) if os.sep in python else python


def write_request(folder: Path, request: Request) -> None:
    """Write what the probe reads; StorageError where there is no room."""
    asked = {name: getattr(request, name) for name in Request.__dataclass_fields__}
    asked |= {"checkpoint": str(request.checkpoint.resolve())}
    asked |= {"inputs": {name: value.tolist() for name, value in request.inputs.items()}}
    with _room(folder):
        (folder / "request.json").write_text(json.dumps(asked), "utf-8")


def _environment(packages: Mapping[str, str]) -> dict[str, str]:
    """This process's, with what keeps the peers quiet and off the network; moeq itself, where it is needed, is found
    where it is. What is recorded of moeq's own runtime are the bits of the plain way, on every machine."""
    environment = {"OMP_WAIT_POLICY": "PASSIVE", "GPTQMODEL_CPU_WORKERS": "2", **os.environ, "HF_HUB_OFFLINE": "1"}
    environment[names.VARIABLE] = names.REFERENCE
    own = Path(probe.__file__).resolve().parents[2]
    given = [Path(path).absolute() for path in environment.pop("PYTHONPATH", "").split(os.pathsep) if path]
    environment[probe.PARENT] = str(os.getpid())
    paths = [own, *given] if "moeq" in packages else [path for path in given if path.resolve() != own]
    return environment | {"PYTHONPATH": os.pathsep.join(map(str, paths))}


def answer(process: subprocess.Popen[bytes], request: Request) -> Answer:
    """Wait for the probe and read what it wrote.

    Raises NotInstalledError where a package is not installed, StorageError where there was no room for its answer,
    EvaluationError where the target cannot load or run the checkpoint, or takes longer than `limit_seconds`.
    """
    limit = limit_seconds(request.checkpoint)
    try:
        code = process.wait(timeout=limit)
    except subprocess.TimeoutExpired:
        raise _failed(request, f"no answer in {human_seconds(limit)}") from None
    arguments = list(process.args) if isinstance(process.args, list) else []
    folder = Path(str(arguments[-1]))
    if not (folder / probe.ANSWER).is_file():
        with _room(folder):
            (folder / "room").write_bytes(bytes(ROOM))
        last = (folder / "log").read_text("utf-8", "replace").strip().splitlines()
        if code == -signal.SIGKILL:
            raise EvaluationError(
                "its process was killed (SIGKILL), as the system does when memory runs out",
                where=f"{request.checkpoint}, target {request.target}",
                do="verify it where there is more memory; `--no-verify` exports without",
            )
        ended = f"by {signal.Signals(-code).name}" if code < 0 else f"with {code}"
        what = f"its process ended {ended}" + (f": {last[-1]}" if last else "")
        if code > 0 and not last:
            do = "name with --python the interpreter of an environment that has the target"
            raise EvaluationError(what, where=f"target {request.target}, {arguments[0]}", do=do)
        raise _failed(request, what)
    said = json.loads((folder / probe.ANSWER).read_text("utf-8"))
    if said["absent"] is not None:
        raise _absent(request, said["absent"], str(arguments[0]), said["error"])
    if said["unwritten"] is not None:
        raise _unwritten(folder, said["unwritten"])
    if said["error"] is not None:
        raise _failed(request, said["error"])
    return Answer(loading=said["loading"], versions=said["versions"], tensors=safe_open(folder / probe.TENSORS, "pt"))


def limit_seconds(checkpoint: Path) -> float:
    """How long the probe may take: by the bytes of the checkpoint's files."""
    return BASE_SECONDS + bytes_in(checkpoint) / BYTES_PER_SECOND


def _absent(request: Request, package: str, python: str, error: str) -> MoeqError:
    return NotInstalledError(
        f"{package} cannot be imported there ({error})",
        where=f"target {request.target}, {python}",
        do=f"{request.packages[package]}, or name with --python the interpreter of an environment that has it",
    )


def _failed(request: Request, what: str) -> MoeqError:
    return EvaluationError(
        f"cannot be loaded: {what}",
        where=f"{request.checkpoint}, target {request.target}",
        do="export it in a format that the target loads",
    )
