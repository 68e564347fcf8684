"""One bit of a file turns between two commands: it is refused or made again, and said; never passed on.

The run is small and its files are not: model 110 MB, replicas, experts and other weights above 16 MiB each.
"""

from __future__ import annotations

import io
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from robustness.runs import save_wide_model

import moeq
from moeq import pipeline
from moeq.conversion import convert
from moeq.errors import ArtifactError, ModelError
from moeq.generation import generate
from moeq.inspection import inspect
from moeq.models.source import SAMPLED_BYTES, open_source
from moeq.progress import Reporter
from moeq.recipe import load_recipe
from moeq.stages.context import Context
from moeq.stages.recorded import stamp_of
from moeq.verification.verify import Options, verify

STAGES = ("profile", "losses", "assign", "quantize", "export")
EXPERTS = "experts-layer-000.safetensors"
LARGE = 16 << 20
TIMES = pytest.mark.parametrize("mtime", ["changed", "restored"])


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_wide_model(tmp_path_factory.mktemp("model") / "wide")


@pytest.fixture(scope="module")
def run(model: Path, short_corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Context:
    """A run up to its export; every drill leaves it as it was."""
    changes = (
        f"corpus={{source: {short_corpus}, sequences: 8, sequence_length: 48}}",
        "losses={group_size: 64, bits: [8], methods: [gptq], symmetric: true, per_projection: false}",
        "assign={method: uniform, bits: 8}",
        "export={formats: [gptqmodel], verify: false, max_shard: 40MB}",
        f"eval={{compare: [], perplexity: {{source: {short_corpus}, sequences: 2, sequence_length: 48}}}}",
    )
    context = Context(
        recipe=load_recipe(None, list(changes)),
        model_name=str(model),
        out=tmp_path_factory.mktemp("run") / "run",
        reporter=Reporter(quiet=True),
    )
    pipeline.run(context, STAGES)
    return context


def again(run: Context, **changes: Any) -> tuple[Context, io.StringIO]:
    """The run as a new process would open it, and what it tells the user."""
    reporter, told = Reporter(), io.StringIO()
    reporter.console = Console(file=told, width=1000)
    return replace(run, reporter=reporter, **changes), told


def store_file(run: Context) -> Path:
    return next(run.store.glob("*/layer-000.safetensors"))


def rest_file(run: Context) -> Path:
    return max((run.out / "checkpoint").glob("model-*.safetensors"), key=lambda path: path.stat().st_size)


def format_file(run: Context) -> Path:
    return max((run.out / "checkpoint-gptqmodel").glob("*.safetensors"), key=lambda path: path.stat().st_size)


def flip(path: Path, mtime: str = "changed", at: int | None = None) -> None:
    """Turn a bit in the middle of a file, or at a byte; the size stays, and where asked for the time of change."""
    before = path.stat()
    with path.open("r+b") as stream:
        stream.seek(before.st_size // 2 if at is None else at)
        byte = stream.read(1)[0]
        stream.seek(-1, os.SEEK_CUR)
        stream.write(bytes([byte ^ 1]))
    if mtime == "restored":
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


@contextmanager
def flipped(path: Path, mtime: str = "changed", at: int | None = None) -> Iterator[Path]:
    """A flipped bit, turned back where nobody has made the file again."""
    whole = path.read_bytes()
    flip(path, mtime, at)
    try:
        yield path
    finally:
        if path.read_bytes() != whole:
            path.write_bytes(whole)


@contextmanager
def unfinished(run: Context, stage: str) -> Iterator[None]:
    """The stage has still to be run."""
    directory, kept = run.directory(stage), run.out.with_name("kept")
    directory.mkdir(exist_ok=True)
    shutil.copytree(directory, kept)
    (directory / "stage.json").unlink(missing_ok=True)
    try:
        yield
    finally:
        shutil.rmtree(directory)
        kept.rename(directory)


@pytest.mark.full
def test_the_files_are_large(run: Context, model: Path) -> None:
    files = [store_file(run), rest_file(run), format_file(run), run.out / "quantize" / EXPERTS]
    assert min(path.stat().st_size for path in files) > LARGE
    assert (model / "model.safetensors").stat().st_size > 64 << 20


REFUSED: dict[str, tuple[Callable[[Context], Path], str, str]] = {  # the file, the next command, what it says
    "profile": (lambda run: run.out / "profile" / "profile.safetensors", "assign", "run `moeq profile` again"),
    "losses": (lambda run: run.out / "losses" / "losses.parquet", "assign", "run `moeq losses` again"),
    "store": (store_file, "quantize", "run `moeq losses` again"),
    "quantize": (lambda run: run.out / "quantize" / EXPERTS, "export", "run `moeq quantize` again"),
    "checkpoint": (rest_file, "eval", "run `moeq export` again"),
}


@pytest.mark.full
@TIMES
@pytest.mark.parametrize("name", list(REFUSED))
def test_a_stage_command_refuses_what_an_earlier_stage_did_not_write(run: Context, name: str, mtime: str) -> None:
    find, stage, remedy = REFUSED[name]
    context, _ = again(run)
    with flipped(find(run), mtime) as path:
        with pytest.raises(ArtifactError) as caught, unfinished(run, stage):
            pipeline.run_alone(context, stage)
        assert caught.value.exit_code == 7
        assert path.name in str(caught.value)
        assert remedy in str(caught.value)
        with pytest.raises(ArtifactError, match=path.name):
            inspect(run.out)


@pytest.mark.full
@TIMES
def test_a_model_that_changed_between_two_stages_is_not_the_same(run: Context, model: Path, mtime: str) -> None:
    path = model / "model.safetensors"
    size = path.stat().st_size
    length = int.from_bytes(path.open("rb").read(8), "little")
    between = 8 + length + (size - 8 - length) * 21 // 126  # two of the samples that were once read
    with flipped(path, mtime, between):
        context, _ = again(run)
        with pytest.raises(
            ArtifactError, match=r"model\.safetensors is not the file that it read; choose another --out"
        ):
            pipeline.run_alone(context, "assign")


def test_a_model_that_changes_while_a_stage_runs_is_named(
    run: Context, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    context, _ = again(run)
    path, ran = model / "model.safetensors", pipeline.BY_NAME["assign"].run
    whole = path.read_bytes()

    def change(given: Context) -> dict[str, Any]:
        flip(path)
        return ran(given)

    monkeypatch.setitem(pipeline.BY_NAME, "assign", replace(pipeline.BY_NAME["assign"], run=change))
    try:
        with (
            pytest.raises(ModelError, match=r"model\.safetensors: changed since the run began"),
            unfinished(run, "assign"),
        ):
            pipeline.run_alone(context, "assign")
    finally:
        path.write_bytes(whole)


MENDED: dict[str, tuple[Callable[[Context], Path], str, str]] = {  # the file, what makes it again, what is said
    "profile": (
        lambda run: run.out / "profile" / "profile.safetensors",
        "profile",
        "profile: profile.safetensors changed since it was written; made again",
    ),
    "store": (store_file, "losses", "layer-000.safetensors: damaged, made again"),
    "quantize": (
        lambda run: run.out / "quantize" / EXPERTS,
        "quantize",
        f"quantize: {EXPERTS} changed since it was written; made again",
    ),
    "configuration": (
        lambda run: run.out / "checkpoint" / "config.json",
        "export",
        "export: config.json changed since it was written; made again",
    ),
    "weights": (rest_file, "export", "changed since it was written; made again"),
    "format": (format_file, "export", "changed since it was written; made again"),
}


@pytest.mark.cases(1)
@TIMES
@pytest.mark.parametrize("name", list(MENDED))
def test_moeq_run_makes_it_again_and_says_so(run: Context, name: str, mtime: str) -> None:
    find, stage, said = MENDED[name]
    path = find(run)
    whole = path.read_bytes()
    context, told = again(run)
    with flipped(path, mtime):
        pipeline.run(context, (stage,))
        assert said in told.getvalue()
        assert path.read_bytes() == whole
    context, told = again(run)
    pipeline.run(context, STAGES)
    assert "made again" not in told.getvalue()
    assert told.getvalue().count("unchanged, skipped") == len(STAGES)


@pytest.mark.cases(4)
@TIMES
@pytest.mark.parametrize(
    "find",
    [
        lambda run: run.out / "checkpoint" / EXPERTS,
        rest_file,
        lambda run: run.out / "checkpoint" / "config.json",
        lambda run: run.out / "checkpoint" / "tokenizer.json",
        lambda run: run.out / "checkpoint" / "placement.json",
    ],
    ids=["experts", "weights", "configuration", "tokenizer", "manifest"],
)
def test_a_native_checkpoint(run: Context, find: Callable[[Context], Path], mtime: str, tmp_path: Path) -> None:
    """As it is downloaded: without the run's record."""
    directory = tmp_path / "checkpoint"
    shutil.copytree(run.out / "checkpoint", directory)
    (directory / "stage.json").unlink()
    count = len(list(directory.iterdir())) - 2  # README.md and SHA256SUMS are not listed
    assert inspect(directory)["checked_files"] == f"SHA-256 of {count} files as in SHA256SUMS"
    path = directory / find(run).name
    flip(path, mtime, at=_harmless(path))
    for check in (
        lambda: inspect(directory),
        lambda: moeq.load(directory, verify=True),
        lambda: convert(directory, "gptqmodel", tmp_path / "converted"),
    ):
        with pytest.raises(ArtifactError) as caught:
            check()
        assert path.name in str(caught.value)
    assert not (tmp_path / "converted").exists()


def _harmless(path: Path) -> int | None:
    """In JSON a bit that leaves it JSON, so that only a digest tells."""
    if path.suffix != ".json":
        return None
    return path.read_bytes().rindex(b"0")


@TIMES
def test_a_checkpoint_in_another_format(run: Context, mtime: str) -> None:
    directory = run.out / "checkpoint-gptqmodel"
    assert "SHA-256 of" in inspect(directory)["checked_files"]
    with flipped(format_file(run), mtime) as path, pytest.raises(ArtifactError, match=path.name):
        inspect(directory)


def test_files_that_were_added_are_named(run: Context, tmp_path: Path) -> None:
    directory = tmp_path / "checkpoint"
    shutil.copytree(run.out / "checkpoint", directory)
    (directory / "notes.txt").write_text("mine")
    assert inspect(directory)["checked_files"].endswith("not listed: notes.txt")
    (directory / "modeling_evil.py").write_text("import os")
    with pytest.raises(ArtifactError, match=r"modeling_evil\.py: SHA256SUMS does not list it"):
        inspect(directory)
    with pytest.raises(ArtifactError, match=r"modeling_evil\.py.*does not list it"):
        moeq.load(directory, verify=True)
    (directory / "modeling_evil.py").unlink()
    shutil.copyfile(rest_file(run), directory / "more.safetensors")
    with pytest.raises(ArtifactError, match=r"more\.safetensors: weights that SHA256SUMS does not list"):
        inspect(directory)
    with pytest.raises(ArtifactError, match=r"more\.safetensors: SHA256SUMS does not list it"):
        generate(directory, "x", max_new_tokens=1, temperature=0, seed=0, device="cpu")


@pytest.mark.parametrize("name", ["more.safetensors", "modeling_evil.py"])
def test_weights_and_code_beside_a_checkpoint_in_another_format_are_refused(
    run: Context, tmp_path: Path, name: str
) -> None:
    """Loaders would take them: transformers a model.safetensors before the files of an index."""
    directory = tmp_path / "checkpoint"
    shutil.copytree(run.out / "checkpoint-gptqmodel", directory, copy_function=os.link)
    (directory / "notes.txt").write_text("mine")
    assert inspect(directory)["checked_files"].endswith("not listed: notes.txt")
    shutil.copyfile(format_file(run), directory / name)
    for refuses in (
        lambda: inspect(directory),
        lambda: verify(directory, Options(), Reporter(quiet=True)),
        lambda: convert(directory, "auto-round", tmp_path / "other"),
    ):
        with pytest.raises(ArtifactError, match=rf"{re.escape(name)}: SHA256SUMS does not list it"):
            refuses()
    assert not (tmp_path / "other").exists()


def test_a_checkpoint_without_sums_says_so(run: Context, tmp_path: Path) -> None:
    directory = tmp_path / "checkpoint"
    shutil.copytree(run.out / "checkpoint", directory)
    (directory / "SHA256SUMS").unlink()
    record = directory / "stage.json"
    text = json.loads(record.read_text("utf-8"))
    del text["files"]["SHA256SUMS"]
    record.write_text(json.dumps(text), "utf-8")
    assert "no SHA256SUMS: an older moeq made it" in inspect(directory)["checked_files"]
    record.unlink()
    assert "are not covered (no SHA256SUMS: an older moeq made it" in inspect(directory)["checked_files"]
    with pytest.raises(ArtifactError, match=r"no SHA256SUMS.*load it without verify"):
        moeq.load(directory, verify=True)


def test_an_edit_of_what_may_be_edited_is_named_and_an_invalid_one_refused(run: Context) -> None:
    path = run.out / "assign" / "assignment.json"
    text = path.read_text("utf-8")
    edited = json.loads(text)
    edited["layers"][0]["experts"][0]["importance"] = 0.5
    try:
        path.write_text(json.dumps(edited), "utf-8")
        assert inspect(run.out)["assign"].endswith("assignment.json edited by hand since")
        assert "but of assignment.json, which was edited" in inspect(run.out / "assign")["check"]
        context, _ = again(run)
        assert not pipeline.run_alone(context, "quantize").skipped
        edited["layers"][0]["experts"][0]["bits"] = 5
        path.write_text(json.dumps(edited), "utf-8")
        for check in (lambda: inspect(run.out), lambda: pipeline.run_alone(again(run)[0], "quantize")):
            with pytest.raises(ArtifactError, match="assign"):
                check()
    finally:
        path.write_text(text, "utf-8")
        pipeline.run(again(run)[0], STAGES)


def test_what_the_disk_itself_turned_is_seen_where_it_is_read_and_with_check(run: Context) -> None:
    """Nothing about the file tells but its bytes: a stage that only skips is not held to read it."""
    from moeq.artifacts.digests import digest_of_file, remember

    path = run.out / "quantize" / EXPERTS
    whole = digest_of_file(path)

    def turned(digest: str) -> None:
        remember(path, digest)

    with flipped(path):
        turned(whole)
        context, told = again(run)
        assert pipeline.run_alone(context, "quantize").skipped
        with unfinished(run, "export"), pytest.raises(ArtifactError, match=rf"{EXPERTS}.*run `moeq quantize` again"):
            pipeline.run_alone(again(run)[0], "export")
        turned(whole)
        context, told = again(run, check=True)
        pipeline.run(context, ("quantize",))
        assert f"{EXPERTS} changed since it was written; made again" in told.getvalue()


def test_a_run_of_an_older_moeq_is_known_again(run: Context, model: Path) -> None:
    """Its stamp read samples of large files: nothing is made again, and the first stage that runs keeps all digests."""
    source = open_source(str(model))
    files = source.file_digests()
    newer, older = source.stamp(files).digest, source.sampled_digest(files)
    assert newer != older
    records = {path: path.read_text("utf-8") for path in run.out.glob("*/stage.json")}
    try:
        for path, text in records.items():
            record = json.loads(text)
            record["model"]["digest"] = older
            record["volatile"].pop("model_files", None)
            path.write_text(json.dumps(record), "utf-8")
        assert again(run)[0].model.stamp.digest == older
        pipeline.run_alone(again(run)[0], "assign")  # its key has another digest in it: it runs
        assert json.loads((run.out / "assign" / "stage.json").read_text("utf-8"))["model"]["digest"] == older
        length = int.from_bytes((model / "model.safetensors").open("rb").read(8), "little")
        size = (model / "model.safetensors").stat().st_size
        with flipped(model / "model.safetensors", at=8 + length + (size - 8 - length) * 21 // 126):
            assert source.sampled_digest(files) == older
            assert again(run)[0].model.stamp.digest != older
    finally:
        for path, text in records.items():
            path.write_text(text, "utf-8")


def test_samples_are_read_for_a_run_that_is_there_alone(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of an object store every one would be a request."""
    source = open_source(str(model))
    monkeypatch.setattr(type(source), "sampled_digest", lambda *_: pytest.fail("samples were read"))
    assert max(path.stat().st_size for path in source.files) > SAMPLED_BYTES
    files = source.file_digests()
    assert stamp_of(source, files, tmp_path) == source.stamp(files)
