"""Archives of what a moeq made, and how two makings are compared: digests of files, of decoded weights, logits.

An archive is NAME.tar.xz, NAME the version and the last commit that touched moeq/; NAME.json says who made it, where,
and what everything in it must give:

    made_by       version, commit and its date, and the libraries and the machine that decide floating point
    inspect       {path in the archive: what `moeq inspect --json` says of it}
    decoded       {checkpoint: sha256 of its weights in the model's type, cross-entropy and logits for IDS}
    native        {checkpoint: cross-entropy and logits for IDS as it is loaded}
    gguf          how far `moeq verify`, which alone reads it, finds the checkpoint from the model
    context_aware {row: perplexity} of the nested checkpoint, as it is placed and placed anew for every sequence
    runs          {run directory: its model; again: stages that today's moeq makes again, none at first; otherwise:
                  files that are not made, or not with these bytes, when the whole run is made today}
"""

from __future__ import annotations

import hashlib
import json
import platform
import shutil
import tarfile
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import nn
from typer.testing import CliRunner

from moeq.cli import app
from moeq.errors import MoeqError
from moeq.version import __version__

FOLDER = Path(__file__).parent
IDS = torch.arange(3, 51)[None] * 37 % 2000  # [1, 48]: tokens of the bundled tokenizer
GGUF, NESTED, TEXT = "checkpoints/gguf", "checkpoints/nested", "text.txt"
NATIVE = ("run/checkpoint", NESTED, "checkpoints/projections")
SHOWN = 8  # logits of the last position that are kept
DATED = {"stage.json", "recipe.yaml", "SHA256SUMS"}  # dates, places of this machine, digests of the rest
LIBRARIES = ("torch", "transformers", "numpy", "numba", "scipy", "scikit-learn", "pyarrow", "matplotlib", "lm-eval")


@dataclass(frozen=True)
class Kept:
    """An unpacked archive, which tests only read, and its index."""

    folder: Path
    wanted: dict[str, Any]

    def copy(self, path: str, target: Path) -> Path:
        return Path(shutil.copytree(self.folder / path, target / Path(path).name))

    def model(self, run: str) -> Path:
        return self.folder / str(self.wanted["runs"][run]["model"])

    def again(self, run: str) -> list[str]:
        """Stages of a run that today's moeq makes again."""
        return list(self.wanted["runs"][run]["again"])


def index(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((FOLDER / f"{name}.json").read_text("utf-8"))
    return found


def names() -> list[str]:
    """The archives, the oldest first."""
    found = [path.name.removesuffix(".tar.xz") for path in FOLDER.glob("*.tar.xz")]
    return sorted(found, key=lambda name: str(index(name)["made_by"]["date"]))


def kept_in(name: str, folder: Path) -> Kept:
    """An archive, unpacked into a folder."""
    with tarfile.open(FOLDER / f"{name}.tar.xz") as archive:
        archive.extractall(folder, filter="data")
    return Kept(folder, index(name))


def environment() -> dict[str, str]:
    """What decides the last digits of floating-point results, and so the codes that follow from them."""
    cpu = [line.partition(":")[2].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")]
    return {
        **{name: metadata.version(name) for name in LIBRARIES},
        "cpu": f"{platform.machine()}, {cpu[0] if cpu else platform.processor()}",
        "capability": torch.backends.cpu.get_cpu_capability(),
        "threads": str(torch.get_num_threads()),
    }


def _lines(path: str) -> list[str]:
    return Path(path).read_text("utf-8").splitlines() if Path(path).exists() else []


def other_environment(made_by: dict[str, Any]) -> str | None:
    """Why digests that depend on floating point cannot be compared here; None where they can."""
    here = environment()
    differing = [f"{name} {made_by[name]}, here {here[name]}" for name in here if made_by.get(name) != here[name]]
    return f"made with {'; '.join(differing)}" if differing else None


def digests(folder: Path, version: str = __version__) -> dict[str, str]:
    """{path: SHA-256} of what the stages of a run wrote, the store included; moeq's version counts for nothing."""
    files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    kept = [path for path in files if path.name not in DATED and not path.name.startswith(".")]
    return {path.relative_to(folder).as_posix(): _digest(path, version) for path in kept}


def _digest(path: Path, version: str) -> str:
    data = path.read_bytes()
    if path.suffix in {".json", ".html", ".md"}:
        data = data.replace(version.encode(), b"VERSION")
    return hashlib.sha256(data).hexdigest()


def differences(before: dict[str, str], after: dict[str, str]) -> list[str]:
    """Names of files that are not in both, or not the same."""
    return sorted(name for name in {*before, *after} if before.get(name) != after.get(name))


def decoded(checkpoint: Path) -> str:
    """SHA-256 of all tensors of a plain checkpoint, by name: their bytes, types and shapes."""
    digest, found = hashlib.sha256(), {}
    for path in checkpoint.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            found |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    for name in sorted(found):
        digest.update(f"{name} {found[name].dtype} {tuple(found[name].shape)}".encode())
        digest.update(found[name].contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def answers(model: nn.Module) -> dict[str, Any]:
    """Cross-entropy of IDS, and the first logits after them, of a language model in float32."""
    with torch.no_grad():
        logits = model(input_ids=IDS).logits[0].double()
    entropy = nn.functional.cross_entropy(logits[:-1], IDS[0, 1:])
    return {"cross_entropy": entropy.item(), "logits": logits[-1, :SHOWN].tolist()}


def context_aware(folder: Path) -> dict[str, float]:
    """Perplexities of the nested checkpoint on TEXT, for which replicas of every width are read."""
    how = ("--context-aware", "gpu_experts=1,code_bits=2.5", "--text", folder / TEXT, "--dtype", "float32")
    rows = moeq("eval", folder / NESTED, *how, "--device", "cpu")["table"]
    return {row["name"]: row["cells"]["perplexity"]["value"] for row in rows}


def refused(*arguments: str | Path) -> tuple[int, str]:
    """Exit code and line of what a command refuses."""
    with pytest.raises(MoeqError) as caught:
        moeq(*arguments)
    assert "\n" not in str(caught.value)
    assert caught.value.do, "how to go on"
    return caught.value.exit_code, str(caught.value)


def moeq(*arguments: str | Path) -> Any:
    """What `moeq ARGUMENTS --json` prints, in this process; errors are raised as they are."""
    done = CliRunner().invoke(app, [*map(str, arguments), "--json"])
    if done.exception is not None and not (isinstance(done.exception, SystemExit) and done.exit_code == 0):
        raise done.exception
    return json.loads(done.stdout)
