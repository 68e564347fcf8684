"""The wheel and the source distribution hold all that moeq reads and nothing else; the wheel runs elsewhere."""

from __future__ import annotations

import glob
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from email.parser import BytesParser
from importlib.util import find_spec
from pathlib import Path

import pytest
from documents import ROOT
from packaging.requirements import Requirement

import moeq_kernels.version
from moeq.version import __version__

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
LESS = ("corpus.sequences=16", "corpus.sequence_length=64", "losses.methods=[gptq]", "eval.perplexity.sequences=4",
        "eval.perplexity.sequence_length=64", "eval.limit=4", "eval.compare=[]")  # fmt: skip


ROOTS = {"moeq": ROOT, "moeq_kernels": ROOT / "moeq-kernels"}  # of the two distributions


def package_files(package: str = "moeq", root: Path | None = None) -> set[str]:
    """Every file of a package, as in its distribution."""
    root = ROOTS[package] if root is None else root
    return {
        path.relative_to(root).as_posix()
        for path in (root / package).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }


@pytest.mark.parametrize("package", ROOTS)
def test_every_file_beside_the_code_is_package_data(package: str) -> None:
    """What Python reads at run time must be in the wheel; a new kind of file needs a line in pyproject.toml."""
    project = tomllib.loads((ROOTS[package] / "pyproject.toml").read_text("utf-8"))
    folder, to_come = ROOTS[package] / package, {"gpu/tuned/*.json"}  # tables that were measured
    covered = set()
    for pattern in project["tool"]["setuptools"]["package-data"][package]:
        found = glob.glob(pattern, root_dir=folder, recursive=True)
        assert found or pattern in to_come, f"{pattern} matches nothing"
        covered |= {f"{package}/{name}" for name in found}
    assert {name for name in package_files(package) if not name.endswith(".py")} <= covered


def test_the_two_distributions_go_together() -> None:
    """moeq asks for the kernels of its own repository, and both for the same torch, numba and Python."""
    kernels = tomllib.loads((ROOTS["moeq_kernels"] / "pyproject.toml").read_text("utf-8"))["project"]
    needed = {one.name: one for one in map(Requirement, PROJECT["project"]["dependencies"])}
    assert needed["moeq-kernels"].specifier.contains(moeq_kernels.version.__version__)
    for one in map(Requirement, kernels["dependencies"]):
        assert needed[one.name] == one
    assert kernels["requires-python"] == PROJECT["project"]["requires-python"]


