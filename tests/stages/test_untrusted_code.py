"""Code that a model brings along goes into no checkpoint unless the user said so; then it is listed with its digest."""

from __future__ import annotations

import json
import shutil
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from moeq import conversion, pipeline
from moeq.artifacts.manifest import read_manifest
from moeq.artifacts.run import FOLDED
from moeq.errors import ArtifactError
from moeq.exporters.native_reader import NativeReader
from moeq.inspection import inspect
from moeq.progress import Reporter
from moeq.recipe import load_recipe
from moeq.runtime.hook import HOOK_FILE, HOOK_TEXT
from moeq.stages.context import Context
from moeq.stages.export import format_directory

STAGES = ("profile", "losses", "assign", "quantize", "export")
SMALL = (
    "corpus.sequences=4", "corpus.sequence_length=32", "losses.group_size=16", "losses.methods=[rtn]",
    "losses.bits=[2, 4]", "assign.quantizer=rtn", "assign.method=frequency", "assign.code_bits=3",
    "eval.compare=[]", "export.verify=false", "export.formats=[dequantized]",
)  # fmt: skip
RAN = "ran"
CODE = """
from pathlib import Path
from transformers import PreTrainedTokenizerFast

Path({marker!r}).touch()


class Tokens(PreTrainedTokenizerFast):
    pass
"""
README = "---\nlicense: apache-2.0\nlanguage: [en, no]\nbase_model: some/base\n---\n# tiny\n"


class Listening(Reporter):
    """Keeps what is said."""

    def __init__(self) -> None:
        super().__init__(quiet=True)
        self.said: list[str] = []

    def say(self, text: str) -> None:
        self.said.append(text)


def with_code(source: Path, folder: Path, *, model_code: bool) -> Path:
    """A model whose tokenizer (and, where wanted, class) is code of its own, with other things that are no data."""
    shutil.copytree(source, folder)
    text = CODE.format(marker=str(folder.parent / RAN))
    (folder / "tokenization_own.py").write_text(text)
    (folder / "training_args.bin").write_bytes(b"\x80\x04.")
    (folder / "README.md").write_text(README)
    (folder / "LICENSE").write_text("as you like")
    own = {"AutoTokenizer": [None, "tokenization_own.Tokens"]}
    more: dict[str, Any] = {"auto_map": own}
    if model_code:
        (folder / "modeling_own.py").write_text(text)
        more = {
            "auto_map": own | {"AutoConfig": "modeling_own.Tokens", "AutoModelForCausalLM": "modeling_own.Tokens"},
            "custom_pipelines": {"own": {"impl": "modeling_own.Tokens", "pt": ["AutoModelForCausalLM"]}},
        }
    for name, entries in (
        ("config.json", more),
        ("tokenizer_config.json", {"auto_map": own, "tokenizer_class": "Tokens"}),
        ("generation_config.json", {"deep": {"auto_map": own}}),
    ):
        file = folder / name
        there = json.loads(file.read_text()) if file.is_file() else {}
        file.write_text(json.dumps(there | entries))
    return folder


def run(model: Path, out: Path, *overrides: str, stages: tuple[str, ...] = STAGES) -> tuple[Context, list[str]]:
    reporter = Listening()
    recipe = load_recipe(None, [*SMALL, *overrides])
    context = Context(recipe=recipe, model_name=str(model), out=out, reporter=reporter)
    pipeline.run(context, stages)
    return context, reporter.said


def entries_for_code(directory: Path) -> dict[str, Any]:
    """What the JSON files of a directory would have a loader run, by file."""
    found = {path.name: json.loads(path.read_text()) for path in directory.glob("*.json")}
    return {
        name: data.get("auto_map", data)
        for name, data in found.items()
        if name != "placement.schema.json"
        and ("auto_map" in json.dumps(data) or "custom_pipelines" in json.dumps(data))
    }


@pytest.fixture(scope="module")
def untrusted(tiny_mixtral: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Context, list[str]]:
    folder = tmp_path_factory.mktemp("untrusted")
    model = with_code(tiny_mixtral, folder / "model", model_code=True)
    text = json.loads((model / "tokenizer_config.json").read_text())
    (model / "tokenizer_config.json").write_text(json.dumps(text | {"tokenizer_class": "PreTrainedTokenizerFast"}))
    return run(model, folder / "run")


