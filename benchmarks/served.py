"""A server with the OpenAI API, vLLM's or transformers', for the time of a `with` block, as docs/serve.md starts it.

with Server(python, checkpoint, folder, "--dtype", "float32") as server:
    server.ask(prompt=[3, 70, 500], max_tokens=8, temperature=0)["choices"][0]
    server.resident()  # bytes of all its processes
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import time
import urllib.request
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import figures

SECONDS = 300  # until it answers: vLLM compiles the model
SETTINGS = {
    "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}  # fmt: skip
Start = Callable[[str], list[str]]


def by_vllm(checkpoint: str) -> list[str]:
    """What Python runs."""
    return ["-m", "vllm.entrypoints.openai.api_server", "--model", checkpoint]


def by_transformers(checkpoint: str) -> list[str]:
    """What Python runs: the command `transformers serve`."""
    return ["-m", "transformers.cli.transformers", "serve", checkpoint, "--trust-remote-code"]


class Server:
    """One that serves a checkpoint; options: of its command line, environment: of its processes, start: which one."""

    def __init__(
        self,
        python: str | Path,
        checkpoint: Path,
        folder: Path,
        *options: str,
        environment: Mapping[str, str],
        start: Start = by_vllm,
    ) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.model, self.address, self.log = str(checkpoint), f"http://127.0.0.1:{port}", folder / "log"
        self.folder, self.environment = folder, {**environment, **SETTINGS}
        self.command = [str(python), *start(self.model), "--port", str(port), "--host", "127.0.0.1", *options]

    def __enter__(self) -> Server:
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                self.command, stdout=log, stderr=log, env=self.environment, cwd=self.folder, start_new_session=True
            )
        try:
            self._wait()
        except BaseException:
            self.__exit__()
            raise
        return self

    def _wait(self) -> None:
        """Until the server is well; RuntimeError when it has ended, or takes too long."""
        for _ in range(SECONDS):
            if self.process.poll() is not None:
                break
            try:
                with urllib.request.urlopen(f"{self.address}/health", timeout=5):
                    return
            except OSError:
                time.sleep(1)
        raise RuntimeError(f"the server does not answer: {self.log.read_text('utf-8', 'replace')[-3000:]}")

    def __exit__(self, *_: object) -> None:
        for ending in (signal.SIGTERM, signal.SIGKILL):
            if self._processes():
                os.killpg(self.process.pid, ending)
            try:
                self.process.wait(30)
                break
            except subprocess.TimeoutExpired:
                continue

    def ask(self, **wanted: Any) -> Any:
        """What it answers to a completion of its model."""
        request = urllib.request.Request(
            f"{self.address}/v1/completions",
            json.dumps({"model": self.model} | wanted).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=300) as answer:
            return json.load(answer)

    def _processes(self) -> list[str]:
        """Those of its session: it starts its workers."""
        found = []
        for path in Path("/proc").glob("[0-9]*/stat"):
            try:
                session = path.read_text().rpartition(")")[2].split()[3]
            except OSError:  # it has ended
                continue
            found += [path.parent.name] if session == str(self.process.pid) else []
        return found

    def resident(self) -> int:
        """Bytes of memory that all its processes have."""
        total = 0
        for process in self._processes():
            try:
                total += sum(figures.resident(process).values())
            except OSError:
                continue
        return total
