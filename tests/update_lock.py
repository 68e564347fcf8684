"""Writes locks/: a version and SHA-256s of every package that `make` installs: `make lock`, with --upgrade newer ones.

pyproject.toml says what is needed and constraints.txt which versions were chosen; locks/ follows from both, and
tests/test_security.py holds the three together. Versions that neither names stay as they are, unless --upgrade.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
LOCKS = ROOT / "locks"
EXTRAS = {"test": ("test", "peers", "sign", "onnx"), "docs": ("docs",)}  # lock file: the extras whose packages it adds
CUDA = re.compile(r"nvidia-.*|cuda-.*")  # what torch's build on PyPI needs beside: nothing on CPUs
CPU_TORCH = {  # builds of torch's own index, which PyPI does not serve: {file: SHA-256}
    "torch-2.13.0+cpu-cp311-cp311-manylinux_2_28_x86_64.whl": (
        "6746dbcbeb526eb61330b76b41ff1b4eb848951103a892eeb080dfa2b264667b"
    ),
}
OWN = "moeq-kernels"  # of this repository, found by [tool.uv.sources]
PYTHONS = ("3.11", "3.12", "3.13", "3.14")
MACHINES = ("x86_64", "aarch64")
HEADS = {
    "build": "What builds moeq and the source distributions among its dependencies. First.",
    "cpu": "torch without CUDA, of torch's own index. Before run.txt, where it can be had.",
    "run": "What moeq needs to run, itself and all behind it.",
    "test": "What the tests and the loaders of other runtimes need beside run.txt.",
    "docs": "What `make docs` needs beside run.txt and test.txt.",
    "cuda": "What torch needs beside run.txt where it is PyPI's build for Linux, which is one for NVIDIA GPUs.",
    "triton": "What compiles the GPU's kernels, or interprets them: for the tests, and for torch's CUDA build.",
    "tools": "What makes and audits locks/ and writes the SBOM: an environment of its own, .tools.",
}
BLOCK = re.compile(r"^(?=[a-z0-9])", re.MULTILINE | re.IGNORECASE)


@dataclass(frozen=True, kw_only=True)
class Pin:
    """A package of a lock file. text: its lines as they stand there; parents: what needs it."""

    requirement: Requirement
    hashes: tuple[str, ...]
    parents: frozenset[str]
    text: str

    @property
    def name(self) -> str:
        return canonicalize_name(self.requirement.name)

    @property
    def version(self) -> str:
        """The only version it allows."""
        (specifier,) = self.requirement.specifier
        assert specifier.operator == "==", self.text
        return specifier.version

    @property
    def on_linux(self) -> bool:
        """Whether any Linux machine and Python that moeq runs on takes it."""
        marker = self.requirement.marker
        return marker is None or any(map(marker.evaluate, environments()))


def environments() -> Iterator[dict[str, str]]:
    """What markers see on the machines that locks/ is for."""
    for version, machine in product(PYTHONS, MACHINES):
        yield {
            "python_version": version, "python_full_version": f"{version}.0", "implementation_name": "cpython",
            "platform_python_implementation": "CPython", "platform_machine": machine, "platform_system": "Linux",
            "sys_platform": "linux", "os_name": "posix", "extra": "",
        }  # fmt: skip


def parse(text: str) -> dict[str, Pin]:
    """{name: pin} of a lock file's text, as pip reads it."""
    pins: dict[str, Pin] = {}
    body = "".join(line for line in text.splitlines(keepends=True) if not line.startswith("#"))
    for block in BLOCK.split(body)[1:]:
        stated = "".join(line for line in block.splitlines(keepends=True) if not line.lstrip().startswith("#"))
        requirement, *hashes = re.split(r"\s*\\\n\s+--hash=", stated.strip())
        comment = re.findall(r"^ +# +(?:via +)?(\S.*)$", block, re.MULTILINE)
        parents = frozenset(canonicalize_name(line.split(" ")[0]) for line in comment if line != "via")
        pin = Pin(requirement=Requirement(requirement), hashes=tuple(hashes), parents=parents, text=block)
        assert pin.name not in pins, pin.name
        pins[pin.name] = pin
    return pins