def test_versions_of_python_are_those_of_the_table() -> None:
    """Classifiers name what docs/install.md says ran or was resolved."""
    page = (ROOT / "docs" / "install.md").read_text("utf-8")
    named = [one.rpartition(" ")[2] for one in PROJECT["project"]["classifiers"] if one.startswith("Programming")]
    rows = [line.split("|")[1].strip() for line in page.splitlines() if line.startswith("| 3.")]
    assert named == rows


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the source distribution, the wheel made of it, and in `direct` the one made of the tree."""
    if find_spec("build") is None:
        pytest.skip("build is not installed: pip install -c constraints.txt -e '.[test]'")
    folder = tmp_path_factory.mktemp("built")
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True
    )
    if listed.returncode:
        pytest.skip("not a git repository")
    for name in listed.stdout.splitlines():
        if (ROOT / name).is_file():
            (folder / "tree" / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, folder / "tree" / name)
    for options in (["--outdir", "../dist"], ["--wheel", "--outdir", "../direct"],
                    ["--outdir", "../kernels", "moeq-kernels"], ["--wheel", "--outdir", "../vllm", "moeq-vllm"],
                    ["--wheel", "--outdir", "../sglang", "moeq-sglang"]):  # fmt: skip
        command = [sys.executable, "-m", "build", *options]
        done = subprocess.run(command, cwd=folder / "tree", capture_output=True, text=True, timeout=500)
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return folder


def wheel(folder: Path) -> Path:
    (found,) = folder.glob("*.whl")
    return found


@pytest.mark.full
def test_the_wheel_holds_the_package_its_licences_and_nothing_else(built: Path) -> None:
    with zipfile.ZipFile(wheel(built / "dist")) as archive:
        files = {name: archive.read(name) for name in archive.namelist() if not name.endswith("/")}
    info = f"moeq-{__version__}.dist-info"
    about = {name for name in files if name.startswith(info)}
    assert set(files) - about == package_files()
    licences = {f"{info}/licenses/{name}" for name in PROJECT["project"]["license-files"]}
    assert about == licences | {f"{info}/{name}" for name in ("METADATA", "RECORD", "WHEEL", "entry_points.txt",
                                                              "top_level.txt")}  # fmt: skip
    assert files[f"{info}/top_level.txt"].split() == [b"moeq"]
    metadata = BytesParser().parsebytes(files[f"{info}/METADATA"])
    assert metadata["Version"] == __version__
    assert metadata["Description-Content-Type"] == "text/markdown"
    assert files[f"{info}/METADATA"].partition(b"\n\n")[2] == (ROOT / "README.md").read_bytes()
    assert metadata["License-Expression"] == PROJECT["project"]["license"]


@pytest.mark.full
@pytest.mark.parametrize("name", ["kernels", "vllm", "sglang"])
def test_the_other_wheels_hold_their_packages_the_licence_and_nothing_else(name: str, built: Path) -> None:
    with zipfile.ZipFile(wheel(built / name)) as archive:
        names = {name for name in archive.namelist() if not name.endswith("/")}
        licences = [archive.read(name) for name in names if name.endswith(".dist-info/licenses/LICENSE")]
    assert {name for name in names if ".dist-info/" not in name} == package_files(f"moeq_{name}", ROOT / f"moeq-{name}")
    assert licences == [(ROOT / "LICENSE").read_bytes()]


@pytest.mark.full
def test_the_source_distribution_makes_the_same_wheel_and_has_no_tests(built: Path) -> None:
    found, direct = (zipfile.ZipFile(wheel(built / folder)) for folder in ("dist", "direct"))
    with found, direct:
        assert sorted(found.namelist()) == sorted(direct.namelist())
        for name in found.namelist():
            assert found.read(name) == direct.read(name), name
    (source,) = (built / "dist").glob("*.tar.gz")
    with tarfile.open(source) as archive:
        names = {member.name.partition("/")[2] for member in archive.getmembers() if member.isfile()}
    beside = {name for name in names if not name.startswith(("moeq/", "moeq.egg-info/"))}
    assert beside == {"CHANGELOG.md", "LICENSE", "MANIFEST.in", "PKG-INFO", "README.md", "THIRD_PARTY.md",
                      "constraints.txt", "pyproject.toml", "setup.cfg"}  # fmt: skip
    assert {name for name in names if name.startswith("moeq/")} == package_files()


@pytest.mark.full
def test_the_installed_wheel_runs_the_demo_outside_of_the_repository(built: Path, tmp_path: Path) -> None:
    site = tmp_path / "site"
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", str(site)]
    wheels = [str(wheel(built / folder)) for folder in ("dist", "kernels")]
    subprocess.run([*install, *wheels], check=True, cwd=tmp_path, timeout=200)
    shutil.copyfile(ROOT / "recipes" / "demo.yaml", tmp_path / "demo.yaml")
    env = os.environ | {"PYTHONPATH": str(site), "PYTHONSAFEPATH": "1"}

    def run(*words: str) -> str:
        done = subprocess.run(
            [sys.executable, *words], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=500
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert run("-c", "import moeq; print(moeq.__file__)").strip() == str(site / "moeq" / "__init__.py")
    command = str(site / "bin" / "moeq")
    assert run(command, "--version").strip() == f"moeq {__version__}"
    settings = [word for setting in LESS for word in ("--set", setting)]
    run(command, "run", "demo.yaml", "--out", "demo-out", "--quiet", *settings)
    assert (tmp_path / "demo-out" / "report" / "report.html").is_file()
    told = json.loads(run(command, "inspect", "demo-out/checkpoint", "--json"))
    assert told["kind"] == "moeq checkpoint"
    continued = run(command, "generate", "demo-out/checkpoint", "Once upon a time", "--max-new-tokens", "2")
    assert continued.startswith("Once upon a time")
    assert len(continued) > len("Once upon a time\n")
