"""Hub models: the client against a hub on this machine and against its own cache; every refusal has its remedy."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from huggingface_hub import constants
from models.hub_server import COMMIT, TOKEN, Hub, serving
from safetensors.torch import load_file, save_file

from moeq.artifacts.remote import BLOCKS
from moeq.errors import MissingError, ModelError, StorageError
from moeq.exporters.front_matter import Origin, read_origin
from moeq.models.remote_source import HEADERS_BYTES, tensor_of
from moeq.models.side_files import find_side_files
from moeq.models.source import INDEX, open_config, open_source

NAME = "org/tiny"


@pytest.fixture
def repository(tiny_mixtral: Path, tmp_path: Path) -> Path:
    """The tiny model in two shards, with what a repository often holds beside."""
    folder = tmp_path / "repository"
    shutil.copytree(tiny_mixtral, folder)
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    weight_map: dict[str, str] = {}
    for number, part in enumerate((names[::2], names[1::2]), 1):
        file = f"model-{number:05d}-of-00002.safetensors"
        save_file({name: tensors[name] for name in part}, folder / file, {"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (folder / "consolidated.safetensors").write_bytes(b"x" * 1000)
    (folder / "original").mkdir()
    (folder / "original" / "pytorch_model.bin").write_bytes(b"x" * 1000)
    (folder / "modeling_tiny.py").write_text("raise SystemExit\n")
    return folder


@pytest.fixture
def hub(repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with serving(tmp_path / "cache", monkeypatch) as hub:
        hub.repositories[NAME] = repository
        yield hub


def test_only_what_is_needed_is_downloaded_and_the_commit_is_pinned(hub: Hub, tiny_mixtral: Path) -> None:
    source = open_source(NAME)
    assert source.revision == COMMIT
    assert source.stamp().revision == COMMIT
    shards = {"model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"}
    assert {path.name for path in source.files} == shards
    assert shards < hub.fetched()
    assert {"config.json", "tokenizer.json", INDEX} < hub.fetched()
    assert not {name for name in hub.fetched() if name.endswith((".py", ".bin"))}
    assert "consolidated.safetensors" not in hub.fetched()
    asked = len(hub.requests)
    assert open_source(NAME, COMMIT).stamp() == source.stamp()
    assert len(hub.requests) == asked, "a pinned revision in the cache needs no network"


def test_a_configuration_alone_takes_no_weights_along(hub: Hub) -> None:
    source = open_config(NAME)
    assert hub.fetched() == {"config.json"}
    assert source.tensors == {}
    assert (open_config(NAME, beside=("tokenizer.json", "none.json")).path / "tokenizer.json").is_file()
    assert "tokenizer.json" in hub.fetched()
    assert not [name for name in hub.fetched() if name.endswith((".safetensors", ".py"))]
    assert source.config == open_source(NAME).config


def test_headers_are_known_without_the_weights(hub: Hub) -> None:
    source = open_source(NAME, weights=False)
    sizes = {path.name: path.stat().st_size for path in hub.repositories[NAME].glob("model-*.safetensors")}
    assert source.to_fetch == sizes
    assert {path.name for path in source.files} == set(sizes)
    assert not source.is_remote
    for name, size in sizes.items():
        assert size > HEADERS_BYTES // BLOCKS
        assert hub.gets(name) == [f"bytes=0-{HEADERS_BYTES // BLOCKS - 1}"]
        assert not (source.path / name).exists()
    whole = open_source(NAME)
    assert (whole.tensors, whole.to_fetch) == (source.tensors, {})
    asked = len(hub.requests)
    assert open_source(NAME, COMMIT, weights=False).to_fetch == {}
    assert len(hub.requests) == asked


def test_shards_may_lie_in_folders(hub: Hub, repository: Path) -> None:
    """Downloaded, by their headers alone, and read by ranges."""
    index = (repository / INDEX).read_text("utf-8")
    names = {}
    for path in list(repository.glob("model-*.safetensors")):
        (repository / path.stem).mkdir()
        names[path.name] = f"{path.stem}/model.safetensors"
        path.rename(repository / names[path.name])
        index = index.replace(path.name, names[path.name])
    (repository / INDEX).write_text(index)
    heads = open_source(NAME, weights=False)
    assert heads.to_fetch.keys() == set(names.values())
    assert heads.weights_bytes() == sum(path.stat().st_size for path in repository.glob("model-*/*"))
    remote = open_source(f"hf://{NAME}")
    whole = open_source(NAME)
    assert (whole.tensors, whole.to_fetch) == (heads.tensors, {})
    assert open_source(NAME, weights=False).tensors == whole.tensors
    for key, header in remote.tensors.items():
        assert torch.equal(tensor_of(header, key), tensor_of(whole.tensors[key], key))


def test_without_weights_a_refusal_is_that_of_a_download(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    shard = next(iter(hub.repositories[NAME].glob("model-00002*")))
    damaged = shard.read_bytes()
    shard.write_bytes(damaged[:-1])
    with pytest.raises(ModelError, match=r"model-00002.*truncated"):
        open_source(NAME, weights=False)
    shard.unlink()
    with pytest.raises(MissingError, match=r"model-00002.*shard is missing"):
        open_source(NAME, weights=False)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ModelError, match="HF_HUB_OFFLINE is set"):
        open_source(NAME, weights=False)


def test_what_does_not_fit_on_the_disk_is_not_begun(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = [path.stat().st_size for path in hub.repositories[NAME].glob("model-*.safetensors")]
    free = sum(sizes) - 1
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=free))
    with pytest.raises(StorageError, match=r"of weights are to be downloaded, .* are free there; .*hf://org/tiny"):
        open_source(NAME)
    assert not [name for name in hub.fetched() if name.endswith(".safetensors")]
    free += 1
    assert len(open_source(NAME).tensors) > 0
    free = 0
    assert len(open_source(NAME).tensors) > 0, "nothing is left to download"


def test_an_address_of_the_hub_is_read_by_ranges(hub: Hub) -> None:
    source = open_source(f"hf://{NAME}")
    assert source.is_remote
    assert source.tensors.keys() == open_source(NAME).tensors.keys()
    for key, header in source.tensors.items():
        assert torch.equal(tensor_of(header, key), load_file(hub.repositories[NAME] / header.file.name)[key])
    for file, size in ((file.name, file.stat().st_size) for file in source.files):
        assert hub.gets(file)[0] == f"bytes=0-{size - 1}", "one block, no more than it"


def test_code_comes_only_when_it_is_allowed(hub: Hub) -> None:
    assert not (open_source(NAME).path / "modeling_tiny.py").exists()
    assert (open_source(NAME, trust_remote_code=True).path / "modeling_tiny.py").exists()


@pytest.mark.full
def test_the_models_own_card_and_licence_come_along_where_they_can_be_had(
    hub: Hub, repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants

    (repository / "README.md").write_text("---\nlicense: mit\n---\n")
    (repository / "LICENSE").write_text("as you like")
    hub.dead.add("README.md")
    source = open_source(NAME)
    assert read_origin(source.path) == Origin()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert open_source(NAME).stamp() == source.stamp(), "a cache from before cards were fetched serves"
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    hub.dead.clear()
    source = open_source(NAME)
    assert read_origin(source.path).license == "mit"
    assert "LICENSE" in {path.name for path in find_side_files(source.path, source.config).data}


def test_a_gated_model_needs_the_licence_and_a_token(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.gated.add(NAME)
    with pytest.raises(ModelError, match=rf"{NAME}: gated \(401\): no token is set; accept the licence at http://127.*"
                                         r"/org/tiny, then set HF_TOKEN or run `hf auth login`"):  # fmt: skip
        open_source(NAME)
    monkeypatch.setenv("HF_TOKEN", "hf_other")
    with pytest.raises(
        ModelError, match=r"gated \(403\): the token that is set has no access to it; accept the licence"
    ):
        open_source(NAME)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    hub.requests.clear()
    assert open_source(NAME).revision == COMMIT
    assert {token for *_, token in hub.requests} == {TOKEN}


def test_a_token_of_hf_auth_login_is_used(hub: Hub, tmp_path: Path) -> None:
    hub.gated.add(NAME)
    (tmp_path / "cache").mkdir(exist_ok=True)
    (tmp_path / "cache" / "token").write_text(TOKEN)
    assert open_source(NAME).revision == COMMIT


def test_refusals_each_have_their_remedy(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ModelError, match=r"org/none: neither here nor on the hub, unless it is private or gated"
                                         r" \(401\); check the name; .*HF_TOKEN"):  # fmt: skip
        open_source("org/none")
    with pytest.raises(ModelError, match=r"no revision 'v2' on the hub; give a branch, tag or commit"):
        open_source(NAME, "v2")
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    with pytest.raises(ModelError, match=r"nor on the hub for the token that is set \(404\); check the name"):
        open_source("org/none")
    monkeypatch.setenv("HF_TOKEN", "hf_expired")
    with pytest.raises(
        ModelError, match=r"the hub does not know the token \(401\); set HF_TOKEN or run `hf auth login`"
    ):
        open_source(NAME)


def test_a_dropped_connection_is_resumed_where_it_broke_off(
    hub: Hub, repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 1000)  # what the client writes at once: 10 MB
    shard = "model-00001-of-00002.safetensors"
    hub.drop_after[shard] = 5000
    source = open_source(NAME)
    assert (source.path / shard).read_bytes() == (repository / shard).read_bytes()
    assert hub.gets(shard) == [None, "bytes=5000-"]


def test_an_interrupted_download_goes_on_with_what_is_missing(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import file_download

    missing = "model-00002-of-00002.safetensors"
    hub.dead.add(missing)
    monkeypatch.setattr(file_download.time, "sleep", lambda _: None)  # between the client's own attempts
    with pytest.raises(
        ModelError, match=r"org/tiny: the download broke off .*; run the same command again; what is already"
    ):
        open_source(NAME)
    hub.dead.clear()
    hub.requests.clear()
    assert open_source(NAME).revision == COMMIT
    assert hub.fetched() == {missing}


def test_a_hub_that_is_down_and_one_that_is_out_of_reach(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    hub.broken = 403
    with pytest.raises(ModelError, match=r"gated \(403\): no token is set; accept the licence"):
        open_source(NAME)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(ModelError, match=r":9 cannot be reached .*; check the network and the proxy; what .* is kept"):
        open_source(NAME)


def test_a_finished_download_is_used_offline_and_half_a_one_is_refused(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants

    stamp = open_source(NAME).stamp()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert open_source(NAME).stamp() == stamp
    snapshot = tmp_path / "cache" / "models--org--tiny" / "snapshots" / COMMIT
    (snapshot / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(
        ModelError, match=r"not in the cache at revision .*, or not whole, and HF_HUB_OFFLINE is set; .*unset"
    ):
        open_source(NAME)


def test_the_command_says_it_in_one_line(hub: Hub, tmp_path: Path) -> None:
    """A process of its own, told of the hub and the token by its environment alone."""
    from huggingface_hub import constants

    hub.gated.add(NAME)
    env = os.environ | {"HF_ENDPOINT": constants.ENDPOINT, "HF_HUB_OFFLINE": "0", "HF_HOME": str(tmp_path / "home"),
                        "HF_TOKEN": "hf_other"}  # fmt: skip
    command = [sys.executable, "-m", "moeq", "profile", "--model", NAME, "--out", str(tmp_path / "run"), "--quiet"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == ModelError.exit_code
    assert done.stderr.count("\n") == 1
    assert done.stderr.startswith("moeq: org/tiny: gated (403): the token that is set has no access to it; accept")
    assert not (tmp_path / "run").exists()