@pytest.mark.full
def test_without_trust_no_code_of_the_model_is_in_any_checkpoint(
    untrusted: tuple[Context, list[str]], modules_apart: Path
) -> None:
    context, said = untrusted
    native, plain = context.directory("export"), format_directory(context.out, "dequantized")
    assert [path.name for path in native.glob("*.py")] == [HOOK_FILE]
    assert (native / HOOK_FILE).read_text() == HOOK_TEXT
    assert entries_for_code(native) == {"config.json": {"AutoConfig": "configuration_moeq.RegisteredConfig"}}
    assert not list(plain.glob("*.py"))
    assert entries_for_code(plain) == {}
    for directory in (native, plain):
        assert not list(directory.glob("*.bin"))
        assert (directory / "LICENSE").read_text() == "as you like"
        AutoModelForCausalLM.from_pretrained(directory, trust_remote_code=True)
        assert AutoTokenizer.from_pretrained(directory, trust_remote_code=True)("a").input_ids
    assert not (context.out.parent / RAN).exists()
    lines = [line for line in said if "left out" in line]
    assert lines == [
        "  left out: modeling_own.py, tokenization_own.py, training_args.bin, auto_map of config.json, "
        "custom_pipelines of config.json, auto_map of generation_config.json and 1 more (code and pickles; Python "
        "files go along with --trust-remote-code, once you have read them)"
    ]


def test_the_hook_is_listed_as_moeqs_own(untrusted: tuple[Context, list[str]], tmp_path: Path) -> None:
    directory = shutil.copytree(untrusted[0].directory("export"), tmp_path / "checkpoint")
    digest = sha256(HOOK_TEXT.encode()).hexdigest()
    (listed,) = read_manifest(directory).code
    assert (listed.file, listed.sha256, listed.origin) == (HOOK_FILE, digest, "moeq")
    assert inspect(directory)["code"] == {HOOK_FILE: f"moeq's own hook, SHA-256 {digest}"}
    assert f"| code | {HOOK_FILE}, moeq's own hook: two lines |" in (directory / "README.md").read_text()
    (directory / "stage.json").unlink()  # a published checkpoint has no record
    (directory / "SHA256SUMS").unlink()  # nor need it state what the manifest does
    (directory / HOOK_FILE).write_text(f"{HOOK_TEXT}print()\n")
    with pytest.raises(ArtifactError, match=rf"{HOOK_FILE}: is not the hook that moeq writes"):
        inspect(directory)
    (directory / HOOK_FILE).write_text(HOOK_TEXT)
    (directory / "modeling_more.py").write_text("")
    with pytest.raises(ArtifactError, match=r"modeling_more\.py: the manifest does not list this code"):
        inspect(directory)


def test_manifests_from_before_code_was_listed_still_load(untrusted: tuple[Context, list[str]], tmp_path: Path) -> None:
    directory = shutil.copytree(untrusted[0].directory("export"), tmp_path / "checkpoint")
    (directory / "stage.json").unlink()
    (directory / "SHA256SUMS").unlink()
    manifest = json.loads((directory / "placement.json").read_text())
    del manifest["code"]
    (directory / "placement.json").write_text(json.dumps(manifest))
    assert NativeReader(directory).manifest.code == ()
    assert list(inspect(directory)["code"]) == [HOOK_FILE]


def test_where_moeq_is_imported_the_hook_is_not_needed(untrusted: tuple[Context, list[str]], tmp_path: Path) -> None:
    directory = shutil.copytree(untrusted[0].directory("export"), tmp_path / "checkpoint")
    ids = torch.arange(3, 27).reshape(2, 12)
    with torch.no_grad():
        wanted = AutoModelForCausalLM.from_pretrained(directory)(ids).logits
        (directory / HOOK_FILE).unlink()
        config = json.loads((directory / "config.json").read_text())
        del config["auto_map"]
        (directory / "config.json").write_text(json.dumps(config))
        assert torch.equal(AutoModelForCausalLM.from_pretrained(directory)(ids).logits, wanted)


def test_a_folded_model_is_a_copy_like_any_other(untrusted: tuple[Context, list[str]], tmp_path: Path) -> None:
    context, said = run(
        Path(untrusted[0].model_name), tmp_path, "reparam={compare: false, samples: 2}", stages=("reparam",)
    )
    folded = context.directory("reparam") / FOLDED
    assert not list(folded.glob("*.py"))
    assert entries_for_code(folded) == {}
    assert (folded / "LICENSE").is_file()
    assert "license: apache-2.0" in (folded / "README.md").read_text()
    assert sum("left out: modeling_own.py" in line for line in said) == 1