def read(name: str) -> dict[str, Pin]:
    """The pins of a file of locks/; none where it is not there yet."""
    path = LOCKS / f"{name}.txt"
    return parse(path.read_text("utf-8")) if path.is_file() else {}


def write(name: str, pins: Mapping[str, Pin]) -> None:
    """Write a file of locks/."""
    head = f"# {HEADS[name]}\n# Made by `make lock` of pyproject.toml and constraints.txt: not to be edited.\n"
    (LOCKS / f"{name}.txt").write_text(head + "".join(pins[name].text for name in sorted(pins)), "utf-8")


def resolve(known: Mapping[str, Pin], *asked: str, upgrade: bool) -> dict[str, Pin]:
    """What uv finds for a project's extras or groups, with every file's hash; `known` versions where they will do."""
    from uv import find_uv_bin

    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "lock.txt"
        out.write_text("".join(f"{pin.requirement}\n" for pin in known.values()), "utf-8")  # no digests: asked anew
        command = [
            find_uv_bin(), "pip", "compile", "--no-config", "--quiet", "--no-header", "--universal",
            "--generate-hashes", "--python-version", PYTHONS[0], "--constraints", "constraints.txt",
            "--no-emit-package", OWN,
            "--output-file", str(out), *asked,
        ]  # fmt: skip
        subprocess.run([*command, *(["--upgrade"] if upgrade else [])], cwd=ROOT, check=True)
        return {name: pin for name, pin in parse(out.read_text("utf-8")).items() if pin.on_linux}


def cpu_build(torch: Pin) -> Pin:
    """torch's builds without CUDA, for those machines and versions of Python whose file's digest is known."""
    files = {wheel: sha256 for wheel, sha256 in CPU_TORCH.items() if wheel.startswith(f"torch-{torch.version}+cpu-")}
    if not files:
        sys.exit(f"no CPU build of torch {torch.version} is known: add its file and SHA-256 to CPU_TORCH in {__file__}")
    tags = [re.search(r"-cp(\d)(\d+)-.*_(x86_64|aarch64)\.whl", wheel) for wheel in files]
    markers = [f"python_version == '{tag[1]}.{tag[2]}' and platform_machine == '{tag[3]}'" for tag in tags if tag]
    hashes = "".join(f" \\\n    --hash=sha256:{sha256}" for sha256 in files.values())
    return parse(f"torch=={torch.version}+cpu ; {' or '.join(markers)}{hashes}\n")["torch"]


def without(pins: Mapping[str, Pin], *others: Mapping[str, Pin]) -> dict[str, Pin]:
    return {name: pin for name, pin in pins.items() if not any(name in other for other in others)}


def main(arguments: Sequence[str]) -> None:
    """Write all of locks/."""
    upgrade = "--upgrade" in arguments
    LOCKS.mkdir(exist_ok=True)
    known: dict[str, Pin] = {}
    for name in ("run", "test", "docs", "cuda", "triton"):
        known |= read(name)
    extras = [word for names in EXTRAS.values() for extra in names for word in ("--extra", extra)]
    everything = resolve(known, "pyproject.toml", *extras, upgrade=upgrade)
    write("cpu", {"torch": cpu_build(everything["torch"])})
    cuda = {name: pin for name, pin in everything.items() if CUDA.fullmatch(name)}
    triton = {"triton": everything["triton"]}
    write("cuda", cuda)
    write("triton", triton)
    write("build", {"setuptools": everything["setuptools"]})
    written = cuda | triton
    for name in ("run", *EXTRAS):
        asked = [word for extra in EXTRAS.get(name, ()) for word in ("--extra", extra)]
        needed = resolve(everything, "pyproject.toml", *asked, upgrade=False)
        pins = without({one: everything[one] for one in needed}, written)
        write(name, pins)
        written = written | pins
    write("tools", resolve(read("tools"), "--group", "tools", upgrade=upgrade))


if __name__ == "__main__":
    main(sys.argv[1:])
