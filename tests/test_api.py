"""From Python: the same as from the command line, with typed results and errors of one line."""

from __future__ import annotations

import inspect
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import get_type_hints

import pytest
import torch
import transformers
from fork_server import ForkServer
from pydantic import ValidationError

import moeq
from moeq import cli, starting
from moeq.errors import ArtifactError, MissingError, RecipeError, StorageError

MODEL = Path(moeq.__path__[0]) / "bundled" / "tiny-mixtral"
KEYS = {
    "name": "small",
    "corpus": {"sequences": 8, "sequence_length": 32},
    "losses": {"group_size": 16, "methods": ["gptq"], "bits": [2, 4]},
    "assign": {"method": "optimal", "bits_per_weight": 4},
    "eval": {"perplexity": {"sequences": 4, "sequence_length": 32}, "compare": []},
}


@pytest.fixture(scope="module")
def done(tiny_mixtral: Path, tmp_path_factory: pytest.TempPathFactory) -> moeq.Run:
    return moeq.run(KEYS, model=tiny_mixtral, out=tmp_path_factory.mktemp("api") / "run", quiet=True)


def test_a_run_tells_what_it_made(done: moeq.Run) -> None:
    assert [outcome.stage for outcome in done.stages][-1] == "report"
    assert not any(outcome.skipped for outcome in done.stages)
    assert {row["name"] for row in done.table} == {"original", "small"}
    assert done.recipe.assign.bits_per_weight == "4"
    assert (done.report.suffix, done.checkpoint.name) == (".html", "checkpoint")
    assert len(repr(done)) < 2000
    bars = transformers.utils.logging
    bars.enable_progress_bar()
    model = moeq.load(done.out)
    assert bars.is_progress_bar_enabled(), "those of what the caller loads next"
    assert type(model).__name__ == "MixtralForCausalLM"


def test_again_nothing_is_done_and_the_recipe_is_that_of_the_directory(done: moeq.Run, tiny_mixtral: Path) -> None:
    torch.manual_seed(5)
    drawn = torch.get_rng_state()
    again = moeq.run(out=done.out, quiet=True)
    assert torch.equal(torch.get_rng_state(), drawn), "who draws what to run next would draw the same each time"
    assert again.recipe == done.recipe.model_copy(update={"model": str(tiny_mixtral)})
    assert all(outcome.skipped for outcome in again.stages)
    assert again.table == done.table


