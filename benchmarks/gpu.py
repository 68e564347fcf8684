"""Every CUDA test and every benchmark of a GPU, one after the other: `make gpu`.

    python benchmarks/gpu.py [--wheels .gpu-wheels] [--to build/gpu] [--only tests benchmarks]

Needs torch and, for the kernels, Triton; what else moeq imports comes from the folder of wheels, if there is one (see
gpu_wheels.py), which is unpacked beside the tables: nothing is fetched, nothing is installed. The last lines say what
failed and what was not run. Without a GPU the kernels' tests and their benchmark run in Triton's interpreter, and the
rest is named. Benchmarks write JSON with the GPU's name to --to. Exit code 1 where something failed.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MARK = "pytest.mark.cuda"
KERNELS = "tests/kernels/gpu"
LIMIT_SECONDS = 420
ON_CUDA = {"gptq_model": ("--layers", "1"), "gptq": ("--no-peers", "--no-large")}  # benchmarks that need a GPU
SEEN = """
import torch, triton
print(torch.__version__, triton.__version__, torch.cuda.get_device_name() if torch.cuda.is_available() else "")
"""


@dataclass
class Runs:
    """What was run, and how it ended."""

    environment: dict[str, str]
    failed: list[str] = field(default_factory=list)
    not_run: list[str] = field(default_factory=list)

    def run(self, name: str, *words: str) -> None:
        """One program of this Python in the repository's folder."""
        print(f"\n== {name}: {' '.join(words)}", flush=True)
        started = time.monotonic()
        try:
            code = subprocess.run(
                [sys.executable, *words], cwd=ROOT, env=self.environment, timeout=LIMIT_SECONDS
            ).returncode
        except subprocess.TimeoutExpired:
            code = -1
        print(f"== {name}: {'ok' if not code else 'FAILED'}, {time.monotonic() - started:.0f} s", flush=True)
        if code:
            self.failed.append(name if code > 0 else f"{name}, stopped after {LIMIT_SECONDS} s")


def marked() -> list[str]:
    """Files with CUDA tests, those of the kernels apart."""
    files = sorted((ROOT / "tests").rglob("test_*.py"))
    named = [path.relative_to(ROOT).as_posix() for path in files if MARK in path.read_text("utf-8")]
    return [name for name in named if not name.startswith(KERNELS)]


def unpacked(wheels: Path, site: Path) -> str | None:
    """Where the wheels are importable from; None where there are none."""
    files = sorted(map(str, wheels.glob("*.whl")))
    if not files:
        return None
    words = [
        "-m",
        "pip",
        "install",
        "-q",
        "--no-index",
        "--no-deps",
        "--no-compile",
        "--upgrade",
        "--target",
        str(site),
    ]
    subprocess.run([sys.executable, *words, *files], check=True)
    return str(site)


def tests(runs: Runs, gpu: bool) -> None:
    """The kernels' tests, then what else is marked."""
    pytest = ("-m", "pytest", "-p", "no:cacheprovider")
    runs.run("the kernels' tests", *pytest, KERNELS)
    if gpu:
        runs.run("other CUDA tests", *pytest, "-m", "cuda", *marked())
    else:
        runs.not_run += [f"CUDA tests of {name}" for name in (KERNELS, *marked())]


def benchmarks(runs: Runs, gpu: bool, folder: Path) -> None:
    """The benchmarks that say something of a GPU."""
    folder.mkdir(parents=True, exist_ok=True)
    here = [] if gpu else ["--interpret"]
    runs.run("gpu_kernels", "benchmarks/gpu_kernels.py", *here, "--json", str(folder / "gpu_kernels.json"))
    for name, words in ON_CUDA.items():
        if gpu:
            runs.run(name, f"benchmarks/{name}.py", "--device", "cuda", *words, "--json", str(folder / f"{name}.json"))
    if not gpu:
        runs.not_run += ["the goals of gpu_kernels", *ON_CUDA]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--wheels", type=Path, default=ROOT / ".gpu-wheels")
    parser.add_argument("--to", type=Path, default=ROOT / "build" / "gpu")
    parser.add_argument("--only", nargs="+", choices=("tests", "benchmarks"), default=("tests", "benchmarks"))
    options = parser.parse_args()
    missing = [name for name in ("torch", "triton") if importlib.util.find_spec(name) is None]
    if missing:
        print(f"{' and '.join(missing)} not installed: nothing can be run")
        return 1
    site = unpacked(options.wheels, options.to / "site")
    paths = [
        str(ROOT),
        str(ROOT / "moeq-kernels"),
        *([site] if site else []),
        *filter(None, [os.environ.get("PYTHONPATH")]),
    ]
    runs = Runs(os.environ | {"PYTHONPATH": os.pathsep.join(paths), "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"})
    said = subprocess.run([sys.executable, "-c", SEEN], capture_output=True, text=True, env=runs.environment).stdout
    torch, triton, *device = said.split(maxsplit=2)
    gpu = bool(device)
    where = device[0].strip() if gpu else "no CUDA device: Triton's interpreter"
    print(f"torch {torch}, triton {triton}, {where}")
    if "tests" in options.only:
        tests(runs, gpu)
    if "benchmarks" in options.only:
        benchmarks(runs, gpu, options.to)
    for line in runs.not_run:
        print(f"not run: {line}: there is no CUDA device")
    ended = f"FAILED: {', '.join(runs.failed)}" if runs.failed else "all that was run is ok"
    print(f"gpu: {ended}; files in {options.to}")
    return 1 if runs.failed else 0


if __name__ == "__main__":
    sys.exit(main())
