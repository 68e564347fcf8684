"""What docs/security.md claims and no other test shows: locks, notices, what moeq never calls, links and terminals."""

from __future__ import annotations

import ast
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from functools import cache
from importlib.metadata import PackageNotFoundError, distributions, version
from pathlib import Path

import pytest
import update_notices
from audit import verdict
from documents import ROOT
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version
from typer.testing import CliRunner
from update_lock import CUDA, EXTRAS, LOCKS, Pin, environments, parse, read

from moeq.artifacts.files import building, claimed, held, locked, make_directory, write_text
from moeq.bundled import bundled_path
from moeq.cli import app
from moeq.errors import EvaluationError, ModelError, MoeqError, StorageError
from moeq.generation import prompt_ids
from moeq.models.loading import load_tokenizer
from moeq.models.source import open_source, read_header

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
OWN = tomllib.loads((ROOT / "moeq-kernels" / "pyproject.toml").read_text("utf-8"))["project"]
NAMES = sorted(path.stem for path in LOCKS.glob("*.txt"))
INSTALLED = ("build", "cpu", "run", "test", "docs", "cuda", "triton")
SHA256 = re.compile(r"sha256:[0-9a-f]{64}")
CALLS = {  # what runs text, a shell or pickled code, by its dotted name
    "eval", "exec", "compile", "__import__", "os.system", "os.popen", "os.fork", "os.posix_spawn", "torch.load",
    "yaml.load", "yaml.load_all", "yaml.unsafe_load", "yaml.full_load", "tempfile.mktemp", "pandas.read_pickle",
    "np.load", "numpy.load",
}  # fmt: skip
MODULES = {"pickle", "dill", "cloudpickle", "marshal", "shelve", "joblib", "telnetlib", "ftplib"}
PACKAGES = (ROOT / "moeq", ROOT / "moeq-kernels" / "moeq_kernels")
NETWORK = {"socket", "http", "urllib", "requests", "httpx", "httpx2", "aiohttp", "ssl", "smtplib"}


def locked_here() -> dict[str, Pin]:
    """Everything that `make` and `make docs` install on some machine, but for torch's CPU build."""
    return {name: pin for file in INSTALLED if file != "cpu" for name, pin in read(file).items()}


@pytest.mark.parametrize("name", NAMES)
def test_every_package_has_one_version_and_digests(name: str) -> None:
    text = (LOCKS / f"{name}.txt").read_text("utf-8")
    pins = read(name)
    assert pins
    stated = [line for line in text.splitlines() if re.match(r"[A-Za-z0-9]", line)]
    assert len(stated) == len(pins), "every line that begins a requirement is one"
    for pin in pins.values():
        Version(pin.version)
        assert pin.hashes, f"{pin.name} has no digest"
        assert all(map(SHA256.fullmatch, pin.hashes)), pin.name
        assert pin.on_linux, f"{pin.name} is never installed"


def test_a_package_without_a_digest_would_be_seen() -> None:
    pins = parse("a==1.0 \\\n    --hash=sha256:" + "0" * 64 + "\n    # via moeq\nb==2 ; sys_platform == 'win32'\n")
    assert pins["a"].hashes == ("sha256:" + "0" * 64,)
    assert pins["a"].parents == {"moeq"}
    assert not pins["b"].hashes
    assert not pins["b"].on_linux


def test_the_locks_are_the_constraints() -> None:
    """constraints.txt says what people chose, locks/ what follows: no version differs."""
    lines = (ROOT / "constraints.txt").read_text("utf-8").splitlines()
    chosen = {canonicalize_name(one.name): one for one in map(Requirement, lines[1:])}
    for name in NAMES:
        for pin in read(name).values():
            if pin.name in chosen:
                (specifier,) = chosen[pin.name].specifier
                assert Version(pin.version).public == specifier.version, f"{pin.name} of locks/{name}.txt: make lock"
    missing = set(chosen) - set(locked_here()) - set(read("tools"))
    assert missing == {"atheris"}, "only what no lock installs"


