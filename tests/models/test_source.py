"""Where models come from: directories, shards, the hub's cache; stamps tell models apart."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from moeq.errors import MissingError, ModelError
from moeq.models import loading
from moeq.models.remote_source import tensor_of
from moeq.models.side_files import find_side_files
from moeq.models.source import open_source


def test_a_hub_id_is_found_in_the_cache_and_pinned_to_its_commit(
    tiny_mixtral: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The real hub client, offline, on a cache laid out as it lays it out."""
    import huggingface_hub.constants

    commit = "0123456789abcdef0123456789abcdef01234567"
    repository = tmp_path / "models--some--model"
    shutil.copytree(tiny_mixtral, repository / "snapshots" / commit)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    source = open_source("some/model")
    assert source.revision == commit
    assert source.stamp().revision == commit
    assert source.stamp().digest == open_source(str(tiny_mixtral)).stamp().digest
    with pytest.raises(
        ModelError, match="neither here nor to be had from the hub: not in the cache, or not whole, and HF_HUB_OFFLINE"
    ):
        open_source("some/other-model")
    with pytest.raises(ModelError, match="not in the cache at revision v2, or not whole, and HF_HUB_OFFLINE"):
        open_source("some/model", revision="v2")
    (repository / "snapshots" / commit / "model.safetensors").unlink()  # which nothing in such a cache tells
    for weights in (True, False):
        with pytest.raises(ModelError, match=f"not in the cache at revision {commit}, or not whole, and HF_HUB_OFF"):
            open_source("some/model", weights=weights)


def shard(folder: Path, out: Path) -> Path:
    """The same model in two shards and an index."""
    shutil.copytree(folder, out)
    tensors = load_file(out / "model.safetensors")
    (out / "model.safetensors").unlink()
    names = sorted(tensors)
    weight_map = {}
    for number, part in enumerate((names[::2], names[1::2]), 1):
        file = f"model-{number:05d}-of-00002.safetensors"
        save_file({name: tensors[name] for name in part}, out / file, {"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    (out / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return out


def in_folders(model: Path) -> Path:
    """The same with its two shards in folders, both under one name."""
    index = model / "model.safetensors.index.json"
    text = index.read_text("utf-8")
    for number, folder in enumerate(("part-0", "part-1/b"), 1):
        (model / folder).mkdir(parents=True)
        name = f"model-{number:05d}-of-00002.safetensors"
        (model / name).rename(model / folder / "model.safetensors")
        text = text.replace(name, f"{folder}/model.safetensors")
    index.write_text(text)
    return model


def test_shards_may_be_links_to_files_elsewhere(tiny_mixtral: Path, tmp_path: Path) -> None:
    kept = shard(tiny_mixtral, tmp_path / "kept")
    (tmp_path / "linked").mkdir()
    for path in kept.iterdir():
        if path.suffix == ".safetensors":
            (tmp_path / "linked" / path.name).symlink_to(path)
        else:
            shutil.copy(path, tmp_path / "linked" / path.name)
    assert set(open_source(str(tmp_path / "linked")).tensors) == set(open_source(str(kept)).tensors)
    first = next((tmp_path / "linked").glob("*.safetensors"))
    first.unlink()
    first.symlink_to("/dev/zero")
    with pytest.raises(ModelError, match=rf"{first.name}: no regular file"):
        open_source(str(tmp_path / "linked"))


def test_shards_in_folders_are_files_of_the_model(tiny_mixtral: Path, tmp_path: Path) -> None:
    """Two of the same name; `a/b` of one folder is no `b` of another."""
    model = in_folders(shard(tiny_mixtral, tmp_path / "model"))
    source = open_source(str(model))
    for key, weight in load_file(tiny_mixtral / "model.safetensors").items():
        assert torch.equal(tensor_of(source.tensors[key], key), weight)
    assert {"part-0/model.safetensors", "part-1/b/model.safetensors"} < source.file_digests().keys()
    assert find_side_files(model, source.config).said() is None
    remote = open_source(f"file://{model}")
    assert (remote.stamp().digest, remote.weights_bytes()) == (source.stamp().digest, source.weights_bytes())
    for key, header in remote.tensors.items():
        assert torch.equal(tensor_of(header, key), tensor_of(source.tensors[key], key))
    (model / "part-1" / "b" / "model.safetensors").rename(model / "part-1" / "model.safetensors")
    with pytest.raises(MissingError, match=r"part-1/b/model\.safetensors: shard is missing"):
        open_source(str(model))


@pytest.mark.parametrize("name", ["part/../../x.safetensors", "/part/x.safetensors", "part//x.safetensors", "part/"])
def test_an_index_names_no_files_outside(name: str, tiny_mixtral: Path, tmp_path: Path) -> None:
    model = shard(tiny_mixtral, tmp_path / "model")
    index = model / "model.safetensors.index.json"
    index.write_text(index.read_text("utf-8").replace("model-00001-of-00002.safetensors", name))
    with pytest.raises(ModelError, match="not a weight index"):
        open_source(str(model))


@pytest.mark.parametrize("sharded", [True, False])
def test_weights_without_a_tensor_are_refused(sharded: bool, tiny_mixtral: Path, tmp_path: Path) -> None:
    model = shard(tiny_mixtral, tmp_path / "model")
    (model / "model.safetensors.index.json").write_text('{"weight_map": {}}')
    if not sharded:
        (model / "model.safetensors.index.json").unlink()
        save_file({}, model / "model.safetensors")
    with pytest.raises(ModelError, match="its weights are no tensors at all"):
        open_source(str(model))


def test_a_tensor_that_two_shards_hold_is_refused_with_both(tiny_mixtral: Path, tmp_path: Path) -> None:
    model = shard(tiny_mixtral, tmp_path / "model")
    first, second = sorted(model.glob("*.safetensors"))
    key, value = min(load_file(first).items())
    save_file(load_file(second) | {key: value}, second, {"format": "pt"})
    with pytest.raises(ModelError, match=f"{first.name}: tensor {key} is in it and in {second.name}: transformers"):
        open_source(str(model))


def test_shards_load_as_one_file_does(tiny_mixtral: Path, tmp_path: Path) -> None:
    source = open_source(str(shard(tiny_mixtral, tmp_path / "sharded")))
    whole = open_source(str(tiny_mixtral))
    assert len(source.files) == 2
    assert set(source.tensors) == set(whole.tensors)
    cpu = torch.device("cpu")
    first, second = (loading.load_model(one, torch.float32, cpu).state_dict() for one in (source, whole))
    assert all(torch.equal(first[name], second[name]) for name in second)


def test_stamps_change_with_weights_config_and_tokenizer(tiny_mixtral: Path, tmp_path: Path) -> None:
    stamps = {open_source(str(tiny_mixtral)).stamp().digest}
    for name, change in (
        ("model.safetensors", lambda data: data[:-1] + bytes([data[-1] ^ 1])),
        ("config.json", lambda data: data.replace(b"1e-05", b"1e-06")),
        ("tokenizer_config.json", lambda data: data + b"\n"),
    ):
        copy = tmp_path / name
        shutil.copytree(tiny_mixtral, copy)
        before = (copy / name).read_bytes()
        (copy / name).write_bytes(change(before))
        assert (copy / name).read_bytes() != before
        stamps.add(open_source(str(copy)).stamp().digest)
    assert len(stamps) == 4
