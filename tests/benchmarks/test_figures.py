"""What benchmarks share: goals and exit codes, --quick, the file of a run, and the tables made of such files."""

from __future__ import annotations

import json
import math
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import bench
import figures
import pytest

SMALL = """
import sys
sys.path.insert(0, {folder!r})
import figures
options = figures.arguments("A benchmark.", rounds=(9, 2), sizes=([4, 8], [4]), slow=False)
found = figures.Figures(options)
found.add("rounds", options.rounds, "of them", at_most=5, digits=0)
found.add("sizes", len(options.sizes), at_least=1)
found.add("level", 7.0, "MB")
found.table(["size", "seconds"], [["4", "0.1"]])
found.left_out("a peer", "it is not installed")
if __name__ == "__main__":
    sys.exit(found.report())
"""


@pytest.fixture
def small(tmp_path: Path) -> Path:
    (tmp_path / "small.py").write_text(SMALL.format(folder=str(Path(figures.__file__).parent)))
    return tmp_path / "small.py"


def call(program: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(program), *words], capture_output=True, text=True)


@pytest.mark.parametrize(
    ("value", "goal", "met"),
    [
        (0.25, {"at_most": 0.25}, True),
        (0.26, {"at_most": 0.25}, False),
        (0.6, {"at_least": 0.6}, True),
        (0.59, {"at_least": 0.6}, False),
        (1e9, {}, True),
        (math.nan, {"at_most": 1}, False),
        (math.inf, {}, False),
        (-math.inf, {"at_most": 1}, False),
    ],
)
def test_goals(value: float, goal: dict[str, float], met: bool) -> None:
    figure = figures.Figure(name="one", value=value, **goal)
    assert figure.met is met
    assert figure.cells()[2] == ("met" if met else "MISSED")
    again = bench.read_figure(json.loads(json.dumps(figure.as_json(), allow_nan=False)))
    assert again.met is met


def test_the_exit_code_is_that_of_the_goals(small: Path, tmp_path: Path) -> None:
    whole, quick = call(small), call(small, "--quick", "--json", str(tmp_path / "made" / "small.json"))
    assert (whole.returncode, quick.returncode) == (1, 0), whole.stderr + quick.stderr
    assert whole.stdout.splitlines()[-1] == "small: 1 of 2 goals met; MISSED: rounds 9 of them (goal at most 5)"
    assert quick.stdout.splitlines()[-1] == "small: 2 of 2 goals met"
    assert "a peer left out: it is not installed" in quick.stdout
    written = json.loads((tmp_path / "made" / "small.json").read_text())
    assert written["command"] == "python benchmarks/small.py --quick"
    assert written["quick"] is True
    assert {"date", "commit", "machine", "seconds"} <= set(written)
    assert [(one["name"], one["met"]) for one in written["figures"]] == [
        ("rounds", True),
        ("sizes", True),
        ("level", True),
    ]
    assert call(small, "--quick", "--rounds", "6").returncode == 1  # what is given goes before what --quick says


def found(name: str, value: float, code: int = 0, **goal: float) -> dict[str, Any]:
    figure = figures.Figure(name="figure", value=value, **goal)
    return {"benchmark": name, "figures": [figure.as_json()], "left_out": [], "code": code, "took": 1.0}


