"""Gathers the wheels that `make gpu` needs on an offline machine beside torch and Triton: `make gpu-wheels`.

    python benchmarks/gpu_wheels.py [--to .gpu-wheels] [--python 3.12] [--have transformers ...] [--whole]

Versions and digests are those of locks/. --have: packages that the machine has already; torch, Triton and NumPy always.
Numba and Apache Arrow, 110 MB, come with --whole alone: the GPU's kernels, their tests and benchmark do without them,
and `make gpu` names what it did not run for want of them.
Prints each file with its size. Copy the folder into the repository on that machine, then `make gpu PYTHON=python3`.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]
ALWAYS = ("torch", "triton", "numpy")
UNUSED = ("aiohttp", "colorama", "email-validator", "hf-xet")  # extras of packages that others ask for
LARGE = ("numba", "llvmlite", "pyarrow")
ASKED = (  # what the GPU's tests and benchmarks import, themselves and through moeq
    "accelerate", "greenlet", "huggingface-hub", "numba", "pint", "pyarrow", "pydantic", "pytest", "pyyaml", "regex",
    "rich", "safetensors", "transformers", "typer",
)  # fmt: skip
GLIBC = (39, 35, 34, 31, 28, 27, 24, 17, 12, 5)  # 2.N, of manylinux: pip takes each as it is named
PLATFORMS = [*(f"manylinux_2_{minor}_x86_64" for minor in GLIBC), "manylinux2014_x86_64", "manylinux1_x86_64"]
PIN = re.compile(r"^(?=[A-Za-z0-9])", re.MULTILINE)
VIA = re.compile(r"^ +# +(?:via +)?(\S+)$", re.MULTILINE)


def locked() -> dict[str, str]:
    """{package: its lines} of locks/run.txt and locks/test.txt."""
    found = {}
    for name in ("run", "test"):
        text = (ROOT / "locks" / f"{name}.txt").read_text("utf-8")
        for block in PIN.split("".join(line for line in text.splitlines(keepends=True) if line[0] != "#"))[1:]:
            found[canonicalize_name(re.match(r"[A-Za-z0-9._-]+", block)[0])] = block  # type: ignore[index]
    return found


def needed(pins: dict[str, str], have: set[str], python: str) -> list[str]:
    """The packages that are asked for and all that they need, by who needs whom in the lock files."""
    parents = {name: {canonicalize_name(one) for one in VIA.findall(block)} for name, block in pins.items()}
    found = {name for name in ASKED if name not in have}
    while more := {name for name, of in parents.items() if of & found} - found - have:
        found |= more
    return sorted(name for name in found if _taken(pins[name], python))


def _taken(block: str, python: str) -> bool:
    """Whether this Python on Linux takes a pin."""
    requirement = Requirement(re.split(r"\s*\\\n", block.strip())[0])
    machine = {"python_version": python, "python_full_version": f"{python}.0", "sys_platform": "linux", "extra": ""}
    machine |= {"platform_system": "Linux", "platform_machine": "x86_64", "os_name": "posix"}
    return requirement.marker is None or requirement.marker.evaluate(machine)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--to", type=Path, default=ROOT / ".gpu-wheels")
    parser.add_argument("--python", default="3.12")
    parser.add_argument("--have", nargs="*", default=[])
    parser.add_argument("--whole", action="store_true", help="Numba and Apache Arrow, too")
    parser.add_argument("--list", action="store_true", help="name the packages and fetch nothing")
    options = parser.parse_args()
    pins = locked()
    have = {canonicalize_name(name) for name in (*ALWAYS, *UNUSED, *options.have, *(() if options.whole else LARGE))}
    names = needed(pins, have, options.python)
    if options.list:
        print("\n".join(names))
        return 0
    options.to.mkdir(parents=True, exist_ok=True)
    for old in options.to.glob("*.whl"):
        old.unlink()
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as asked:
        for name in names:  # without markers, which pip would ask of this Python
            head, *rest = pins[name].split("\n", 1)
            asked.write(re.sub(r" ;[^\\]*", " ", head) + "\n" + "".join(rest))
        asked.flush()
        words = [
            "-m",
            "pip",
            "download",
            "-q",
            "--no-deps",
            "--only-binary=:all:",
            "--require-hashes",
            "-r",
            asked.name,
        ]
        words += ["--python-version", options.python, "--implementation", "cp", "-d", str(options.to)]
        words += [word for platform in PLATFORMS for word in ("--platform", platform)]
        code = subprocess.run([sys.executable, *words]).returncode
    sizes = {path.name: path.stat().st_size for path in sorted(options.to.glob("*.whl"))}
    for name, size in sizes.items():
        print(f"{size / 1e6:8.2f} MB  {name}")
    print(f"{len(sizes)} wheels, {sum(sizes.values()) / 1e6:.1f} MB in {options.to}")
    return code


if __name__ == "__main__":
    sys.exit(main())
