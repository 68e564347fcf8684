"""What goes along with the weights: data by name, no code without trust, nothing from outside of the directory."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from moeq.cli import app
from moeq.errors import ModelError
from moeq.models.side_files import find_side_files, without_code
from moeq.models.source import open_source

KEPT = {
    "LICENSE", "NOTICE.txt", "added_tokens.json", "chat_template.jinja", "generation_config.json", "merges.txt",
    "preprocessor_config.json", "qwen.tiktoken", "sentencepiece.bpe.model", "source.spm", "tokenizer.json",
    "tokenizer_config.json", "video_preprocessor_config.json", "vocab.json", "vocab.txt",
}  # fmt: skip
LEFT_CODE = {"evil.so", "modeling_x.py", "setup.sh", "state.pkl", "training_args.bin", "weights.ckpt", "x.cpython.pyc"}
NAMES = (
    KEPT | LEFT_CODE | {"README.md", ".gitattributes", "config.json", "events.out", "model.safetensors", "stage.json"}
)


@pytest.fixture
def model(tiny_mixtral: Path, tmp_path: Path) -> Path:
    return shutil.copytree(tiny_mixtral, tmp_path / "model")


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    path = tmp_path / "private" / "secret"
    path.parent.mkdir()
    path.write_text("{}")
    return path


def test_data_goes_along_by_name_and_code_only_where_it_is_trusted(tmp_path: Path) -> None:
    for name in NAMES:
        (tmp_path / name).write_text("{}")
    (tmp_path / "custom_generate").mkdir()
    (tmp_path / "custom_generate" / "generate.py").write_text("")
    (tmp_path / "images").mkdir()
    found = find_side_files(tmp_path, {})
    assert {path.name for path in found.data} == KEPT
    assert found.code == ()
    assert set(found.left_code) == LEFT_CODE | {"custom_generate/"}
    assert set(found.left_others) == {"events.out", "images/"}
    said = found.said()
    assert said is not None
    assert said.count("\n") == 0
    assert "custom_generate/" in said
    assert "--trust-remote-code" in said
    trusted = find_side_files(tmp_path, {}, trust_remote_code=True)
    assert {path.name for path in trusted.data} == KEPT
    assert [path.name for path in trusted.code] == ["modeling_x.py"]
    assert set(trusted.left_code) == LEFT_CODE - {"modeling_x.py"} | {"custom_generate/"}


def test_entries_for_code_are_left_out_at_any_depth() -> None:
    settings = {
        "auto_map": ["tokens_x.X", None],
        "chat_template": "{{ auto_map }}",
        "parts": [{"auto_map": {"AutoProcessor": "elsewhere/repo--x.X"}, "size": 3}, "auto_map"],
        "deep": {"er": {"custom_pipelines": {"x": {"impl": "x.X"}}, "kept": None}},
    }
    cleaned, keys = without_code(settings)
    assert keys == ["auto_map", "custom_pipelines"]
    assert cleaned == {
        "chat_template": "{{ auto_map }}",
        "parts": [{"size": 3}, "auto_map"],
        "deep": {"er": {"kept": None}},
    }
    assert "auto_map" in settings


def test_settings_are_written_without_their_entries_and_others_byte_for_byte(tmp_path: Path) -> None:
    folder, out = tmp_path / "model", tmp_path / "out"
    folder.mkdir()
    out.mkdir()
    texts = {
        "tokenizer_config.json": '{"auto\\u005fmap": ["x.X", null],   "bos_token": "<s>"}',  # in other words
        "preprocessor_config.json": '{"image_processor": {"auto_map": {"AutoImageProcessor": "x.X"}}}',
        "generation_config.json": '{"eos_token_id":   2}',
        "vocab.json": '{"auto_map": 7}',  # a token like any other
    }
    for name, text in texts.items():
        (folder / name).write_text(text)
    found = find_side_files(folder, {"auto_map": {"AutoModel": "x.X"}})
    assert found.entries == (
        "auto_map of config.json",
        "auto_map of preprocessor_config.json",
        "auto_map of tokenizer_config.json",
    )
    found.copy(out)
    written = {path.name: path.read_text() for path in out.iterdir()}
    assert json.loads(written["tokenizer_config.json"]) == {"bos_token": "<s>"}
    assert json.loads(written["preprocessor_config.json"]) == {"image_processor": {}}
    assert {name: written[name] for name in ("generation_config.json", "vocab.json")} == {
        name: texts[name] for name in ("generation_config.json", "vocab.json")
    }
    (folder / "tokenizer_config.json").write_text('{"auto_map": ')
    with pytest.raises(ModelError, match=r"tokenizer_config\.json: not valid JSON"):
        find_side_files(folder, {})


def replaced(path: Path, target: Path | str) -> None:
    path.unlink(missing_ok=True)
    path.symlink_to(target)


@pytest.mark.parametrize(
    "name",
    [
        "config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json", "vocab.txt", "README.md",
        "LICENSE", "model.safetensors.index.json", "notes.json", "modeling_x.py",
    ],
)  # fmt: skip
@pytest.mark.parametrize("kind", ["absolute", "relative", "by way of a link", "by way of a linked folder"])
def test_links_out_of_the_directory_are_refused(kind: str, name: str, model: Path, secret: Path) -> None:
    target: Path | str = secret
    if kind == "relative":
        target = os.path.relpath(secret, model)
    elif kind == "by way of a link":
        (model / "hop").symlink_to(secret)
        target = "hop"
    elif kind == "by way of a linked folder":
        (model / "folder").symlink_to(secret.parent)
        target = "folder/secret"
    replaced(model / name, target)
    with pytest.raises(ModelError) as caught:
        open_source(str(model))
    assert str(caught.value).startswith(f"{model / name}: '{name}' is a link that leads out of the directory, to ")
    assert str(secret) in str(caught.value)
    assert caught.value.exit_code == 3


def test_a_shard_that_only_the_index_names_is_refused(model: Path, secret: Path) -> None:
    (model / "model.safetensors").rename(model / "one.safetensors")
    (model / "two.weights").symlink_to(secret)
    index = {"weight_map": {"lm_head.weight": "one.safetensors", "x": "two.weights"}}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelError, match=r"'two\.weights' is a link that leads out"):
        open_source(str(model))


def test_links_that_end_nowhere_pipes_and_devices_are_refused_unread(model: Path) -> None:
    for target, what in (("nothing", "leads to nothing"), ("merges.txt", "leads to nothing")):
        replaced(model / "merges.txt", target)
        with pytest.raises(ModelError, match=rf"merges\.txt: a link that {what}"):
            open_source(str(model))
    (model / "merges.txt").unlink()
    os.mkfifo(model / "merges.txt")
    with pytest.raises(ModelError, match=r"merges\.txt: no regular file but a pipe"):
        open_source(str(model))
    replaced(model / "merges.txt", "/dev/zero")
    with pytest.raises(ModelError, match=r"leads out of the directory, to '/dev/zero'"):
        open_source(str(model))


def test_links_into_the_hubs_blobs_and_hard_links_are_followed(tiny_mixtral: Path, tmp_path: Path) -> None:
    repository = tmp_path / "models--some--model"
    snapshot, blobs = repository / "snapshots" / "0123abc", repository / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for number, path in enumerate(sorted(tiny_mixtral.iterdir())):
        shutil.copy(path, blobs / str(number))
        (snapshot / path.name).symlink_to(f"../../blobs/{number}")
    (tmp_path / "current").symlink_to(snapshot)
    for folder in (snapshot, tmp_path / "current"):
        assert open_source(str(folder)).stamp().digest == open_source(str(tiny_mixtral)).stamp().digest
        found = find_side_files(folder, {})
        out = tmp_path / f"out-{folder.name}"
        out.mkdir()
        found.copy(out)
        assert (out / "tokenizer.json").read_bytes() == (tiny_mixtral / "tokenizer.json").read_bytes()
        assert not (out / "tokenizer.json").is_symlink()
    hard = tmp_path / "hard"
    hard.mkdir()
    for path in tiny_mixtral.iterdir():
        os.link(path, hard / path.name)
    assert open_source(str(hard)).tensors


def test_a_file_that_becomes_a_link_meanwhile_is_not_followed(model: Path, secret: Path, tmp_path: Path) -> None:
    found = find_side_files(model, {})
    replaced(model / "tokenizer_config.json", secret)
    (tmp_path / "out").mkdir()
    with pytest.raises(ModelError, match="leads out of the directory"):
        found.copy(tmp_path / "out")


def test_every_command_refuses_such_a_model_and_leaves_nothing(model: Path, secret: Path, tmp_path: Path) -> None:
    replaced(model / "tokenizer.json", secret)
    commands: list[list[Any]] = [
        ["run", "--model", model, "--out", tmp_path / "run", "--quiet"],
        ["reparam", "--model", model, "--out", tmp_path / "reparam", "--quiet"],
        ["plan", "--model", model],
        ["inspect", model],
        ["convert", model, "--to", "dequantized", "--out", tmp_path / "converted", "--quiet"],
    ]
    for command in commands:
        refused = CliRunner().invoke(app, [str(part) for part in command])
        assert isinstance(refused.exception, ModelError), command
        assert "'tokenizer.json' is a link that leads out of the directory" in str(refused.exception)
    assert not (tmp_path / "converted").exists()
    assert not list(tmp_path.glob("*/checkpoint"))


def test_so_does_a_directory_with_a_gguf_file(secret: Path, tmp_path: Path) -> None:
    folder = tmp_path / "gguf"
    folder.mkdir()
    (folder / "model.gguf").write_bytes(b"GGUF")
    (folder / "config.json").symlink_to(secret)
    refused = CliRunner().invoke(app, ["inspect", str(folder)])
    assert isinstance(refused.exception, ModelError)
    assert "'config.json' is a link that leads out of the directory" in str(refused.exception)
