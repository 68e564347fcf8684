"""moeq push against a hub on this machine: rights, an upload that breaks off, what is there already, and back again."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from models.hub_server import TOKEN, serving
from models.hub_writing import OTHER, READER, WritableHub, WritingHandler
from typer.testing import CliRunner

from moeq import publishing
from moeq.artifacts.digests import digest_of_file
from moeq.cli import app
from moeq.errors import ArtifactError, EvaluationError, MissingError, PushError, RecipeError
from moeq.exporters.exporter import Exporter
from moeq.exporters.front_matter import loading_lines, published
from moeq.progress import Reporter
from moeq.registry import EXPORTERS
from moeq.stages.context import Context

NAME = "org/small"
QUIET = Reporter(quiet=True)
UNVERIFIED = publishing.Options(verify=False)
LESS = ("corpus.sequences=4", "corpus.sequence_length=24", "losses.methods=[rtn]", "losses.group_size=16",
        "eval.perplexity.sequences=2", "eval.perplexity.sequence_length=24", "eval.tasks=[]", "eval.compare=[]",
        "assign={method: uniform, bits: 3, quantizer: rtn}", "export.verify=false")  # fmt: skip
LARGE = "model-00001-of-00001.safetensors"


@pytest.fixture(scope="module")
def exported(tiny_mixtral: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    from moeq import pipeline
    from moeq.recipe import load_recipe

    recipe = load_recipe(None, LESS)
    out = tmp_path_factory.mktemp("push") / "run"
    context = Context(recipe=recipe, model_name=str(tiny_mixtral), out=out, reporter=QUIET)
    pipeline.run(context, ("profile", "losses", "assign", "quantize", "export"))
    return out / "checkpoint"


@pytest.fixture
def checkpoint(exported: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(exported, tmp_path / "checkpoint"))


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[WritableHub]:
    from huggingface_hub import constants
    from huggingface_hub.utils import _http

    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)  # the stand-in speaks Git LFS
    monkeypatch.setattr(_http.time, "sleep", lambda _: None)  # between the client's own attempts
    with serving(tmp_path / "cache", monkeypatch, WritableHub(root=tmp_path / "hub"), WritingHandler) as hub:
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        yield hub


def push(checkpoint: Path, **options: Any) -> dict[str, Any]:
    return publishing.push(checkpoint, NAME, publishing.Options(**{"verify": False} | options), QUIET)


def test_what_is_pushed_comes_back_the_same(hub: WritableHub, checkpoint: Path) -> None:
    from huggingface_hub import snapshot_download
    from transformers import AutoModelForCausalLM

    done = push(checkpoint, verify=True)
    assert done["url"].endswith("/org/small")
    assert done["seen_by"] == "everybody"
    assert done["verified_with"] == "native"
    assert done["notes"] == ["Warnings while validating metadata in README.md: - no license"]
    assert f'from_pretrained("{NAME}")' in done["load"]
    assert len(hub.commits) == 1, "all files are shown at once"
    back = Path(snapshot_download(NAME))
    names = {path.name for path in checkpoint.iterdir()} - {"stage.json"}
    assert {path.name for path in back.iterdir()} == names | {".gitattributes"}
    for name in names - {"README.md"}:
        assert (back / name).read_bytes() == (checkpoint / name).read_bytes()
    card = (back / "README.md").read_text("utf-8")
    assert card == published((checkpoint / "README.md").read_text("utf-8"), NAME, None)
    assert f'from_pretrained("{NAME}")' in card
    here, there = (AutoModelForCausalLM.from_pretrained(place).eval() for place in (str(checkpoint), NAME))
    ids = torch.arange(12)[None]
    with torch.no_grad():
        assert torch.equal(here(ids).logits, there(ids).logits)


def test_an_upload_that_broke_off_goes_on_with_what_is_missing(hub: WritableHub, checkpoint: Path) -> None:
    files = sorted(checkpoint.glob("*.safetensors"))
    sizes = {digest_of_file(path): path.stat().st_size for path in files}
    broken = digest_of_file(checkpoint / LARGE)
    hub.cut[broken] = 1000
    with pytest.raises(
        PushError, match=r"org/small: the upload broke off .*; run the same command again: what the hub"
    ):
        push(checkpoint)
    assert not hub.commits, "nobody sees half a checkpoint"
    assert [path.name for path in hub.repositories[NAME].iterdir()] == [".gitattributes"]
    assert set(hub.objects) == set(sizes) - {broken}
    attempts = hub.sent[broken] // 1000
    hub.cut.clear()
    push(checkpoint)
    assert hub.sent[broken] == attempts * 1000 + sizes[broken], "only what did not arrive is sent again"
    assert {oid: hub.sent[oid] for oid in sizes if oid != broken} == {o: s for o, s in sizes.items() if o != broken}
    before = dict(hub.sent)
    push(checkpoint)
    assert dict(hub.sent) == before, "what is there already is not sent"


@pytest.mark.cases(1)
@pytest.mark.parametrize("when", ["come", "stored"])
def test_a_file_that_changes_meanwhile_is_refused(hub: WritableHub, checkpoint: Path, when: str) -> None:
    """Before the hub has judged what came of it, and when all of it lies there."""
    whole = (checkpoint / LARGE).read_bytes()

    def change(moment: str) -> None:
        if moment == when:
            (checkpoint / LARGE).write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))

    hub.on_upload = change
    with pytest.raises(ArtifactError, match=rf"{LARGE}: changed since SHA256SUMS was written"):
        push(checkpoint)
    assert not hub.commits


def test_a_damaged_checkpoint_and_one_that_loads_wrongly_are_not_sent(
    hub: WritableHub, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from moeq.verification import verify

    (checkpoint / "extra.safetensors").write_bytes(b"x")
    with pytest.raises(ArtifactError, match=r"extra.safetensors: weights that SHA256SUMS does not list"):
        push(checkpoint)
    (checkpoint / "extra.safetensors").unlink()
    monkeypatch.setattr(verify, "_problems", lambda *_: ["layer 0: off by 0.3"])
    with pytest.raises(EvaluationError, match=r"layer 0: off by 0.3"):
        push(checkpoint, verify=True)
    data = (checkpoint / "config.json").read_text()
    (checkpoint / "config.json").write_text(data + " ")
    with pytest.raises(ArtifactError, match=r"config.json: changed since"):
        push(checkpoint)
    assert not hub.repositories, "nothing is made for it"


def test_refusals_of_the_hub_each_have_their_remedy(
    hub: WritableHub, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants

    for token, told in (
        (
            "hf_expired",
            r"the hub does not know the token \(401\); set HF_TOKEN or run `hf auth login` with a valid one",
        ),
        (READER, r"the token that is set may only read; make one that may write at http://127.*/settings/tokens"),
        (OTHER, r"org/small: the token that is set may not write there \(403\); set HF_TOKEN or .* account that may"),
    ):
        monkeypatch.setenv("HF_TOKEN", token)
        with pytest.raises(PushError, match=told):
            push(checkpoint)
    hub.add(NAME)
    with pytest.raises(PushError, match=r"may not write there \(403\)"):
        push(checkpoint)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    hub.moved = True
    with pytest.raises(PushError, match=r"somebody else wrote to it meanwhile \(412\)"):
        push(checkpoint)
    hub.broken = 503
    with pytest.raises(PushError, match=r"the hub answers 503"):
        push(checkpoint)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(PushError, match=r"127.0.0.1:9 cannot be reached .*; check the network"):
        push(checkpoint)


def test_private_repositories_and_branches(hub: WritableHub, checkpoint: Path) -> None:
    done = push(checkpoint, private=True, branch="two-bits")
    assert done["url"].endswith("/org/small/tree/two-bits")
    assert done["seen_by"] == "its owners only"
    assert f'from_pretrained("{NAME}", revision="two-bits")' in done["load"]
    assert [(name, branch) for name, branch, _ in hub.commits] == [(NAME, "two-bits")]
    hub.private.clear()
    with pytest.raises(PushError, match=r"is there, and everybody sees it; leave --private out"):
        push(checkpoint, private=True)


def test_other_weights_stay_unless_they_are_to_go(hub: WritableHub, checkpoint: Path) -> None:
    hub.add(NAME)
    folder = hub.repositories[NAME]
    (folder / "model.safetensors").write_bytes(b"the original's")
    (folder / "picture.png").write_bytes(b"png")
    with pytest.raises(PushError, match=r"branch main holds other weights: model.safetensors; .*--replace"):
        push(checkpoint)
    assert not hub.sent
    done = push(checkpoint, replace=True)
    assert done["removed"] == ["model.safetensors", "picture.png"]
    assert not (folder / "model.safetensors").exists()
    assert (folder / ".gitattributes").exists()


def test_weights_that_the_hub_keeps_in_git_stay_too(hub: WritableHub, checkpoint: Path) -> None:
    """Of them it tells no digest."""
    hub.add(NAME)
    (hub.repositories[NAME] / "pytorch_model.bin").write_bytes(b"the original's")
    with pytest.raises(PushError, match=r"branch main holds other weights: pytorch_model.bin; .*--replace"):
        push(checkpoint)
    assert push(checkpoint, replace=True)["removed"] == ["pytorch_model.bin"]


def test_cards_have_front_matter_that_the_hub_takes(hub: WritableHub, checkpoint: Path) -> None:
    card = (checkpoint / "README.md").read_text("utf-8")
    assert "base_model" not in card
    older = card.replace("library_name", "base_model: bundled:tiny\nbase_model_relation: quantized\nlibrary_name", 1)
    assert published(older, NAME, None) == published(card, NAME, None)
    listed = card.replace("library_name", "base_model:\n- org/one\n- two three\nlibrary_name", 1)
    assert published(listed, NAME, None) == published(card, NAME, None)
    named = card.replace("library_name", "base_model: org/tiny\nlibrary_name", 1)
    assert yaml.safe_load(published(named, NAME, None).split("---\n")[1])["base_model"] == "org/tiny"
    (checkpoint / "README.md").write_text(named.replace("org/tiny", "{a: 1}"))
    with pytest.raises(PushError, match=r"README.md: the hub refuses the card's front matter .*base_model"):
        push(checkpoint)


@pytest.mark.parametrize(
    ("card", "told"),
    [
        (b"---\nlicense: mit\n---\n# caf\xe9\n", "'utf-8' codec can't decode byte 0xe9"),
        (b"---\nlicense: [mit\n---\n", "while parsing a flow sequence"),
        (b"---\n- mit\n---\n", "front matter that is no mapping"),
    ],
)
def test_cards_that_cannot_be_read_are_refused_in_one_line(
    hub: WritableHub, checkpoint: Path, card: bytes, told: str
) -> None:
    (checkpoint / "README.md").write_bytes(card)
    with pytest.raises(PushError, match=rf"README.md: the card cannot be read \({told}.*; .* first two ---") as caught:
        push(checkpoint)
    assert "\n" not in str(caught.value)
    assert not hub.repositories


@pytest.mark.parametrize("exporter", [one for one in EXPORTERS if one.snippet], ids=lambda one: one.name)
def test_cards_of_every_format_say_how_it_is_loaded_from_the_hub(exporter: Exporter, tmp_path: Path) -> None:
    """By its name there, unless its runtime takes files: then they are downloaded first."""
    card = f"---\nlibrary_name: x\n---\n```python\n{exporter.snippet}\n```\n"
    lines = loading_lines(published(card, NAME, None))
    assert any(f'"{NAME}"' in line for line in lines) != (exporter.name in ("gguf", "exl3"))


@pytest.mark.cases(3)
@pytest.mark.parametrize(
    ("prepare", "name", "error", "told"),
    [
        (lambda path, _: shutil.rmtree(path), NAME, MissingError, "no such file or directory"),
        (lambda path, _: (path / "SHA256SUMS").unlink(), NAME, ArtifactError, "no SHA256SUMS"),
        (lambda _, patch: None, "small", RecipeError, "small: no name of a repository; give USER/NAME"),
        (lambda _, patch: patch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True), NAME, PushError,
         "HF_HUB_OFFLINE is set; unset it"),
        (lambda _, patch: patch.delenv("HF_TOKEN"), NAME, PushError,
         "the hub: no token is set; set HF_TOKEN or run `hf auth login` with one that may write"),
    ],
)  # fmt: skip
def test_refusals_before_anything_is_asked(
    hub: WritableHub,
    checkpoint: Path,
    monkeypatch: pytest.MonkeyPatch,
    prepare: Callable[[Path, pytest.MonkeyPatch], None],
    name: str,
    error: type[Exception],
    told: str,
) -> None:
    prepare(checkpoint, monkeypatch)
    done = CliRunner().invoke(app, ["push", str(checkpoint), name])
    assert isinstance(done.exception, error)
    assert told in str(done.exception)
    assert not hub.requests


def test_a_run_stands_for_its_checkpoint(hub: WritableHub, exported: Path) -> None:
    asked = ["push", str(exported.parent), NAME, "--no-verify", "--json"]
    done = CliRunner().invoke(app, asked, catch_exceptions=False)
    assert json.loads(done.stdout)["url"].endswith(NAME)


def test_the_command_says_where_it_is_and_how_it_is_loaded(hub: WritableHub, checkpoint: Path) -> None:
    done = CliRunner().invoke(app, ["push", str(checkpoint), NAME, "--no-verify", "--json"], catch_exceptions=False)
    told = json.loads(done.stdout)
    assert told["url"].endswith(NAME)
    assert NAME in told["load"]
    assert told["bytes"] == sum(path.stat().st_size for path in checkpoint.iterdir() if path.name != "stage.json")


def test_a_signature_goes_along_and_is_right_there(hub: WritableHub, checkpoint: Path, tmp_path: Path) -> None:
    """The card as it was signed; a signature over other bytes is not sent."""
    from cryptography.hazmat.primitives import serialization as form
    from cryptography.hazmat.primitives.asymmetric import ec
    from huggingface_hub import snapshot_download

    from moeq import signing

    own = ec.generate_private_key(ec.SECP256R1())
    plain, public = form.NoEncryption(), form.PublicFormat.SubjectPublicKeyInfo
    key, trusted = tmp_path / "key.pem", tmp_path / "public.pem"
    key.write_bytes(own.private_bytes(form.Encoding.PEM, form.PrivateFormat.PKCS8, plain))
    trusted.write_bytes(own.public_key().public_bytes(form.Encoding.PEM, public))
    signing.sign(checkpoint, signing.Signer(key=key))
    card = (checkpoint / "README.md").read_bytes()
    (checkpoint / "README.md").write_text("another card")
    with pytest.raises(ArtifactError, match=r"README.md: model.sig is not over it as it is now; sign again, or remove"):
        push(checkpoint)
    assert not hub.commits
    (checkpoint / "README.md").write_bytes(card)
    push(checkpoint)
    back = Path(snapshot_download(NAME))
    assert {"model.sig", "provenance.json"} <= {path.name for path in back.iterdir()}
    assert "is right" in signing.check_signature(back, signing.Trust(public_key=trusted))
