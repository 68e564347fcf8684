"""Hostile files and tensors: moeq's own errors, in little time and memory; `make test-full` tries 100,000."""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import resource
import subprocess
import sys
import time
import tracemalloc
from pathlib import Path

import pytest
from cases import examples
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from robustness.fuzzing import FILES, SPARE_BYTES, TARGETS, Fuzzed, readers
from robustness.fuzzing.made import exported
from safetensors.torch import save_file
from tiny_models import FULL
from torch import zeros

import moeq
import moeq_kernels
from moeq.artifacts.reading import inside, parse_json, plain_name, relative_name, safetensors_header
from moeq.errors import ArtifactError, ModelError
from moeq.models.source import INDEX, open_source

EXAMPLES = 100_000 // len(TARGETS) if FULL else 25
GROWTH_BYTES = 256 << 20  # of the process, over all inputs
ATHERIS_RUNS = 100_000 if FULL else 2_000


@pytest.fixture(scope="module")
def checkpoint(tiny_mixtral: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return exported(tmp_path_factory.mktemp("fuzz"), tiny_mixtral)


@pytest.fixture(scope="module")
def fuzzed(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Fuzzed:
    return Fuzzed(tmp_path_factory.mktemp("fuzzed") / "inputs", checkpoint)


@pytest.mark.cases(31)
@pytest.mark.parametrize("target", TARGETS)
def test_valid_inputs_are_read(fuzzed: Fuzzed, target: str) -> None:
    """Else nothing but the first check would be fuzzed."""
    assert fuzzed.run(target, fuzzed.valid(target)) == "read"


def test_every_reader_has_a_target_or_a_reason() -> None:
    """A new function that reads a file, an option or standard input fails here until readers.py has its line."""
    listed = {*readers.BY_TARGET, *readers.ELSEWHERE}
    found = set(readers.found())
    assert found - listed == set(), "give it a target, and both a line in readers.py"
    assert listed - found == set(), "they are gone, or read no longer"
    assert not set(readers.BY_TARGET) & set(readers.ELSEWHERE)
    reached = {target for targets in readers.BY_TARGET.values() for target in targets}
    assert reached <= set(TARGETS)


def test_a_reader_without_a_line_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = tmp_path / "moeq"
    root.mkdir()
    (root / "new.py").write_text(
        "class A:\n def f(self, path): return open(path).read()\ndef read_x(p): ...\ndef w(p): open(p, 'wb')\n"
        "def g(p): return {'a': json.loads(p)}\n"
    )
    monkeypatch.setattr(readers, "ROOTS", [root])
    assert sorted(readers.found()) == ["moeq.new.A.f", "moeq.new.g", "moeq.new.read_x"]


@pytest.mark.cases(7)
@pytest.mark.parametrize("target", TARGETS)
def test_mutated_inputs_are_refused_or_read(fuzzed: Fuzzed, target: str) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    outcomes: set[str] = set()

    @settings(max_examples=EXAMPLES, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(seed=st.integers(0, 2**63))
    def sweep(seed: int) -> None:
        outcomes.add(fuzzed.run(target, fuzzed.mutated(target, seed)))

    sweep()
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    assert grown < GROWTH_BYTES
    assert "refused" in outcomes or not TARGETS[target].refuses


@settings(max_examples=examples(200), deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.binary(max_size=200))
def test_random_bytes_are_no_header(fuzzed: Fuzzed, data: bytes) -> None:
    for header in (data, len(data).to_bytes(8, "little") + data):
        assert fuzzed.run("header", header) == "refused" or b"{" in data


@pytest.mark.cases(2)
@pytest.mark.parametrize("text", [b"[]," * 400_000, b'{"a":' * 300_000, b"1," * 600_000, b"9" * 1_000_000])
def test_a_header_of_structure_alone_takes_no_multiple_of_its_bytes(tmp_path: Path, text: bytes) -> None:
    path = tmp_path / "model.safetensors"
    text = b'{"a": [' + text + b"0]}"
    path.write_bytes(len(text).to_bytes(8, "little") + text)
    tracemalloc.start()
    began = time.perf_counter()
    with pytest.raises(ValueError, match=r"header|nested|digits"):
        safetensors_header(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert time.perf_counter() - began < 5
    assert peak <= 2 * len(text) + SPARE_BYTES


def _entry(dtype: str, shape: list[int], start: int, stop: int) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, stop]}


WRONG = {
    "overlap": ({"a": _entry("U8", [8], 0, 8), "b": _entry("U8", [4], 4, 8)}, 8, "overlap"),
    "hole": ({"a": _entry("U8", [4], 0, 4), "b": _entry("U8", [2], 6, 8)}, 8, "hole"),
    "hole before": ({"a": _entry("U8", [4], 4, 8)}, 8, "hole"),
    "beyond the end": ({"a": _entry("U8", [9], 0, 9)}, 8, "truncated"),
    "rest": ({"a": _entry("U8", [4], 0, 4)}, 8, "truncated"),
    "dtype": ({"a": _entry("U7", [8], 0, 8)}, 8, "dtype 'U7'"),
    "bytes": ({"a": _entry("F32", [8], 0, 8)}, 8, "take 32 bytes"),
    "backwards": ({"a": _entry("U8", [8], 8, 0)}, 8, "offsets -8"),
    "negative": ({"a": _entry("U8", [-8], 0, 8)}, 8, "list of sizes"),
    "huge": ({"a": _entry("U8", [2**40], 0, 2**40)}, 8, "truncated"),
    "overflow": ({"a": _entry("U8", [2**40, 2**40], 0, 8)}, 8, "can be counted"),
    "half a byte": ({"a": _entry("F4", [3], 0, 1)}, 1, "odd number"),
    "more keys": ({"a": _entry("U8", [8], 0, 8) | {"x": 1}}, 8, "needs dtype"),
    "metadata": ({"__metadata__": {"a": 1}}, 0, "object of strings"),
}


@pytest.mark.parametrize("what", list(WRONG))
def test_each_check_of_a_header(tmp_path: Path, what: str) -> None:
    header, size, message = WRONG[what]
    text = json.dumps(header).encode()
    (tmp_path / "x").write_bytes(len(text).to_bytes(8, "little") + text + b"\0" * size)
    with pytest.raises(ValueError, match=message):
        safetensors_header(tmp_path / "x")


@pytest.mark.parametrize("text", ["NaN", "-Infinity", "1e999", '{"a": 1, "a": 1}', '"\\ud800"', "[" * 99_999])
def test_json_that_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"JSON|twice|large|surrogates|nested"):
        parse_json(text)


@pytest.mark.parametrize("name", ["", ".", "..", "../x", "/x", "a/b", "a\\b", "a\0", "x" * 256, 3, None, "\ud800"])
def test_names_that_are_not_plain(name: object, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"name|surrogates"):
        plain_name(name)
    with pytest.raises(ValueError, match=r"name|surrogates"):
        inside(tmp_path, name)
    assert relative_name("a/b.json") == "a/b.json"
    with pytest.raises(ValueError, match="name"):
        relative_name("a/../b")


def test_links_may_not_lead_out_but_in_the_hubs_cache(tmp_path: Path) -> None:
    snapshot, blobs = tmp_path / "models--x" / "snapshots" / "abc", tmp_path / "models--x" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    (blobs / "1").write_text("x")
    (tmp_path / "secret").write_text("x")
    (snapshot / "in").symlink_to("../../blobs/1")
    (snapshot / "out").symlink_to(tmp_path / "secret")
    assert inside(snapshot, "in").read_text() == "x"
    with pytest.raises(ValueError, match="leads out"):
        inside(snapshot, "out")
    (tmp_path / "plain").mkdir()
    (tmp_path / "plain" / "out").symlink_to(blobs / "1")
    with pytest.raises(ValueError, match="leads out"):
        inside(tmp_path / "plain", "out")


@pytest.mark.parametrize(
    "change",
    [
        {"num_local_experts": 10**12},
        {"num_hidden_layers": 10**12},
        {"hidden_size": 2**40},
        {"text": {"head_dim": 2**50}},
    ],
)
def test_stated_counts_are_compared_with_the_weights(tmp_path: Path, change: dict[str, object]) -> None:
    save_file({"a": zeros(4, 4)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mixtral", **change}))
    tracemalloc.start()
    began = time.perf_counter()
    with pytest.raises(ModelError, match=r"cannot have that many"):
        open_source(str(tmp_path))
    assert time.perf_counter() - began < 1
    assert tracemalloc.get_traced_memory()[1] < SPARE_BYTES
    tracemalloc.stop()


@pytest.mark.parametrize("shard", ["../model.safetensors", "/etc/passwd", 7, None, ["a"]])
def test_an_index_names_files_of_its_own_directory(tmp_path: Path, shard: object) -> None:
    save_file({"a": zeros(4, 4)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text('{"model_type": "mixtral"}')
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"a": shard}}))
    with pytest.raises(ModelError, match="not a weight index"):
        open_source(str(tmp_path))


def test_a_packed_checkpoint_with_other_sizes_is_refused_before_it_is_loaded(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers allocates what it does not find: the packed tensors are compared with the headers first."""
    from transformers import AutoModelForCausalLM

    for path in checkpoint.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    config = json.loads((tmp_path / "config.json").read_text("utf-8"))
    config["intermediate_size"] = 2**30
    (tmp_path / "config.json").write_text(json.dumps(config))
    began = time.perf_counter()
    with pytest.raises(ArtifactError, match=r"codes is \[.*config.json wants \[1073741824"):
        AutoModelForCausalLM.from_pretrained(tmp_path)
    assert time.perf_counter() - began < 30


@pytest.mark.full
def test_moeq_reads_no_pickle() -> None:
    """No pickle, no torch.load, no marshal, no shelve, nothing that evaluates text, no unsafe YAML.

    Pickles are what the processes of an engine tell each other, through pipes and files of a folder of their own."""
    packages = (moeq, moeq_kernels)
    roots = [Path(package.__file__).parent for package in packages if package.__file__ is not None]
    files = [path for root in roots for path in root.rglob("*.py") if "bundled" not in path.parts]
    assert len(files) > 100
    for path in files:
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            where = f"{path}:{getattr(node, 'lineno', 0)}"
            if isinstance(node, ast.Import | ast.ImportFrom):
                names = [node.module or ""] if isinstance(node, ast.ImportFrom) else [one.name for one in node.names]
                banned = {"pickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"}
                own = {"pickle"} if path.parent.name == "engine" or path.name == "losses_tasks.py" else set()
                assert not {name.split(".")[0] for name in names} & (banned - own), where
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                called = f"{node.value.id}.{node.attr}"
                assert called not in {"torch.load", "yaml.load", "yaml.unsafe_load", "np.load"}, where
                if path.name != "placements.py":  # which writes a map in the only form that KTransformers reads
                    assert called != "torch.save", where
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                assert node.func.id not in {"eval", "exec"}, where
            if isinstance(node, ast.keyword):
                assert node.arg != "allow_pickle", where


@pytest.mark.skipif(
    importlib.util.find_spec("atheris") is None, reason="atheris is not installed: pip install '.[fuzz]'"
)
@pytest.mark.parametrize("target", FILES)
def test_atheris_finds_nothing(checkpoint: Path, tmp_path: Path, target: str) -> None:
    script = Path(__file__).with_name("fuzz_atheris.py")
    runs = ATHERIS_RUNS // len(FILES)
    command = [sys.executable, script, target, checkpoint, tmp_path / "work", f"-runs={runs}", "-timeout=20"]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(script.parents[1]), os.environ.get("PYTHONPATH", "")])
    }
    finished = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert finished.returncode == 0, finished.stderr[-3000:]
    assert f"Done {runs} runs" in finished.stderr


def test_the_bounds_are_noticed(fuzzed: Fuzzed, monkeypatch: pytest.MonkeyPatch) -> None:
    """The harness itself notices what it should: an error of another kind, two lines, time, memory, what is unsound."""
    header = fuzzed.target("header")

    def reads(read: object) -> None:
        monkeypatch.setattr(header, "read", read)
        fuzzed.run("header", b"")

    with pytest.raises(AssertionError, match="bytes for 0"):
        reads(lambda data: bytearray(10 << 20) and None)
    with pytest.raises(KeyError):
        reads(lambda data: {}[data])
    with pytest.raises(AssertionError, match="not one line"):
        reads(lambda data: refuse("wrong"))
    monkeypatch.setattr(header, "read", lambda data: refuse("wrong", where="here", do="mend it"))
    assert fuzzed.run("header", b"") == "refused"
    with pytest.raises(AssertionError, match="unsound"):
        reads(lambda data: lambda: unsound())
    monkeypatch.setattr("robustness.fuzzing.target.SECONDS", -1.0)
    with pytest.raises(AssertionError, match=r" s$"):
        reads(lambda data: None)
    assert not tracemalloc.is_tracing()


def refuse(what: str, **place: str) -> None:
    raise ArtifactError(what, **place)


def unsound() -> None:
    raise AssertionError("unsound")
