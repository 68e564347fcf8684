"""Every CUDA test and every benchmark of a GPU, one after the other: `make gpu`.

    python benchmarks/gpu.py [--wheels .gpu-wheels] [--to build/gpu] [--only tests benchmarks] [--tune] [--seconds 540]

Needs torch and, for the kernels, Triton; what else moeq imports comes from the folder of wheels, if there is one (see
gpu_wheels.py), which is unpacked beside the tables: nothing is fetched, nothing is installed. The last lines say what
failed and what was not run, with the time of each part. Most of the time is compilation: tests run side by side where
pytest-xdist is installed, and the benchmark of the kernels has them compiled by as many processes first. Without a GPU
the kernels' tests and their benchmark run in Triton's interpreter, and the rest is named. Benchmarks write JSON with
the GPU's name to --to, summary.json there is written after every part and failures.txt with every test that fails: what
was finished is kept when the rest is stopped, as every part is that is not done --seconds after the start. --tune:
first find the fastest settings of this GPU (moeq_kernels/gpu/tuned, and a copy in --to). Exit code 1 where something
failed.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import failures

ROOT = Path(__file__).resolve().parents[1]
MARK = "pytest.mark.cuda"
KERNELS = "tests/kernels/gpu"
TUNING_SECONDS = 200
LEAST_SECONDS = 5
BESIDE = max(1, min(14, (os.cpu_count() or 1) - 1))  # processes that compile
NONE = "there is no CUDA device"
NEEDS = ("numba", "pyarrow")  # of moeq beside its GPU kernels; see gpu_wheels.py
TAKES_ARRAYS = "import numpy; int(numpy.array([1]))"  # what the interpreter of Triton 3.6 wants of NumPy
DYNAMIC = "tests/runtime/test_dynamic_on_gpu.py"  # of which all tests say something of a GPU
ON_CUDA = {  # benchmarks that need a GPU
    "gptq_model": ("--layers", "1"),
    "gptq": ("--no-peers", "--no-large"),
    "dynamic": ("--parts", "overhead", "switching", "--vocabulary", "32768", "--rounds", "48"),
}
SEEN = """
import torch, triton
print(torch.__version__, triton.__version__, torch.cuda.get_device_name() if torch.cuda.is_available() else "")
"""


@dataclass
class Runs:
    """What was run, and how it ended."""

    environment: dict[str, str]
    summary: Path
    seconds: float
    about: dict[str, str] = field(default_factory=dict)
    started: float = field(default_factory=time.monotonic)
    parts: list[dict[str, object]] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    not_run: list[str] = field(default_factory=list)

    def run(self, name: str, *words: str, **more: str) -> None:
        """One program of this Python in the repository's folder; more: of its environment."""
        print(f"\n== {name}: {' '.join(words)}", flush=True)
        started = time.monotonic()
        left = self.started + self.seconds - started
        if left < LEAST_SECONDS:
            self.leave_out(name, f"{self.seconds:.0f} s are over")
            return
        try:
            code = subprocess.run(
                [sys.executable, *words], cwd=ROOT, env=self.environment | more, timeout=left
            ).returncode
        except subprocess.TimeoutExpired:
            code = -1
        taken = time.monotonic() - started
        said = "ok" if not code else ("FAILED" if code > 0 else "stopped")
        print(f"== {name}: {said}, {taken:.0f} s", flush=True)
        self.parts.append({"part": name, "ended": said, "seconds": round(taken, 1)})
        if code:
            self.failed.append(name if code > 0 else f"{name}, stopped after {taken:.0f} s")
        self.write()

    def leave_out(self, name: str, why: str) -> None:
        """Say at the end that something was not run."""
        self.not_run.append(f"{name}: {why}")
        self.write()

    def write(self) -> None:
        """The summary so far."""
        self.summary.parent.mkdir(parents=True, exist_ok=True)
        found = self.about | {"parts": self.parts, "failed": self.failed, "not run": self.not_run}
        self.summary.write_text(json.dumps(found, indent=1) + "\n", "utf-8")


def marked() -> list[str]:
    """Files with CUDA tests, those of the kernels and DYNAMIC apart."""
    files = sorted((ROOT / "tests").rglob("test_*.py"))
    named = [path.relative_to(ROOT).as_posix() for path in files if MARK in path.read_text("utf-8")]
    return [name for name in named if not name.startswith(KERNELS) and name != DYNAMIC]


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