def test_a_path_may_begin_with_a_home(done: moeq.Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From Python, and behind an option's equals sign, where shells leave it."""
    monkeypatch.setenv("HOME", str(done.out.parent))
    monkeypatch.chdir(tmp_path)
    run = f"~/{done.out.name}"
    assert moeq.run(out=run, quiet=True).report == done.report
    assert moeq.inspect(Path(run))["kind"] == "moeq run"
    for words in (
        ("watch", "--once", f"--html={run}.html", done.out),
        ("assign", f"--out={run}"),
        ("gc", f"--out={run}"),
    ):
        cli.app([*map(str, words), "--quiet"], standalone_mode=False)
    assert done.out.with_suffix(".html").is_file()
    assert list(tmp_path.iterdir()) == []


def test_stages_assignments_and_plans(done: moeq.Run, tiny_mixtral: Path, tmp_path: Path) -> None:
    threads = torch.get_num_threads()
    recipe = moeq.Recipe.model_validate({**KEYS, "assign": {"method": "uniform", "bits": 2}, "threads": threads + 1})
    moeq.stage("profile", recipe, model=tiny_mixtral, out=tmp_path / "run", quiet=True)
    assert torch.get_num_threads() == threads
    left = moeq.load_recipe(tmp_path / "run" / "recipe.yaml")
    assert (left.assign, left.losses, left.model) == (recipe.assign, recipe.losses, str(tiny_mixtral))
    assert moeq.stage("profile", out=tmp_path / "run", quiet=True).skipped  # by that recipe alone
    with pytest.raises(ArtifactError, match="moeq losses"):
        moeq.assign(recipe, model=tiny_mixtral, out=tmp_path / "run", quiet=True)
    moeq.stage("losses", recipe, model=tiny_mixtral, out=tmp_path / "run", quiet=True)
    with pytest.raises(RecipeError, match="did you mean 'rtn'"):
        moeq.assign(out=tmp_path / "run", quantizer="rtm", quiet=True)
    made = moeq.assign(recipe, model=tiny_mixtral, out=tmp_path / "run", quiet=True)
    assert made.outcome is not None
    assert made.assignment.widths() == [2]
    assert (made.prices, made.frontier) == (None, None)
    other = moeq.assign(tmp_path / "run", overrides="assign.bits=4", quiet=True)
    assert other.assignment.widths() == [4]
    moeq.assign(tmp_path / "run", overrides="assign.bits=2", quiet=True)
    looked = moeq.assign(model=tiny_mixtral, out=tmp_path / "run", look=True, prices=True, frontier=True, quiet=True)
    assert looked.outcome is None
    assert looked.assignment == made.assignment
    assert looked.prices
    assert looked.frontier
    planned = moeq.plan(out=done.out, model=tiny_mixtral, probe=False)
    assert planned.as_json()["stages"]


@pytest.mark.full
def test_what_is_measured_side_by_side(done: moeq.Run, tiny_mixtral: Path, tmp_path: Path) -> None:
    kept = tmp_path / "kept.json"
    found = moeq.evaluate(tiny_mixtral, done.checkpoint, text="bundled", window=32, out=kept, quiet=True)
    first, second = found["rows"]
    assert first["perplexity"]["perplexity"] != second["perplexity"]["perplexity"]
    assert second["divergence"]["kl"] > 0
    assert json.loads(kept.read_text("utf-8"))["rows"][1]["name"] == second["name"]


def test_the_command_line_gives_the_same(done: moeq.Run, request: pytest.FixtureRequest, tiny_mixtral: Path) -> None:
    commands: ForkServer = request.getfixturevalue("moeq")
    said = commands.run("run", "--out", str(done.out), "--model", str(tiny_mixtral), "--json")
    assert said.code == 0, said.stderr
    found = json.loads(said.stdout)
    assert found["table"] == json.loads(json.dumps(list(done.table)))
    assert found["paths"]["report"] == str(done.report)


@pytest.mark.parametrize(
    ("call", "error", "what"),
    [
        (lambda out: moeq.run({"nmae": "x"}, out=out), RecipeError, "unknown key 'nmae'.*did you mean 'name'"),
        (lambda out: moeq.run({}, out=out), RecipeError, "no model"),
        (lambda out: moeq.run({}, out=out, model="no/such/model/here"), MissingError, "no/such/model/here"),
        (lambda out: moeq.run(model="bundled:tiny-mixtral", out=out, bit=3), RecipeError, "no option 'bit'.*bits"),
        (lambda out: moeq.run({}, modle="bundled:tiny-mixtral", out=out), RecipeError, "did you mean 'model'"),
        (lambda out: moeq.run({}, out=out, for_="vllm"), RecipeError, "for_: goes without"),
        (lambda out: moeq.run({}, bits=3, size="1MiB", out=out), RecipeError, "one budget is enough"),
        (lambda out: moeq.run("bundled:tiny-mixtral", out=out, quality="bset"), RecipeError, "did you mean 'best'"),
        (lambda out: moeq.bench("bundled:tiny-mixtral", repeat=0), RecipeError, "repeat: cannot be 0"),
        (lambda out: moeq.bench("bundled:tiny-mixtral", beams=(1, 0)), RecipeError, "beams: cannot be 0"),
        (lambda out: moeq.stage("profil", {}, out=out, model="bundled:tiny-mixtral"), RecipeError, "did you mean"),
        (lambda out: moeq.evaluate(), RecipeError, "nothing to evaluate"),
        (lambda out: moeq.evaluate(["a"]), RecipeError, r"what is \['a'\]; give text or a path"),
        (lambda out: moeq.evaluate("a", tasks=[1]), RecipeError, "tasks is .1.; give text or a list, each text"),
        (lambda out: moeq.evaluate("a", include_path=3), RecipeError, "include_path is 3; give text or a path$"),
        (lambda out: moeq.evaluate("a", window="64"), RecipeError, "--window '64'; give a whole number from 2"),
        (
            lambda out: moeq.run({"losses": {"bits": (bits for bits in (2, 4))}}, out=out),
            RecipeError,
            "^recipe: losses.bits is <generator object .*; give a list$",
        ),
        (
            lambda out: moeq.run("bundled:tiny-mixtral", out=Path(__file__) / "run" / "x"),
            StorageError,
            "test_api.py/run/x: .*test_api.py is a file; choose another --out",
        ),
        (
            lambda out: moeq.run("bundled:tiny-mixtral", out="/proc/no/run"),
            StorageError,
            "^/proc/no/run: cannot create the directory: No such file or directory; check the path",
        ),
        (lambda out: moeq.inspect("/proc/self/mem"), StorageError, "^Input/output error; check the disk$"),
        (lambda out: moeq.plan("a", probe="no"), RecipeError, "probe is 'no'; give true or false"),
        (lambda out: moeq.run("a", out=""), RecipeError, "out is empty; give a path, or leave it out"),
        (lambda out: moeq.run("a", out=out, for_=3), RecipeError, "for_ is 3; give text"),
        (lambda out: moeq.run("a", out=out, refine="no"), RecipeError, "refine is 'no'; give true or false"),
        (lambda out: moeq.run(["a"], out=out), RecipeError, "recipe is .'a'.; give a recipe or a mapping or text or a"),
        (lambda out: moeq.bench("a", batches=1), RecipeError, "batches is 1; give a list"),
        (lambda out: moeq.bench("a", out=""), RecipeError, "out is empty"),
        (lambda out: moeq.convert("a", None, out), RecipeError, "to is None; give text"),
        (lambda out: moeq.verify(MODEL, certificate_chain="root.pem"), MissingError, "^root.pem: "),
        (lambda out: moeq.inspect(3), RecipeError, "path is 3; give text or a path"),
        (lambda out: moeq.load(3), RecipeError, "path is 3"),
        (
            lambda out: moeq.load("a", placement="gpu"),
            RecipeError,
            "placement is 'gpu'; give true or false or a mapping",
        ),
        (lambda out: moeq.load("a", placement={"gpu": 0}), RecipeError, "'gpu': 0.*or a mapping, each value text$"),
        (lambda out: moeq.load("~no-such-user/model"), MissingError, "^~no-such-user/model: no such file or directory"),
        (
            lambda out: moeq.open_dynamic("no/checkpoint"),
            MissingError,
            "^no/checkpoint: no such file or directory; give R",
        ),
        (lambda out: moeq.open_dynamic("a", 3), RecipeError, "settings is 3; give text"),
        (lambda out: moeq.open_dynamic("a", tokens=-1), RecipeError, "tokens is -1; give a whole number from 0 to"),
        (lambda out: moeq.open_dynamic("a", tokens=1.5), RecipeError, "tokens is 1.5; give a whole number from 0 to"),
        (lambda out: moeq.open_dynamic("a", tokens=10**30), RecipeError, "tokens is 1000.*; give a whole number"),
        (lambda out: moeq.open_dynamic("a", sequences=0), RecipeError, "sequences is 0; give a whole number from 1"),
        (lambda out: moeq.load_recipe([1]), RecipeError, "given is .1.; give text or a path or a mapping"),
        (
            lambda out: moeq.evaluate("a", tasks=(one for one in [1])),
            RecipeError,
            "tasks is .1.; give text or a list, each text",
        ),
        (lambda out: moeq.load_recipe({}, 5), RecipeError, "overrides is 5; give text or a list"),
    ],
)
def test_refusals_are_errors_of_one_line(call, error: type[moeq.MoeqError], what: str, tmp_path: Path) -> None:
    with pytest.raises(moeq.MoeqError, match=what) as raised:
        call(tmp_path / "run")
    assert isinstance(raised.value, error)
    assert "\n" not in str(raised.value)
    assert not (tmp_path / "run").exists()


def test_checkpoints_are_converted_verified_and_inspected(done: moeq.Run, tmp_path: Path) -> None:
    assert moeq.inspect(done.out)["kind"] == moeq.inspect(str(done.out))["kind"]
    verdict = moeq.verify(done.out, quiet=True)
    assert (verdict.target, verdict.problems) == ("native", ())
    made = moeq.convert(done.out, "dequantized", tmp_path / "plain", quiet=True)
    assert made["verified_with"] == "transformers"
    assert moeq.verify(tmp_path / "plain", target="transformers", against=done.checkpoint, quiet=True).problems == ()
    with pytest.raises(RecipeError, match="did you mean 'vllm'"):
        moeq.convert(done.out, "vlm", tmp_path / "other")
    with pytest.raises(MissingError, match=r"key\.pem"):
        moeq.verify(done.out, public_key=tmp_path / "key.pem")


def test_one_line_is_that_of_the_command(request: pytest.FixtureRequest, tmp_path: Path) -> None:
    """Its budget, preset, text and runtime; whatever is not named is the best that a command would take."""
    text = tmp_path / "own.txt"
    text.write_text("What it is calibrated on.\n" * 400)
    given = ("--bits", "3.5", "--for", "llama.cpp", "--text", str(text), "--quality", "fast", "--no-probe", "--json",
             "--set", "corpus.sequences=7")  # fmt: skip
    said = request.getfixturevalue("moeq").run("plan", "bundled:tiny-mixtral", *given, "--out", str(tmp_path / "x"))
    assert said.code == 0, said.stderr
    plan = moeq.plan(
        "bundled:tiny-mixtral", out=tmp_path / "x", bits=3.5, for_="llama.cpp", text=text, quality="fast", probe=False,
        overrides=["corpus.sequences=7"],
    )  # fmt: skip
    shown, found = json.loads(said.stdout), json.loads(json.dumps(plan.as_json()))
    for one in (shown, found):
        one.pop("machine")
        one.pop("schema_version", None)
    assert found == shown
    changed = starting.begun({"name": "x"}, "run", out=tmp_path / "x", model="bundled:tiny-mixtral", bits=3, text=text)
    assert (changed.recipe.assign.bits_per_weight, changed.recipe.corpus.source) == ("3", [str(text)])
    whole = starting.begun(changed.recipe, "run", out=tmp_path / "x", model="bundled:tiny-mixtral", overrides="seed=7")
    assert whole.recipe == changed.recipe.model_copy(update={"seed": 7})
    assert starting.begun(None, "run", out=None, model="bundled:tiny-mixtral").out == Path("moeq-out/tiny-mixtral")


def test_keys_that_are_given_stay_the_callers(tmp_path: Path) -> None:
    keys = {"assign": {"method": "optimal", "bits_per_weight": 2.5}}
    assert moeq.load_recipe(keys, "assign.bits_per_weight=3").assign.bits_per_weight == "3"
    assert moeq.load_recipe(keys, (f"assign.code_bits={bits}" for bits in [3])).assign.code_bits == "3"
    assert keys == {"assign": {"method": "optimal", "bits_per_weight": 2.5}}


def test_a_recipe_that_was_copied_with_other_values_is_read_anew(tmp_path: Path) -> None:
    """As pydantic's own copies are not: a key of a method's own was left as it was, and seen nowhere."""
    recipe = moeq.load_recipe({"assign": {"method": "uniform", "bits": 2}})
    assert "bits=2" in repr(recipe.assign)

    def begun(**update: object) -> moeq.Recipe:
        changed = recipe.model_copy(update=update)
        return starting.begun(changed, "run", out=tmp_path / "x", model="bundled:tiny-mixtral").recipe

    assert begun() == recipe
    assert begun(assign=recipe.assign.model_copy(update={"bits": 4})).model_dump()["assign"]["bits"] == 4
    assert begun(assign={"method": "optimal", "bits_per_weight": 3}).assign.bits_per_weight == "3"
    for update, message in (
        ({"seed": "x"}, "seed is 'x'; give a whole number"),
        ({"losses": None}, "losses is null; give a mapping"),
        ({"assign": recipe.assign.model_copy(update={"method": "optimal"})}, "assign.bits belongs to uniform"),
    ):
        with pytest.raises(RecipeError, match=message):
            begun(**update)
    with pytest.raises(ValidationError, match="sed"):
        begun(sed=3)


def test_everything_that_is_offered_is_there_typed_and_told() -> None:
    for name in moeq.__all__:
        offered = getattr(moeq, name)
        assert name in dir(moeq)
        if name != "__version__":
            assert inspect.getdoc(offered), name
        if inspect.isfunction(offered):
            hints = get_type_hints(offered, {**vars(sys.modules[offered.__module__]), **_for_types()})
            assert {*inspect.signature(offered).parameters, "return"} <= set(hints), name
    with pytest.raises(AttributeError, match="nothing_such"):
        _ = moeq.nothing_such


def _for_types() -> dict[str, object]:

    from moeq.artifacts.assignment import Assignment
    from moeq.pipeline import Outcome
    from moeq.planning.result import Plan
    from moeq.reproduction.result import Reproduction
    from moeq.stages.context import Context
    from moeq.verification.verify import Verdict

    return {
        "Assignment": Assignment,
        "Outcome": Outcome,
        "Plan": Plan,
        "Reproduction": Reproduction,
        "Context": Context,
        "Verdict": Verdict,
        "nn": __import__("torch").nn,
    }


def test_a_refusal_imports_nothing_heavy(tmp_path: Path) -> None:
    code = (
        "import sys, moeq\n"
        "try: moeq.run({'nmae': 1}, out='none')\n"
        "except moeq.MoeqError: pass\n"
        "print({'torch', 'transformers', 'lm_eval'} & set(sys.modules))"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=tmp_path)
    assert said.stdout.strip() == "set()"


def test_a_stage_tells_what_it_takes_of_other_settings(
    done: moeq.Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(done.out, tmp_path / "run")
    moeq.assign(tmp_path / "run", overrides="losses.damping=0.02")
    told = " ".join(capsys.readouterr().err.split())
    assert f"losses: taken as it is, made by other settings than the recipe's; `moeq run {tmp_path}/run`" in told
    with pytest.raises(ArtifactError, match="--quantizer rtn"):
        moeq.assign(tmp_path / "run", quantizer="rtn", quiet=True)
    moeq.assign(tmp_path / "run", overrides="losses.damping=0.01")
    assert "taken as it is" not in capsys.readouterr().err


def test_a_report_tells_what_is_of_another_assignment(
    done: moeq.Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its figures were of the export before, beside what the assignment says now, without a word."""
    warned = "export was made from another result of assign than is there now"
    assert warned not in (done.out / "report" / "report.html").read_text("utf-8")
    shutil.copytree(done.out, tmp_path / "run")
    moeq.assign(tmp_path / "run", overrides="assign.gpu_experts=1")
    capsys.readouterr()
    moeq.stage("report", tmp_path / "run")
    told = " ".join(capsys.readouterr().err.split())
    assert "export: taken as it is, made from another result of `moeq assign` than is there now" in told
    assert warned in (tmp_path / "run" / "report" / "report.html").read_text("utf-8")