def test_what_the_project_asks_for_is_locked() -> None:
    """Every requirement of the extras that are installed, and every package that another one needs."""
    project, pins = PROJECT["project"], locked_here()
    extras = [extra for names in EXTRAS.values() for extra in names]
    asked = [
        *OWN["dependencies"],
        *project["dependencies"],
        *(one for name in extras for one in project["optional-dependencies"][name]),
    ]
    for one in map(Requirement, asked):
        if one.name == OWN["name"]:
            continue  # of this repository
        pin = pins.get(canonicalize_name(one.name))
        assert pin is not None, f"{one.name}: make lock"
        assert one.specifier.contains(pin.version), f"{one} of pyproject.toml, {pin.version} of locks/: make lock"
    for one in map(Requirement, PROJECT["dependency-groups"]["tools"]):
        assert one.specifier.contains(read("tools")[canonicalize_name(one.name)].version)
    build, run = read("build"), read("run")
    assert build["setuptools"].requirement == run["setuptools"].requirement
    assert all(CUDA.fullmatch(name) for name in read("cuda"))
    files = [read(name) for name in ("run", "test", "docs", "cuda", "triton")]
    assert sum(map(len, files)) == len({name for file in files for name in file}), "no package is in two files"


def test_what_installed_packages_need_is_locked() -> None:
    """The closure, by the metadata of what is installed here: nothing would be fetched without a digest."""
    pins = locked_here()
    here = next(one for one in environments() if one["python_version"] == f"3.{sys.version_info.minor}")
    looked = 0
    for one in distributions():
        if canonicalize_name(one.name) not in {**read("run"), **read("test")}:
            continue
        looked += 1
        for needed in map(Requirement, one.requires or ()):
            if needed.marker is None or needed.marker.evaluate(here):
                assert canonicalize_name(needed.name) in pins, f"{one.name} needs {needed}: make lock"
    assert looked > 50


def test_make_installs_from_the_locks_alone() -> None:
    """pip is asked for nothing but lock files, with digests, and the tree itself without dependencies."""
    makefile = (ROOT / "Makefile").read_text("utf-8")
    rules = {
        name: makefile.partition(f"\n{name}:")[2].partition("\n\n")[0] for name in ("$(INSTALLED)", "$(TOOLS)", "docs")
    }
    assert "LOCKED := -m pip install --quiet --no-deps --require-hashes\n" in makefile
    for name, rule in rules.items():
        assert "$(LOCKED)" in rule, name
        for line in re.findall(r"pip install (.*)", rule):
            assert line == "--quiet --no-deps --no-build-isolation -e ./moeq-kernels -e ."


def test_the_notices_are_of_what_is_locked() -> None:
    """Names and versions of THIRD_PARTY.md are those of locks/run.txt; each has a licence."""
    written = update_notices.NOTICES.read_text("utf-8")
    head, _, table = written.partition("| package | version | licence |\n|---|---|---|\n")
    assert update_notices.HEAD.startswith(head), "run `make notices`"
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()]
    assert {canonicalize_name(name): stated for name, stated, _ in rows} == {
        name: pin.version for name, pin in read("run").items()
    }, "run `make notices`"
    assert [name for name, _, licence in rows if licence in ("", "not stated")] == []


def test_the_notices_are_up_to_date_where_the_lock_is_installed() -> None:
    try:
        same = all(Version(version(name)).public == pin.version for name, pin in read("run").items())
    except PackageNotFoundError:
        same = False
    if not same:
        pytest.skip("other versions are installed than locks/run.txt has")
    assert update_notices.NOTICES.read_text("utf-8") == update_notices.text(), "run `make notices`"


def test_an_audit_never_passes_unseen() -> None:
    """pip-audit itself says 'no known vulnerabilities' where its database knew none of the packages."""
    seen = {"name": "a", "version": "1", "vulns": []}
    bad = {"name": "b", "version": "2", "vulns": [{"id": "PYSEC-1", "fix_versions": ["3"]}]}
    unseen = {"name": "c", "skip_reason": "not found"}
    assert verdict(None, "Traceback\nConnectionError: no route") == (
        0, ["audit: NOT RUN: no database of advisories could be reached (ConnectionError: no route)"],
    )  # fmt: skip
    assert verdict({"dependencies": [unseen]}, "") == (
        0, ["audit: NOT RUN: the database that was reached knows none of 1 packages"],
    )  # fmt: skip
    assert verdict({"dependencies": [seen]}, "") == (0, ["audit: 1 packages, 0 advisories"])
    assert verdict({"dependencies": [seen, bad, unseen]}, "") == (
        1,
        [
            "audit: b 2: PYSEC-1, mended in 3",
            "audit: NOT RUN for 1 of 3 packages: c",
            "audit: 2 packages, 1 advisories",
        ],
    )