def test_one_table_of_all(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.summary([found("a", 1, at_most=2), found("b", 3, at_least=2)]) == 0
    assert bench.summary([found("a", 1, at_most=2), found("b", 1, code=1, at_least=2)]) == 1
    assert capsys.readouterr().out.splitlines()[-1] == "b: figure 1.00 (goal at least 2.00)"
    assert bench.summary([found("a", 1, at_most=2), found("b", 1, code=2)]) == 1
    assert capsys.readouterr().out.splitlines()[-1] == "b: failed, exit code 2"
    crashed = {"benchmark": "c", "figures": [], "left_out": [], "code": -9, "took": 1.0}
    assert bench.summary([crashed]) == 1
    left_out = crashed | {"code": 0, "left_out": ["c left out: no GPU"]}
    assert bench.summary([left_out]) == 0
    assert "c: c left out: no GPU" in capsys.readouterr().out


def test_a_benchmark_that_fails_or_hangs_is_missed(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench, "HERE", tmp_path)
    (tmp_path / "broken.py").write_text("raise SystemExit(2)")
    (tmp_path / "endless.py").write_text("import time; time.sleep(60)")
    assert bench.run("small", tmp_path, full=False)["code"] == 0
    assert bench.run("broken", tmp_path, full=False)["code"] == 2
    monkeypatch.setattr(bench, "LIMIT_SECONDS", 0.5)
    stopped = bench.run("endless", tmp_path, full=False)
    assert stopped["code"] == -1
    assert bench.summary([stopped]) == 1
    assert "endless: failed, exit code -1" in capfd.readouterr().out


def test_tables_are_made_of_the_files(small: Path, tmp_path: Path) -> None:
    kept, results, made = tmp_path / "results", tmp_path / "RESULTS.md", tmp_path / "made"
    results.write_text("# Results\nProse.\n\n<!-- small -->\nold\n<!-- /small -->\nMore prose.\n")
    call(small, "--quick", "--json", str(made / "small.json"))
    shutil.copyfile(made / "small.json", made / "another.json")
    assert bench.record(made, kept, results) == ["another", "small"]
    text = results.read_text()
    assert "| rounds | 2 of them | at most 5 | met |" in text
    assert "| size | seconds |\n|---|---:|\n| 4 | 0.1 |" in text
    assert text.startswith("# Results\nProse.\n\n<!-- small -->\n`python benchmarks/small.py --quick` (")
    assert "old" not in text
    assert "<!-- /small -->\nMore prose.\n" in text
    assert "<!-- /another -->" in text
    assert bench.with_tables(text, kept) == text
    (kept / "small.json").unlink()
    with pytest.raises(SystemExit, match="it is not there"):
        bench.with_tables(text, kept)


def test_results_show_what_the_kept_files_say() -> None:
    """Of a benchmark there may be several, of several machines."""
    text = bench.RESULTS.read_text("utf-8")
    assert bench.with_tables(text, bench.KEPT) == text
    shown = {match[2] for match in bench.MARKED.finditer(text)}
    made_by = {path.stem: json.loads(path.read_text("utf-8"))["benchmark"] for path in bench.KEPT.glob("*.json")}
    assert shown == set(made_by)
    assert set(made_by.values()) <= set(bench.names())
    assert all(name.startswith(benchmark) for name, benchmark in made_by.items())


@pytest.mark.full
@pytest.mark.parametrize("name", bench.names())
def test_every_benchmark_knows_its_options(name: str) -> None:
    """Two of them have one name where a benchmark adds its own to those of the models that it takes."""
    command = [sys.executable, str(bench.HERE / f"{name}.py"), "--help"]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert answer.returncode == 0, answer.stderr[-1000:]
    assert "--json" in answer.stdout


def test_every_benchmark_reports_figures() -> None:
    """A file of the folder reports figures, or another starts it, or others import it."""
    started = {"bench", "gpu", "gpu_wheels", "vision_models"}  # by a user, or by another's command line
    started |= {
        "cpu_peers_worker",
        "decode_worker",
        "gptq_worker",
        "quality_peer",
        "serving_worker",
        "whole_model_worker",
    }
    texts = {path.stem: path.read_text("utf-8") for path in bench.HERE.glob("*.py")}
    programs = {name for name, text in texts.items() if 'if __name__ == "__main__":' in text}
    assert programs - started == set(bench.names())
    imported = {
        word for text in texts.values() for word in re.findall(r"^\s*(?:import|from) (\w+)", text, re.MULTILINE)
    }
    assert set(texts) - programs <= imported