def tests(runs: Runs, gpu: bool, folder: Path) -> None:
    """The kernels' tests, then what else is marked; what fails is in failures.txt at once."""
    pytest = ["-m", "pytest", "-p", "no:cacheprovider", "-p", failures.__name__]
    more = {failures.VARIABLE: str((folder / "failures.txt").resolve())}
    (folder / "failures.txt").unlink(missing_ok=True)
    if gpu and importlib.util.find_spec("xdist") is not None:
        pytest += ["-n", str(BESIDE), "--dist", "load"]
        more["OMP_NUM_THREADS"] = "1"
    runs.run("the kernels' tests", *pytest, KERNELS, **more)
    lacking = lacked(runs)
    if gpu and not lacking:
        runs.run("other CUDA tests", *pytest, "-m", "cuda", *marked(), **more)
        runs.run("dynamic precision", *pytest, DYNAMIC, **more)
        return
    for name in (DYNAMIC, *marked()) if gpu else (KERNELS, DYNAMIC, *marked()):
        runs.leave_out(f"CUDA tests of {name}", lacking if gpu else NONE)


def lacked(runs: Runs) -> str:
    """Which packages that moeq needs beside its GPU kernels are not there; empty where all are."""
    script = f"import importlib.util; print(*(n for n in {NEEDS} if importlib.util.find_spec(n) is None), sep=', ')"
    said = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=runs.environment).stdout
    return f"{said.strip()} not installed" if said.strip() else ""


def benchmarks(runs: Runs, gpu: bool, folder: Path, tune: bool) -> None:
    """The benchmarks that say something of a GPU."""
    here = ["--ahead", str(BESIDE)] if gpu else ["--interpret"]
    here += ["--tune", "--tune-seconds", str(TUNING_SECONDS)] if tune else []
    runs.run("gpu_kernels", "benchmarks/gpu_kernels.py", *here, "--json", str(folder / "gpu_kernels.json"))
    for table in (ROOT / "moeq-kernels/moeq_kernels/gpu/tuned").glob("*.json"):
        shutil.copy(table, folder / f"tuned-{table.name}")
    lacking = lacked(runs)
    if not gpu:
        runs.leave_out("the goals of gpu_kernels", NONE)
    for name, words in ON_CUDA.items():
        if not gpu or lacking:
            runs.leave_out(name, lacking if gpu else NONE)
        else:
            more = ("--device", "cuda", *words, "--json", str(folder / f"{name}.json"))
            runs.run(name, f"benchmarks/{name}.py", *more)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--wheels", type=Path, default=ROOT / ".gpu-wheels")
    parser.add_argument("--to", type=Path, default=ROOT / "build" / "gpu")
    parser.add_argument("--only", nargs="+", choices=("tests", "benchmarks"), default=("tests", "benchmarks"))
    parser.add_argument("--tune", action="store_true")
    parser.add_argument("--seconds", type=float, default=540.0)
    options = parser.parse_args()
    missing = [name for name in ("torch", "triton") if importlib.util.find_spec(name) is None]
    if missing:
        print(f"{' and '.join(missing)} not installed: nothing can be run")
        return 1
    site = unpacked(options.wheels, options.to / "site")
    own = [str(ROOT), str(ROOT / "moeq-kernels"), str(ROOT / "benchmarks")]
    paths = [*own, *([site] if site else []), *filter(None, [os.environ.get("PYTHONPATH")])]
    given = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}
    runs = Runs(given, options.to / "summary.json", options.seconds)
    said = subprocess.run([sys.executable, "-c", SEEN], capture_output=True, text=True, env=runs.environment).stdout
    torch, triton, *device = said.split(maxsplit=2)
    gpu = bool(device)
    if gpu:
        given["MOEQ_CASES"] = "all"
    where = device[0].strip() if gpu else "no CUDA device: Triton's interpreter"
    print(f"torch {torch}, triton {triton}, {where}")
    runs.about = {"torch": torch, "triton": triton, "device": where}
    if not gpu and triton.startswith("3.6."):
        tried = subprocess.run([sys.executable, "-W", "ignore", "-c", TAKES_ARRAYS], capture_output=True, env=given)
        if tried.returncode:
            print(
                f"nothing can be run: there is no CUDA device, and Triton {triton}'s interpreter wants an older NumPy"
            )
            return 1
    if "tests" in options.only:
        tests(runs, gpu, options.to)
    if "benchmarks" in options.only:
        benchmarks(runs, gpu, options.to, options.tune)
    for part in runs.parts:
        print(f"{part['seconds']:7} s  {part['part']}: {part['ended']}")
    for line in runs.not_run:
        print(f"not run: {line}")
    ended = f"FAILED: {', '.join(runs.failed)}" if runs.failed else "all that was run is ok"
    print(f"gpu: {ended}; files in {options.to}")
    return 1 if runs.failed else 0


if __name__ == "__main__":
    sys.exit(main())