@pytest.mark.full
def test_the_sbom_is_cyclonedx_and_names_what_is_installed(tmp_path: Path) -> None:
    """The tool's own check against the standard's schema, and every distribution of this environment."""
    tool = ROOT / ".tools" / "bin" / "python"
    if not tool.is_file():
        pytest.skip("cyclonedx-bom is not installed: make sbom")
    out = tmp_path / "moeq.cdx.json"
    command = [tool, "-m", "cyclonedx_py", "environment", "--pyproject", ROOT / "pyproject.toml", "--validate",
               "--output-reproducible", "--output-format", "JSON", "--output-file", out, sys.executable]  # fmt: skip
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    made = json.loads(out.read_text("utf-8"))
    assert (made["bomFormat"], made["metadata"]["component"]["name"]) == ("CycloneDX", "moeq")
    named = {(canonicalize_name(one["name"]), one["version"]) for one in made["components"]}
    there = {(canonicalize_name(one.name), one.version) for one in distributions()}
    assert there - named <= {(canonicalize_name("moeq"), version("moeq"))}


def sources() -> list[Path]:
    found = [path for package in PACKAGES for path in package.rglob("*.py")]
    assert len(found) > 300
    return found


def test_moeq_runs_no_text_no_shell_and_no_pickle() -> None:
    for path in sources():
        for node in nodes(path):
            where = f"{path.relative_to(ROOT)}:{node.lineno}"
            if isinstance(node, ast.Call):
                called = dotted(node.func)
                assert called not in CALLS, where
                assert not called.startswith(("os.exec", "os.spawn")), where
                for argument in node.keywords:
                    value = getattr(argument.value, "value", None)
                    assert (argument.arg, value) not in {("shell", True), ("weights_only", False)}, where
                    assert argument.arg != "allow_pickle", where
            own = {"pickle"} if path.parent.name == "engine" or path.name == "losses_tasks.py" else set()
            assert not (imported(node) & {*MODULES}) - own, where  # what an engine's processes tell each other


@cache
def nodes(path: Path) -> list[ast.Call | ast.Import | ast.ImportFrom]:
    """What a file calls and imports."""
    every = ast.walk(ast.parse(path.read_text("utf-8")))
    return [node for node in every if isinstance(node, ast.Call | ast.Import | ast.ImportFrom)]


def dotted(called: ast.expr) -> str:
    """What is called, as it is written, where it is a name or an attribute of one; else nothing of what is before."""
    if isinstance(called, ast.Attribute):
        return f"{dotted(called.value)}.{called.attr}"
    return called.id if isinstance(called, ast.Name) else ""


def imported(node: ast.AST) -> set[str]:
    """The packages that an import statement names; urllib.parse, which only takes text apart, is none."""
    names = {one.name for one in node.names} if isinstance(node, ast.Import) else set()
    if isinstance(node, ast.ImportFrom) and not node.level:
        names = {node.module or ""}
    return {name.partition(".")[0] for name in names - {"urllib.parse"}}


def test_only_the_rooms_for_it_start_processes_and_none_opens_a_connection() -> None:
    starting, connecting = set(), set()
    for path in sources():
        names = {name for node in nodes(path) for name in imported(node)}
        name = path.relative_to(ROOT).as_posix()
        starting |= {name} if names & {"subprocess", "multiprocessing"} else set()
        connecting |= {name} if names & NETWORK else set()
    workers = {"moeq/engine/processes.py", "moeq/engine/worker.py"}
    assert starting == {"moeq/benching/llama_bench.py", "moeq/verification/launch.py"} | workers
    assert connecting == set()


@pytest.fixture
def victim(tmp_path: Path) -> Path:
    """A file of the user's outside of the directory that moeq is to write in."""
    path = tmp_path / "home" / "precious"
    path.parent.mkdir()
    path.write_text("mine")
    return path


