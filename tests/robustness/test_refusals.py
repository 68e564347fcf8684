"""A refusal of any command leaves a finished run, byte for byte, and what `moeq inspect` says of it, as they were."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from robustness.refusal_sites import Site, all_sites, raised_at
from typer.testing import CliRunner

from moeq import cli, estimator, inspection
from moeq.errors import MoeqError

FLOOR = 115  # of the places that the walk below reached when it was written: 117 of 569
RUN = "{run}"  # in a command line: the finished run
REACHED: set[Site] = set()


def tree(directory: Path) -> dict[str, bytes | None]:
    """Every file and folder of a directory; what the lock holds does not matter, but that it is there."""
    return {
        path.relative_to(directory).as_posix(): path.read_bytes() if path.is_file() else None
        for path in sorted(directory.rglob("*"))
    }


def shown(directory: Path) -> dict[str, Any]:
    return inspection.inspect(directory)


@pytest.fixture(scope="module")
def sites() -> dict[Site, int]:
    return all_sites()


@pytest.fixture(scope="module")
def things(finished_run: Path, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """What command lines name: the run, its model and another, files and folders that are not what they should be."""
    folder = tmp_path_factory.mktemp("things")
    other = Path(shutil.copytree(tiny_model, folder / "other"))
    _edit_json(other / "tokenizer_config.json", lambda data: data.update(model_max_length=77))
    texts = {
        "text.txt": "nothing to see",
        "empty.jsonl": "",
        "broken.json": "{",
        "broken.yaml": "a: [",
        "list.yaml": "- 1\n",
        "twice.yaml": "name: a\nname: b\n",
        "unknown.yaml": "nmae: a\n",
        "latin.txt": "",
        "points.csv": "policy,batch\n",
        "hardware.yaml": "name: x\n",
        "rows.jsonl": '{"txt": "a"}\n',
        "damaged.safetensors": "no",
        "figures.json": '{"schema_version": 1}',
    }
    for name, text in texts.items():
        (folder / name).write_text(text, "utf-8")
    (folder / "latin.txt").write_bytes(b"\xff\xfe\xff")
    (folder / "strangers").mkdir()
    (folder / "strangers" / "thesis.tex").write_text("x")
    (folder / "nothing").mkdir()
    (folder / "store").mkdir()
    (folder / "store" / "mine").write_text("x")
    return {"run": finished_run, "model": tiny_model, "other": other, "folder": folder}


def _edit_json(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    data = json.loads(path.read_text("utf-8"))
    change(data)
    path.write_text(json.dumps(data), "utf-8")


def refused(command: str, things: dict[str, Path], sites: dict[Site, int], run: Path | None = None) -> MoeqError:
    """What a command line is refused with; the run and all else that it names are as they were."""
    names = {name: str(path) for name, path in things.items()} | ({} if run is None else {"run": str(run)})
    watched = [Path(names["run"]), things["folder"], things["model"]]
    before, said = [tree(path) for path in watched], shown(watched[0])
    arguments = [word.format(**names) for word in command.split()]
    result = CliRunner().invoke(cli.app, arguments)
    error = result.exception
    assert isinstance(error, MoeqError), (command, result.output, error)
    assert str(error)
    REACHED.update(raised_at(error, sites))
    assert [tree(path) for path in watched] == before, command
    assert shown(watched[0]) == said, command
    return error


STAGES = ("reparam", "profile", "losses", "assign", "quantize", "export", "eval", "estimate", "report")
NOT_A_RUN = ("{model}", "{run}/checkpoint", "{run}/profile", "{folder}/text.txt")
ON_THE_RUN = (
    "run --set nmae=1", "run --set assign.code_bits=17", "run --set assign.code_bits=x", "run --set nothing",
    "run --set assign.method=best", "run --set losses.bits=[9]", "run --set corpus.sequences=0", "run --set seed=x",
    "run --set assign={{method:uniform,bits:5}}", "run --set losses.methods=[magic]", "run --set device=abacus",
    "run --set corpus.source={folder}/no.txt", "run --set corpus.source={folder}/empty.jsonl",
    "run --set corpus.source={folder}/rows.jsonl", "run --set corpus.source={folder}/latin.txt",
    "run --set corpus.source={folder}/broken.json", "run --set corpus.sequences=100000",
    "run --set corpus.sequence_length=100000", "run --set corpus.sequences=1", "run --set assign.gpu_experts=99",
    "run --set assign.hardware=abacus", "run --set assign.hardware={folder}/hardware.yaml",
    "run --set eval.perplexity.source={folder}/no.txt", "run --set eval.perplexity.sequence_length=100000",
    "run --set eval.images={{}}", "run --set estimate.hardware=abacus", "run --set estimate.geometry=abacus",
    "run --set estimate.hardware={folder}/broken.yaml", "run --set export.format=tar",
    "run --set export.formats=[zip]", "run --set export.formats=[llama.cpp]", "run --set export.formats=[auto-round]",
    "run --set assign.code_bits=1 --set export.formats=[gptqmodel]",
    "run --set assign={{method:uniform,bits:1}} --set export.formats=[auto-round]", "run --set store={folder}/text.txt",
    "run --set others={{attention:9}}", "run --set stream=sometimes", "run --set reparam={{norms:[no.such.norm]}}",
    "run --set revision=x --model no/such-model", "run --set eval.translation={{source:{folder}/no.txt}}",
    "run --set losses.bits=[]", "run --set assign.metric=x", "run --set dtype=int3",
    "run --set corpus.chat_template=true", "assign --code-bits 0.5", "assign --code-bits x",
    "assign --expert-bytes 1", "assign --size 10KiB", "assign --size 10parsecs", "assign --method magic",
    "assign --method uniform --code-bits 2.5 --set assign.bits=3", "assign --target abacus",
    "assign --method prefix-split --target gptqmodel", "assign --target vllm --code-bits 2.5",
    "assign --granularity atom", "assign --method frequency --ndp-latency 1",
    "assign --method optimal --code-bits 2 --ndp-latency 1e-9",
    "assign --hardware abacus", "assign --price --hardware abacus", "assign --method mopeq --set assign.metric=x",
    "assign --method budget --expert-bytes 1", "assign --set losses.bits=[1] --frontier",
    "quantize --set quantize.refine={{iterations:-1}}", "quantize --set losses.bits=[2]",
    "quantize --set others={{attention:4}}", "profile --set corpus.until_covered={{share:2}}",
    "losses --set losses.group_size=0", "losses --set losses.heldout_fraction=0",
    "losses --quantizer signround --set x=1", "export --format auto-round", "export --format gptqmodel",
    "export --format transformers", "export --format llama.cpp", "export --format tar",
    "export --set others={{head:3}} --format llama.cpp", "eval --tasks no_such_task", "eval --batch-size ²",
    "eval --text {folder}/text.txt", "eval --window 16", "eval --context-aware gpu_experts=2",
    "estimate --hardware abacus", "estimate --set estimate.figures={{}}", "estimate --grid in=x",
    "estimate --set estimate.geometry=abacus", "report --analysis {folder}/new",
    "report --maps {folder}/maps --analysis {folder}/new", "report --set nmae=x",
)  # fmt: skip
BESIDE_THE_RUN = (
    "run {folder}/no.yaml --out {run}", "run {folder}/broken.yaml --out {run}", "run {folder}/list.yaml --out {run}",
    "run {folder}/twice.yaml --out {run}", "run {folder}/unknown.yaml --out {run}", "run {folder} --out {run}",
    "run {folder}/latin.txt --out {run}", "run", "plan", "plan --out {run} --set nmae=x",
    "plan --model {folder}/nothing", "plan {folder}/broken.yaml", "plan --model no/such-model --out {run}",
    "plan --out {run} --set assign.size=1KiB", "inspect {folder}/text.txt", "inspect {folder}/no",
    "inspect {folder}/broken.json", "inspect {folder}/nothing", "inspect {folder}/damaged.safetensors",
    "inspect {folder}/strangers", "inspect {folder}/unknown.yaml", "inspect {folder}/broken.yaml",
    "convert {run}/checkpoint --to gptq --out {folder}/new", "convert {run}/checkpoint --to gguf --out {folder}/new",
    "convert {run}/checkpoint --to auto-round --out {run}/checkpoint",
    "convert {run}/checkpoint --to auto-round --out {folder}/strangers",
    "convert {run}/checkpoint --to compressed-tensors --out {folder}/new",
    "convert {model} --to gptq --out {folder}/new", "convert {folder}/nothing --to gptq --out {folder}/new",
    "convert {folder}/text.txt --to gptq --out {folder}/new",
    "convert {folder}/no --to dequantized --out {folder}/new", "verify {folder}/no", "verify {folder}/nothing",
    "verify {folder}/text.txt", "verify {run}/checkpoint --against {folder}/nothing", "generate {folder}/no hello",
    "generate {model} hello", "generate {run}/checkpoint hello --device abacus", "gc", "gc --out {folder}/strangers",
    "watch", "watch {folder}/no", "watch {folder}/strangers",
    "gc --store {folder}/store", "gc --out {folder}/no", "gc --store {run}", "families no_such_family",
    "eval {folder}/no", "eval {run}:nothing", "eval {model} --model {model}", "eval {model} --batch-size ²",
    "eval {model} --window 4 --stride 8", "eval {model} --text {folder}/no.txt",
    "eval {model} --context-aware gpu_experts=2", "eval {run} --context-aware nonsense", "eval {run}:*:x",
    "eval {run} --context-aware gpu_experts=x", "eval {run} --context-aware gpu_experts=99,code_bits=2",
    "eval {model} --out {folder}", "eval {model} --out {folder}/no/such/file.json", "eval {folder}/figures.json",
    "eval {model} --text {folder}/latin.txt", "eval {model} --text bundled --window 100000",
    "eval {model} --set seed=1", "eval {folder}/broken.json", "eval {model} --device abacus", "eval {model} --limit 3",
    "estimate --model abacus", "estimate --sheet paper-999", "estimate --sheet paper-002 --model mixtral-8x7b",
    "estimate --fit {folder}/points.csv", "estimate --fit {folder}/no.csv",
    "estimate --fit {folder}/points.csv --zipf 1", "estimate --model mixtral-8x7b --hardware abacus",
    "estimate --model mixtral-8x7b --bits 99", "estimate --model mixtral-8x7b --gpu-experts 99",
    "estimate --model mixtral-8x7b --policy magic", "estimate --model mixtral-8x7b --grid in=0",
    "estimate --model mixtral-8x7b --grid up=3", "estimate --model mixtral-8x7b --grid in=x",
    "estimate --model mixtral-8x7b --replicas x", "estimate --model mixtral-8x7b --zipf -1",
    "estimate --model mixtral-8x7b --set seed=1", "estimate --model mixtral-8x7b --out {run}",
    "estimate --model mixtral-8x7b --assignment {folder}/broken.json", "estimate --bits 3",
    "estimate --model mixtral-8x7b --assignment {run}/assign/assignment.json",
    "estimate --model mixtral-8x7b --manifest {run}/checkpoint",
    "estimate --model mixtral-8x7b --manifest {folder}/no", "estimate --model mixtral-8x7b --manifest a --bits 3",
    "estimate --model mixtral-8x7b --trace {folder}/damaged.safetensors",
    "estimate --model {folder}/nothing --bits 3", "estimate --model mixtral-8x7b --hardware {folder}/hardware.yaml",
    "estimate --model mixtral-8x7b --hardware {folder}/broken.yaml", "estimate a.yaml b.yaml",
    "estimate --model mixtral-8x7b --trace {folder}/no --zipf 1", "estimate {folder}/unknown.yaml",
)  # fmt: skip


@pytest.mark.cases(2)
@pytest.mark.parametrize("command", ON_THE_RUN)
def test_on_the_run(command: str, things: dict[str, Path], sites: dict[Site, int]) -> None:
    refused(f"{command} --out {RUN}", things, sites)


@pytest.mark.cases(13)
@pytest.mark.parametrize("command", BESIDE_THE_RUN)
def test_beside_the_run(command: str, things: dict[str, Path], sites: dict[Site, int]) -> None:
    refused(command, things, sites)


@pytest.mark.cases(16)
@pytest.mark.parametrize("out", NOT_A_RUN)
@pytest.mark.parametrize("command", ["run", *STAGES])
def test_what_is_no_run_is_not_written_to(
    command: str, out: str, things: dict[str, Path], sites: dict[Site, int]
) -> None:
    error = refused(f"{command} --model {{model}} --out {out}", things, sites)
    assert str(error).endswith(("choose another --out", f"such as {things['run']}"))


@pytest.mark.parametrize("command", ["run", *STAGES])
def test_another_models_run_is_not_written_to(command: str, things: dict[str, Path], sites: dict[Site, int]) -> None:
    error = refused(f"{command} --model {{other}} --out {RUN}", things, sites)
    assert "the run in it was made from another model (tiny); choose another --out" in str(error)


def test_a_moved_model_is_the_same_model(things: dict[str, Path], run_copy: Path, tmp_path: Path) -> None:
    moved = shutil.copytree(things["model"], tmp_path / "moved")
    before = tree(run_copy)
    result = CliRunner().invoke(cli.app, ["profile", "--model", str(moved), "--out", str(run_copy), "--quiet"])
    assert result.exception is None
    after = tree(run_copy)
    assert {name for name in before | after if before.get(name) != after.get(name)} == {"recipe.yaml"}


POINTS = "policy,batch,input_tokens,output_tokens,prefill_seconds\n"
HARDWARE = (  # what is wrong with a hardware file: (what stands in the preset, what stands there instead)
    ("name:", "nmae:"), ("gpu:", "gpu: 3\nother:"), ('"80 GB", source', '"80 GB", sauce'), ('value: "80 GB", ', ""),
    ('"3.35 TB/s"', "3.35"), ('"3.35 TB/s"', '"3.35 parsecs"'), ('"3.35 TB/s"', '".inf TB/s"'),
    ("value: 0.8", "value: 8"),
    ("value: 64", "value: x"), ("value: 64, source", "value: null, source"), ("value: ws", "value: zz"),
    ("value: opt", "value: zz"), ('{value: "64 GB/s"', '{valeu: "64 GB/s"'), ("monde:", "mondo:"), ("link:", "lnik:"),
    ("latency: {", "latency: 3 # {"), ("value: 4,", "value: -4,"), ("name:", "- name:"),
)  # fmt: skip
TABLES = (
    "", "policy,policy,batch\n", "policy,btach\n", "policy,prefill_seconds\n", "policy,batch\n", POINTS,
    f"{POINTS}gpu,1\n",
    f"{POINTS}nobody,1,2,3,4\n", f"{POINTS}monde,x,2,3,4\n", f"{POINTS}monde,,2,3,4\n", f"{POINTS}monde,1,2,3,\n",
    f"{POINTS}monde,1,,3,4\n", f"{POINTS}monde,1,2,3,-4\n", f'{POINTS}monde,1,2,3,"4\n', f"{POINTS}monde,1,0,3,4\n",
)  # fmt: skip
MODELS: tuple[dict[str, str | None], ...] = (  # files of a model that are replaced, or taken away
    {"config.json": None}, {"config.json": "{"}, {"config.json": "[]"}, {"config.json": '{"model_type": "nobody"}'},
    {"config.json": '{"model_type": "llama", "num_hidden_layers": 1}'}, {"model.safetensors.index.json": "{}"},
    {"model.safetensors.index.json": '{"weight_map": {"a": "b"}}'}, {"model.safetensors.index.json": None},
    {"model-00001-of-00003.safetensors": "x"}, {"model-00001-of-00003.safetensors": None},
    {"model.safetensors.index.json": '{"weight_map": {"a": "model-00001-of-00003.safetensors"}}'},
    {"config.json": '{"model_type": "mixtral", "num_local_experts": 99999999}'},
    {"tokenizer.json": "{"}, {"tokenizer.json": None, "tokenizer_config.json": None},
)  # fmt: skip


@pytest.mark.cases(12)
@pytest.mark.parametrize("change", HARDWARE, ids=str)
def test_a_hardware_file(
    change: tuple[str, str], things: dict[str, Path], sites: dict[Site, int], tmp_path: Path
) -> None:
    text = (Path(estimator.__file__).parent / "hardware" / "paper-ctxmoe.yaml").read_text("utf-8")
    assert change[0] in text
    (tmp_path / "own.yaml").write_text(text.replace(*change, 1), "utf-8")
    refused(f"estimate --model mixtral-8x7b --out {tmp_path}/new --hardware {tmp_path}/own.yaml", things, sites)
    assert [path.name for path in tmp_path.iterdir()] == ["own.yaml"]


@pytest.mark.parametrize("text", TABLES)
def test_a_table_of_measured_points(text: str, things: dict[str, Path], sites: dict[Site, int], tmp_path: Path) -> None:
    (tmp_path / "points.csv").write_text(text, "utf-8")
    refused(f"estimate --fit {tmp_path}/points.csv --model mixtral-8x7b --out {tmp_path}/new", things, sites)
    assert [path.name for path in tmp_path.iterdir()] == ["points.csv"]


@pytest.mark.cases(6)
@pytest.mark.parametrize("files", MODELS, ids=str)
def test_a_model(files: dict[str, str | None], things: dict[str, Path], sites: dict[Site, int], tmp_path: Path) -> None:
    model = Path(shutil.copytree(things["model"], tmp_path / "model"))
    for name, text in files.items():
        (model / name).unlink()
        if text is not None:
            (model / name).write_text(text, "utf-8")
    for command in (f"run --model {model} --out {tmp_path}/new", f"run --model {model} --out {RUN}"):
        refused(command, things, sites)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


DAMAGES: dict[str, tuple[str, Callable[[Path], object]]] = {
    "assignment, no JSON": ("assign", lambda run: (run / "assign" / "assignment.json").write_text("{")),
    "assignment, a width that was not made": (
        "quantize",
        lambda run: _edit_json(
            run / "assign" / "assignment.json", lambda data: data["layers"][0]["experts"][0].update(bits=7)
        ),
    ),
    "assignment of other layers": (
        "export",
        lambda run: _edit_json(run / "assign" / "assignment.json", lambda data: data["layers"].pop()),
    ),
    "no assignment": ("quantize", lambda run: shutil.rmtree(run / "assign")),
    "no losses": ("assign", lambda run: shutil.rmtree(run / "losses")),
    "no profile": ("assign", lambda run: shutil.rmtree(run / "profile")),
    "no evaluation": ("report", lambda run: shutil.rmtree(run / "eval")),
    "no checkpoint": ("eval", lambda run: shutil.rmtree(run / "checkpoint")),
    "a recipe that is none": ("run", lambda run: (run / "recipe.yaml").write_text("nmae: x\n")),
    "a record of another version": (
        "quantize",
        lambda run: _edit_json(run / "assign" / "stage.json", lambda data: data.update(schema_version=99)),
    ),
}


@pytest.mark.cases(8)
@pytest.mark.parametrize("damage", DAMAGES)
def test_on_a_damaged_run(damage: str, things: dict[str, Path], sites: dict[Site, int], run_copy: Path) -> None:
    command, change = DAMAGES[damage]
    change(run_copy)
    before = tree(run_copy)
    result = CliRunner().invoke(cli.app, [command, "--out", str(run_copy), "--quiet"])
    assert isinstance(result.exception, MoeqError), result.exception
    REACHED.update(raised_at(result.exception, sites))
    assert tree(run_copy) == before


def test_a_refused_first_run_leaves_no_directory(things: dict[str, Path], tmp_path: Path) -> None:
    for more in ("corpus.sequences=1", "assign.size=1KiB", "losses.bits=[9]", "export.formats=[llama.cpp]"):
        arguments = ["assign", "--model", str(things["model"]), "--out", str(tmp_path / "new"), "--set", more]
        assert isinstance(CliRunner().invoke(cli.app, arguments).exception, MoeqError)
        assert not (tmp_path / "new").exists()


def test_the_share_of_refusals_that_were_walked(
    sites: dict[Site, int], request: pytest.FixtureRequest, record_property: Callable[[str, object], None]
) -> None:
    """Not less than before; the share is printed at the end of the tests (tests/robustness/conftest.py)."""
    share = f"{len(REACHED)} of {len(sites)} places that raise an error of moeq ({len(REACHED) / len(sites):.0%})"
    record_property("refusals", share)
    print(share)
    walk = [item for item in request.session.items if item.path == Path(__file__)]
    if len(walk) < len(ON_THE_RUN) + len(BESIDE_THE_RUN):
        pytest.skip("only a part of the walk was chosen")
    assert len(REACHED) >= FLOOR