@pytest.mark.parametrize("name", ["tokenization_own.py", "sentencepiece.bpe.model"])
def test_what_reads_the_text_is_asked_again_where_it_has_changed(
    name: str, tiny_mixtral: Path, tmp_path: Path, modules_apart: Path
) -> None:
    """Code of a tokenizer of which config.json says nothing, and a vocabulary of another name; a licence reads none."""
    model = with_code(tiny_mixtral, tmp_path / "model", model_code=False)
    config = json.loads((model / "config.json").read_text())
    del config["auto_map"]
    (model / "config.json").write_text(json.dumps(config))
    (model / "sentencepiece.bpe.model").write_bytes(b"words")
    skipped = []
    for changed in (None, None, "LICENSE", name):
        if changed is not None:
            (model / changed).write_text((model / changed).read_text() + "\n")
        _, said = run(model, tmp_path / "run", "trust_remote_code=true", stages=("profile",))
        skipped.append(any("unchanged, skipped" in line for line in said))
    assert skipped == [False, True, True, False]


@pytest.mark.full
def test_with_trust_it_goes_along_and_is_listed(tiny_mixtral: Path, tmp_path: Path, modules_apart: Path) -> None:
    model = with_code(tiny_mixtral, tmp_path / "model", model_code=False)
    context, said = run(model, tmp_path / "run", "trust_remote_code=true")
    native, plain = context.directory("export"), format_directory(context.out, "dequantized")
    assert (tmp_path / RAN).is_file()
    digest = sha256((model / "tokenization_own.py").read_bytes()).hexdigest()
    for directory in (native, plain):
        assert sha256((directory / "tokenization_own.py").read_bytes()).hexdigest() == digest
        assert "AutoTokenizer" in entries_for_code(directory)["tokenizer_config.json"]
        assert "AutoTokenizer" in entries_for_code(directory)["config.json"]
        assert f"- tokenization_own.py, SHA-256 {digest}" in (directory / "README.md").read_text()
        assert not (directory / "training_args.bin").exists()
        assert type(AutoTokenizer.from_pretrained(directory, trust_remote_code=True)).__name__ == "Tokens"
    assert {(one.file, one.origin) for one in read_manifest(native).code} == {
        (HOOK_FILE, "moeq"),
        ("tokenization_own.py", "model"),
    }
    assert inspect(native)["code"]["tokenization_own.py"] == f"code of the original model, SHA-256 {digest}"
    assert "  left out: training_args.bin (libraries and pickles never go along)" in said
    converted(native, tmp_path, digest)
    (native / "stage.json").unlink()
    (native / "SHA256SUMS").unlink()
    (native / "tokenization_own.py").write_text("print()")
    with pytest.raises(ArtifactError, match=r"tokenization_own\.py: changed since the manifest was written"):
        inspect(native)


def converted(native: Path, tmp_path: Path, digest: str) -> None:
    """`convert` of a checkpoint with code: the same rule."""
    left = conversion.convert(native, "dequantized", tmp_path / "untrusted")
    assert not list((tmp_path / "untrusted").glob("*.py"))
    assert entries_for_code(tmp_path / "untrusted") == {}
    assert any(note.startswith("left out: tokenization_own.py, auto_map of config.json") for note in left["notes"])
    conversion.convert(native, "dequantized", tmp_path / "trusted", trust_remote_code=True)
    (code,) = (tmp_path / "trusted").glob("*.py")
    assert sha256(code.read_bytes()).hexdigest() == digest
    shown = inspect(tmp_path / "trusted", trust_remote_code=True)
    assert shown["code"] == {"tokenization_own.py": f"SHA-256 {digest}"}
    assert "code" not in inspect(tmp_path / "untrusted")


def test_trust_given_later_makes_the_checkpoint_again(tiny_mixtral: Path, tmp_path: Path, modules_apart: Path) -> None:
    model = with_code(tiny_mixtral, tmp_path / "model", model_code=False)
    text = json.loads((model / "tokenizer_config.json").read_text())
    (model / "tokenizer_config.json").write_text(json.dumps(text | {"tokenizer_class": "PreTrainedTokenizerFast"}))
    short = "export.formats=[]"
    context, _ = run(model, tmp_path / "run", short)
    assert not (context.directory("export") / "tokenization_own.py").exists()
    context, _ = run(model, tmp_path / "run", short, "trust_remote_code=true")
    assert (context.directory("export") / "tokenization_own.py").is_file()