@pytest.mark.parametrize("lock", [locked, held])
def test_a_lock_that_is_a_link_is_refused_and_its_end_stays(lock: object, victim: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / ".lock").symlink_to(victim)
    with pytest.raises(StorageError), lock(run):  # type: ignore[operator]
        pass
    (tmp_path / ".new.lock").symlink_to(victim)
    with pytest.raises(StorageError), claimed(tmp_path / "new"):
        pass
    assert victim.read_text() == "mine"


def test_what_is_written_goes_through_no_link(victim: Path, tmp_path: Path) -> None:
    """Neither a half-written file nor a half-written directory that a link stands for."""
    (tmp_path / "note.txt.partial").symlink_to(victim)
    (tmp_path / "note.txt").symlink_to(victim)
    write_text(tmp_path / "note.txt", "ours")
    for progress in ((), ("*.part",)):
        (tmp_path / f"made.{'begun' if progress else 'partial'}").symlink_to(victim.parent)
        with building(tmp_path / "made", progress=progress) as unfinished:
            write_text(unfinished / "precious", "ours")
    assert victim.read_text() == "mine"
    assert os.listdir(victim.parent) == ["precious"]
    assert (tmp_path / "note.txt").read_text() == "ours"
    assert not (tmp_path / "note.txt").is_symlink()
    assert (tmp_path / "made" / "precious").read_text() == "ours"
    (tmp_path / "cut").symlink_to("nothing")
    with pytest.raises(StorageError, match=r"/cut: a link that leads to nothing; remove it, or make what it names"):
        make_directory(tmp_path / "cut" / "deeper")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A copy of the bundled model."""
    return Path(shutil.copytree(bundled_path("tiny-mixtral"), tmp_path / "model"))


def change(model: Path, **changes: object) -> None:
    config = json.loads((model / "config.json").read_text("utf-8"))
    (model / "config.json").write_text(json.dumps(config | changes))


def test_names_of_others_are_shown_and_not_obeyed_by_the_terminal(model: Path) -> None:
    """Escape sequences in a configuration: in what is printed, and in errors."""
    change(model, model_type="\x1b]0;other title\x07\x9bmixtral")
    done = CliRunner().invoke(app, ["inspect", str(model)])
    assert done.exit_code == 0
    assert "\\u001b]0;other title" in done.stdout
    assert not set(done.output) & {"\x1b", "\x07", "\x9b"}
    assert str(MoeqError("\x1b[31mred\x07", where="a\x9bb")) == "a\\u009bb: \\u001b[31mred\\u0007"


@pytest.mark.parametrize("key", ["attn_implementation", "_attn_implementation"])
@pytest.mark.parametrize("value", ["some/kernel", {"": "some/kernel@main"}])
def test_a_configuration_names_no_code_of_the_hub(model: Path, key: str, value: object) -> None:
    """transformers would fetch and run what is named so, where the package kernels is installed."""
    change(model, **{key: value})
    with pytest.raises(ModelError, match=rf"{key}: it must be one of transformers' own, no code of the hub"):
        open_source(str(model))
    change(model, **{key: "sdpa"})
    open_source(str(model))


def test_weights_beside_an_index_are_refused(model: Path) -> None:
    """transformers takes model.safetensors before what the index names."""
    tensors = read_header(model / "model.safetensors")
    shutil.copyfile(model / "model.safetensors", model / "model-00001-of-00001.safetensors")
    index = {"metadata": {}, "weight_map": dict.fromkeys(tensors, "model-00001-of-00001.safetensors")}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelError, match=r"model\.safetensors: beside model\.safetensors\.index\.json"):
        open_source(str(model))
    (model / "model.safetensors").unlink()
    assert set(open_source(str(model)).tensors) == set(tensors)


def test_a_chat_template_runs_in_a_sandbox() -> None:
    tokenizer = load_tokenizer(open_source("bundled:tiny-mixtral"))
    tokenizer.chat_template = "{{ messages[0].content }}"
    assert prompt_ids(tokenizer, "two words", chat=True) == tokenizer("two words")["input_ids"]
    tokenizer.chat_template = "{{ messages.__class__.__mro__[1].__subclasses__() }}"
    with pytest.raises(EvaluationError, match="unsafe"):
        prompt_ids(tokenizer, "two words", chat=True)
