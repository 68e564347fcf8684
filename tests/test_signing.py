"""moeq sign and moeq verify --signature: what is signed here is verified elsewhere, and nothing else is."""

from __future__ import annotations

import base64
import datetime
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.x509.oid import NameOID
from typer.testing import CliRunner

from moeq import pipeline, signing
from moeq.artifacts.digests import digest_of_file
from moeq.artifacts.provenance import NAME as PROVENANCE
from moeq.artifacts.sums import write_sums
from moeq.cli import app
from moeq.errors import ArtifactError, MoeqError, RecipeError
from moeq.progress import Reporter
from moeq.recipe import load_recipe
from moeq.stages.context import Context

LESS = ("corpus.sequences=4", "corpus.sequence_length=24", "losses.methods=[rtn]", "losses.group_size=16",
        "eval.perplexity.sequences=2", "eval.perplexity.sequence_length=24", "eval.tasks=[]", "eval.compare=[]",
        "assign={method: uniform, bits: 3, quantizer: rtn}", "export.verify=false")  # fmt: skip
WEIGHTS, EXPERTS = "model-00001-of-00001.safetensors", "experts-layer-000.safetensors"
ARTIFACT = ArtifactError.exit_code


def pem(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


def private_pem(path: Path, key: Any, passphrase: bytes | None = None) -> Path:
    kind = serialization.NoEncryption() if passphrase is None else serialization.BestAvailableEncryption(passphrase)
    return pem(path, key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, kind))


def public_pem(path: Path, key: Any) -> Path:
    form = serialization.PublicFormat.SubjectPublicKeyInfo
    return pem(path, key.public_key().public_bytes(serialization.Encoding.PEM, form))


@dataclass(frozen=True)
class Issued:
    """A certificate with the files that it is used from."""

    key: Path
    certificate: Path
    root: Path
    trust: signing.Trust

    @property
    def signer(self) -> signing.Signer:
        return signing.Signer(key=self.key, certificate=self.certificate, chain=(self.root,))


def issued(folder: Path, *, days: tuple[int, int] = (-10, 10)) -> Issued:
    """A root and a certificate for signing by it, valid between these days from now."""
    folder.mkdir(parents=True)
    now = datetime.datetime.now(datetime.UTC)
    keys = [ec.generate_private_key(ec.SECP256R1()) for _ in range(2)]
    names = [x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"{folder.name} {name}")]) for name in ("root", "leaf")]
    for place, path in enumerate((folder / "root.pem", folder / "leaf.pem")):
        usage = dict.fromkeys(
            ("content_commitment", "key_encipherment", "data_encipherment", "key_agreement", "crl_sign",
             "encipher_only", "decipher_only"), False,
        )  # fmt: skip
        made = (
            x509.CertificateBuilder()
            .subject_name(names[place])
            .issuer_name(names[0])
            .public_key(keys[place].public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now + datetime.timedelta(days=-100 if place == 0 else days[0]))
            .not_valid_after(now + datetime.timedelta(days=100 if place == 0 else days[1]))
            .add_extension(x509.BasicConstraints(ca=place == 0, path_length=None), critical=True)
            .add_extension(
                x509.KeyUsage(digital_signature=place == 1, key_cert_sign=place == 0, **usage), critical=True
            )
            .sign(keys[0], hashes.SHA256())
        )
        pem(path, made.public_bytes(serialization.Encoding.PEM))
    key, root = private_pem(folder / "leaf.key", keys[1]), folder / "root.pem"
    return Issued(key, folder / "leaf.pem", root, signing.Trust(roots=(root,)))


@dataclass(frozen=True)
class Made:
    """A signed checkpoint, the key that it is verified with, and others."""

    signed: Path
    key: Path
    public: Path
    other_key: Path
    other_public: Path
    by_other: Path

    @property
    def trust(self) -> signing.Trust:
        return signing.Trust(public_key=self.public)

    def copy(self, folder: Path) -> Path:
        return Path(shutil.copytree(self.signed, folder / "copy", symlinks=True))


def run(model: Path, out: Path, *settings: str) -> Path:
    context = Context(
        recipe=load_recipe(None, (*LESS, *settings)), model_name=str(model), out=out, reporter=Reporter(quiet=True)
    )
    pipeline.run(context, ("profile", "losses", "assign", "quantize", "export"))
    return out / "checkpoint"


@pytest.fixture(scope="module")
def made(tiny_mixtral: Path, tmp_path_factory: pytest.TempPathFactory) -> Made:
    folder = tmp_path_factory.mktemp("signing")
    keys = [ec.generate_private_key(ec.SECP256R1()) for _ in range(2)]
    signed = run(tiny_mixtral, folder / "run")
    (signed / "stage.json").unlink()
    made = Made(
        signed,
        private_pem(folder / "key.pem", keys[0]),
        public_pem(folder / "public.pem", keys[0]),
        private_pem(folder / "other.pem", keys[1]),
        public_pem(folder / "other-public.pem", keys[1]),
        Path(shutil.copytree(signed, folder / "by-other")),
    )
    signing.sign(made.signed, signing.Signer(key=made.key))
    (made.by_other / "README.md").write_text("another card")
    signing.sign(made.by_other, signing.Signer(key=made.other_key))
    return made


def test_signed_here_and_verified_elsewhere_from_files_alone(made: Made, tmp_path: Path) -> None:
    """By a process each, which share nothing but the files."""
    checkpoint, there = made.copy(tmp_path), tmp_path / "elsewhere" / "downloaded"
    (checkpoint / "model.sig").unlink()
    signs = [sys.executable, "-m", "moeq", "sign", str(checkpoint), "--key", str(made.key)]
    subprocess.run(signs, check=True, capture_output=True)
    shutil.copytree(checkpoint, there)
    shutil.rmtree(checkpoint)
    code = "import sys; from pathlib import Path; from moeq.signing import *; " \
        "print(check_signature(Path(sys.argv[1]), Trust(public_key=Path(sys.argv[2]))))"  # fmt: skip
    environment = {**os.environ, "MOEQ_CACHE": str(tmp_path / "cache")}
    verifies = [sys.executable, "-c", code, str(there), str(made.public)]
    done = subprocess.run(verifies, check=True, capture_output=True, text=True, env=environment)
    names = {path.name for path in there.iterdir()} - {"model.sig"}
    assert done.stdout == f"model.sig is right: {len(names)} files, by public key {made.public}\n"
    (there / WEIGHTS).write_bytes((there / WEIGHTS).read_bytes()[:-1] + b"\x01")
    done = subprocess.run(verifies, capture_output=True, text=True, env=environment)
    assert done.returncode != 0
    assert f"{there / WEIGHTS}: changed since model.sig was made" in done.stderr


def flipped(name: str, place: float = 0.5) -> Callable[[Path, Made], None]:
    """One bit of a file."""

    def tamper(checkpoint: Path, _: Made) -> None:
        data = bytearray((checkpoint / name).read_bytes())
        data[min(int(place * len(data)), len(data) - 1)] ^= 1
        (checkpoint / name).write_bytes(data)

    return tamper


def edited(name: str, change: Callable[[bytes], bytes], sums: bool = False) -> Callable[[Path, Made], None]:
    """A file's bytes; sums: SHA256SUMS says the same then."""

    def tamper(checkpoint: Path, _: Made) -> None:
        before = (checkpoint / name).read_bytes()
        (checkpoint / name).write_bytes(change(before))
        assert (checkpoint / name).read_bytes() != before
        if sums:
            write_sums(checkpoint)

    return tamper


def shell(act: Callable[[Path], object]) -> Callable[[Path, Made], None]:
    return lambda checkpoint, _: act(checkpoint) and None


def swapped(checkpoint: Path, _: Made) -> None:
    first, second = (checkpoint / f"experts-layer-00{number}.safetensors" for number in (0, 1))
    first.rename(checkpoint / "aside")
    second.rename(first)
    (checkpoint / "aside").rename(second)


def linked(checkpoint: Path, made: Made) -> None:
    """The same bytes, by way of a link."""
    (checkpoint / WEIGHTS).unlink()
    (checkpoint / WEIGHTS).symlink_to(made.signed / WEIGHTS)


def restated(checkpoint: Path, _: Made) -> None:
    """A weight, the subject of the statement that is about it, and the sums of both."""
    flipped(EXPERTS, 0.9)(checkpoint, _)
    statement = json.loads((checkpoint / PROVENANCE).read_text("utf-8"))
    for subject in statement["subject"]:
        subject["digest"]["sha256"] = digest_of_file(checkpoint / subject["name"])
    (checkpoint / PROVENANCE).write_text(json.dumps(statement))
    write_sums(checkpoint)


def resigned(checkpoint: Path, made: Made) -> None:
    """The files as they are, by another key."""
    signing.sign(checkpoint, signing.Signer(key=made.other_key))


def bundle(change: Callable[[dict[str, Any]], object]) -> Callable[[Path, Made], None]:
    """The signature's JSON."""

    def tamper(checkpoint: Path, made: Made) -> None:
        data = json.loads((checkpoint / "model.sig").read_text("utf-8"))
        change(data)
        (checkpoint / "model.sig").write_text(json.dumps(data, separators=(",", ":")))

    return tamper


def covering_less(data: dict[str, Any]) -> None:
    """A payload without one file, of which it says that it is to be left out."""
    payload = json.loads(base64.b64decode(data["dsseEnvelope"]["payload"]))
    predicate = payload["predicate"]
    predicate["resources"] = [one for one in predicate["resources"] if one["name"] != WEIGHTS]
    predicate["serialization"]["ignore_paths"].append(WEIGHTS)
    data["dsseEnvelope"]["payload"] = base64.b64encode(json.dumps(payload).encode()).decode()


def other_hint(data: dict[str, Any]) -> None:
    data["verificationMaterial"]["publicKey"]["hint"] = "0" * 64


def signed_by_key(folder: Path, made: Made) -> None:
    """The signature of the same signer over a checkpoint with another card."""
    other = Path(shutil.copytree(made.by_other, folder.parent / "other"))
    signing.sign(other, signing.Signer(key=made.key))
    shutil.copy(other / "model.sig", folder)


TAMPERINGS: dict[str, tuple[str, Callable[[Path, Made], None]]] = {
    "a bit of the weights' header": (WEIGHTS, flipped(WEIGHTS, 0.0)),
    "a bit of the weights": (WEIGHTS, flipped(WEIGHTS, 0.7)),
    "the last bit of the experts": (EXPERTS, flipped(EXPERTS, 1.0)),
    "a bit of the placement": ("placement.json", flipped("placement.json")),
    "a bit of its schema": ("placement.schema.json", flipped("placement.schema.json")),
    "a bit of the configuration": ("config.json", flipped("config.json")),
    "a bit of the index": ("model.safetensors.index.json", flipped("model.safetensors.index.json")),
    "a bit of the tokenizer": ("tokenizer.json", flipped("tokenizer.json")),
    "a bit of its settings": ("tokenizer_config.json", flipped("tokenizer_config.json")),
    "a bit of the generation settings": ("generation_config.json", flipped("generation_config.json")),
    "a bit of the code": ("configuration_moeq.py", flipped("configuration_moeq.py")),
    "a bit of the provenance": (PROVENANCE, flipped(PROVENANCE)),
    "a bit of the sums": ("SHA256SUMS", flipped("SHA256SUMS")),
    "a bit of the card": ("README.md", flipped("README.md")),
    "the first bit of the signature": ("model.sig", flipped("model.sig", 0.0)),
    "a bit of the signature": ("model.sig", flipped("model.sig", 0.5)),
    "a late bit of the signature": ("model.sig", flipped("model.sig", 0.98)),
    "a space in the signature": ("model.sig", edited("model.sig", lambda data: data.replace(b":", b": ", 1))),
    "an empty signature": ("model.sig", edited("model.sig", lambda data: b"")),
    "half a signature": ("model.sig", edited("model.sig", lambda data: data[: len(data) // 2])),
    "another hint of the key": ("model.sig", bundle(other_hint)),
    "a time stamp in the signature": (
        "model.sig", bundle(lambda data: data["verificationMaterial"].update(timestampVerificationData={})),
    ),
    "a signature without signatures": ("model.sig", bundle(lambda data: data["dsseEnvelope"].update(signatures=[]))),
    "a signature over fewer files": ("model.sig", bundle(covering_less)),
    "no signature": ("model.sig", shell(lambda folder: (folder / "model.sig").unlink())),
    "signature of another checkpoint": (
        "README.md", signed_by_key,
    ),
    "signature of another checkpoint by another key": (
        "model.sig", lambda folder, made: shutil.copy(made.by_other / "model.sig", folder) and None,
    ),
    "signed again by another key": ("model.sig", resigned),
    "a file added": ("extra.bin", shell(lambda folder: (folder / "extra.bin").write_bytes(b"x"))),
    "code added": ("modeling_evil.py", shell(lambda folder: (folder / "modeling_evil.py").write_text("1"))),
    "an empty file added": ("empty", shell(lambda folder: (folder / "empty").touch())),
    "a hidden file added": (".hidden", shell(lambda folder: (folder / ".hidden").write_text("x"))),
    "an empty directory added": ("sub", shell(lambda folder: (folder / "sub").mkdir() or True)),
    "a directory with a file added": (
        "sub", shell(lambda folder: ((folder / "sub").mkdir(), (folder / "sub" / "x.py").write_text("x"))),
    ),
    "a pipe added": ("pipe", shell(lambda folder: os.mkfifo(folder / "pipe") or True)),
    "a file removed": ("tokenizer.json", shell(lambda folder: (folder / "tokenizer.json").unlink())),
    "the sums removed": ("SHA256SUMS", shell(lambda folder: (folder / "SHA256SUMS").unlink())),
    "the provenance removed": (PROVENANCE, shell(lambda folder: (folder / PROVENANCE).unlink())),
    "a file renamed": (WEIGHTS, shell(lambda folder: (folder / WEIGHTS).rename(folder / "z.safetensors"))),
    "two files swapped": (EXPERTS, swapped),
    "a file truncated": (WEIGHTS, edited(WEIGHTS, lambda data: data[:-1])),
    "a file appended to": (WEIGHTS, edited(WEIGHTS, lambda data: data + b"\0")),
    "a file emptied": (EXPERTS, edited(EXPERTS, lambda data: b"")),
    "a link in place of a file": (WEIGHTS, linked),
    "a link added": ("more", shell(lambda folder: (folder / "more").symlink_to("/etc/passwd") or True)),
    "a dangling link added": ("more", shell(lambda folder: (folder / "more").symlink_to("nowhere") or True)),
    "line endings of the card": ("README.md", edited("README.md", lambda data: data.replace(b"\n", b"\r\n"))),
    "a byte order mark": ("config.json", edited("config.json", lambda data: b"\xef\xbb\xbf" + data)),
    "a file and its sum": ("SHA256SUMS", edited("config.json", lambda data: data + b"\n", sums=True)),
    "a file, its sum and its subject": ("SHA256SUMS", restated),
    "sums of no file": ("SHA256SUMS", edited("SHA256SUMS", lambda data: b"")),
}  # fmt: skip


def test_there_are_enough_tamperings() -> None:
    assert len(TAMPERINGS) >= 40


@pytest.mark.cases(25)
@pytest.mark.parametrize("case", TAMPERINGS)
def test_every_tampering_is_refused_with_the_name_of_the_file(made: Made, case: str, tmp_path: Path) -> None:
    checkpoint = made.copy(tmp_path)
    signing.check_signature(checkpoint, made.trust)
    name, tamper = TAMPERINGS[case]
    tamper(checkpoint, made)
    with pytest.raises(ArtifactError) as caught:
        signing.check_signature(checkpoint, made.trust)
    line = str(caught.value)
    assert line.startswith(f"{checkpoint / name}: "), line
    assert "\n" not in line
    assert caught.value.do


def test_another_key_is_refused(made: Made) -> None:
    with pytest.raises(ArtifactError, match=r"model.sig: not a signature by this key, or changed since \(Key mismatch"):
        signing.check_signature(made.signed, signing.Trust(public_key=made.other_public))


def test_what_git_and_the_hub_put_beside_a_checkpoint_is_let_be(made: Made, tmp_path: Path) -> None:
    checkpoint = made.copy(tmp_path)
    (checkpoint / ".gitattributes").write_text("*.safetensors filter=lfs")
    (checkpoint / ".cache" / "huggingface").mkdir(parents=True)
    (checkpoint / "stage.json").write_text("{}")
    assert "is right" in signing.check_signature(checkpoint, made.trust)


def test_a_snapshot_of_the_hub_is_verified_through_its_links(made: Made, tmp_path: Path) -> None:
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "commit"
    shutil.copytree(made.signed, blobs)
    snapshot.mkdir(parents=True)
    for path in blobs.iterdir():
        (snapshot / path.name).symlink_to(Path("..") / ".." / "blobs" / path.name)
    assert "is right" in signing.check_signature(snapshot, made.trust)
    (snapshot / WEIGHTS).unlink()
    (snapshot / WEIGHTS).symlink_to(made.signed / WEIGHTS)
    with pytest.raises(ArtifactError, match=r"a link that leads out of the directory"):
        signing.check_signature(snapshot, made.trust)


def test_certificates(made: Made, tmp_path: Path) -> None:
    own, other, old = issued(tmp_path / "own"), issued(tmp_path / "other"), issued(tmp_path / "old", days=(-20, -1))
    checkpoint = made.copy(tmp_path)
    signing.sign(checkpoint, own.signer)
    assert signing.check_signature(checkpoint, own.trust).endswith("by certificate of CN=own leaf")
    for trust in (other.trust, made.trust):
        with pytest.raises(ArtifactError, match=r"model.sig: not a signature by th(ese roots|is key), or "):
            signing.check_signature(checkpoint, trust)
    flipped(EXPERTS)(checkpoint, made)
    with pytest.raises(ArtifactError, match=rf"{EXPERTS}: changed since model.sig was made"):
        signing.check_signature(checkpoint, own.trust)
    flipped(EXPERTS)(checkpoint, made)
    signing.sign(checkpoint, old.signer)
    with pytest.raises(ArtifactError, match=r"model.sig: its certificate is not valid today \(.*expired"):
        signing.check_signature(checkpoint, old.trust)
    mixed = signing.Signer(key=other.key, certificate=own.certificate, chain=(own.root,))
    with pytest.raises(RecipeError, match="or its certificate is not of this key"):
        signing.sign(checkpoint, mixed)


@pytest.mark.parametrize("case", ["changed", "sums", "unlisted", "subject", "no sums", "link"])
def test_a_damaged_checkpoint_is_not_signed(made: Made, case: str, tmp_path: Path) -> None:
    checkpoint = made.copy(tmp_path)
    (checkpoint / "model.sig").unlink()
    name, tamper = {
        "changed": (WEIGHTS, flipped(WEIGHTS)),
        "sums": ("config.json", edited("SHA256SUMS", lambda data: data.replace(data[:8], b"0" * 8, 1))),
        "unlisted": ("extra.txt", shell(lambda folder: (folder / "extra.txt").write_text("x"))),
        "subject": ("config.json", edited("config.json", lambda data: data + b"\n", sums=True)),
        "no sums": ("SHA256SUMS", shell(lambda folder: (folder / "SHA256SUMS").unlink())),
        "link": (WEIGHTS, linked),
    }[case]
    tamper(checkpoint, made)
    with pytest.raises(ArtifactError, match=name):
        signing.sign(checkpoint, signing.Signer(key=made.key))
    assert not (checkpoint / "model.sig").exists()


def test_a_key_with_a_passphrase(made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint, own = made.copy(tmp_path), ec.generate_private_key(ec.SECP384R1())
    key, public = private_pem(tmp_path / "locked.pem", own, b"open"), public_pem(tmp_path / "locked.pub", own)
    monkeypatch.delenv(signing.PASSPHRASE, raising=False)
    with pytest.raises(RecipeError, match=r"locked.pem: encrypted; set MOEQ_KEY_PASSPHRASE, or sign at a terminal"):
        signing.sign(checkpoint, signing.Signer(key=key))
    monkeypatch.setenv(signing.PASSPHRASE, "wrong")
    with pytest.raises(RecipeError, match=r"no private key .* that opens"):
        signing.sign(checkpoint, signing.Signer(key=key))
    monkeypatch.setenv(signing.PASSPHRASE, "open")
    signing.sign(checkpoint, signing.Signer(key=key))
    assert "is right" in signing.check_signature(checkpoint, signing.Trust(public_key=public))


def refused(*arguments: object) -> MoeqError:
    done = CliRunner().invoke(app, [str(one) for one in arguments])
    assert isinstance(done.exception, MoeqError), done.output
    assert "\n" not in str(done.exception)
    return done.exception


def test_what_is_asked_wrongly_is_refused_at_once(made: Made, tmp_path: Path) -> None:
    other_kind = private_pem(tmp_path / "rsa.pem", rsa.generate_private_key(65537, 2048))
    checkpoint = made.copy(tmp_path)
    inner = Path(shutil.copy(made.public, checkpoint / "public.pem"))
    keys = "give --public-key or --certificate-chain, as you got it from who signed"
    for arguments, line in {
        ("verify", checkpoint, "--signature"): f"--signature: needs one key or root to trust; {keys}",
        ("verify", checkpoint, "--public-key", made.public): "give --signature too",
        ("verify", checkpoint, "--signature", "--public-key", tmp_path / "none"): "none: no such file or directory",
        ("verify", checkpoint, "--signature", "--public-key", inner): "lies in the checkpoint itself",
        ("verify", checkpoint, "--signature", "--public-key", checkpoint.parent): "not a key or certificate in PEM",
        ("verify", made.signed, "--signature", "--public-key", made.signed.parent / "recipe.yaml"): "no public key of",
        ("verify", made.signed, "--signature", "--public-key", made.other_public): "not a signature by this key",
        ("sign", checkpoint, "--key", other_kind): "no private key of an elliptic curve",
        ("sign", checkpoint, "--key", made.public): "no private key of an elliptic curve",
        ("sign", checkpoint, "--key", inner): "lies in the checkpoint itself",
        ("sign", checkpoint, "--key", made.key, "--certificate", made.public): "give --certificate-chain too",
        ("sign", checkpoint, "--key", made.key, "--certificate-chain", made.public): "give --certificate too",
    }.items():
        assert line in str(refused(*arguments)), arguments
    assert refused("verify", made.signed, "--signature", "--public-key", made.other_public).exit_code == ARTIFACT


def test_without_the_extra_one_line_says_how_to_install_it(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "model_signing", None)
    for arguments in (
        ("sign", made.signed, "--key", made.key), ("verify", made.signed, "--signature", "--public-key", made.public)
    ):  # fmt: skip
        assert str(refused(*arguments)).endswith("; pip install 'moeq[sign]'")


def test_verify_says_whether_the_signature_was_looked_at(made: Made, tmp_path: Path) -> None:
    def told(*options: object) -> Any:
        done = CliRunner().invoke(app, ["verify", str(made.signed), *map(str, options), "--json"])
        return json.loads(done.stdout)["signature"]

    assert told() == "model.sig was not looked at: give --signature and a key"
    assert told("--signature", "--public-key", made.public).startswith("model.sig is right: 14 files, by public key")


@pytest.mark.full
def test_a_signature_does_not_outlive_what_it_is_over(made: Made, tiny_mixtral: Path, tmp_path: Path) -> None:
    """A run again, for another width or for figures in the card, and a conversion leave none behind."""
    out = tmp_path / "run"
    sign = signing.Signer(key=made.key)
    signing.sign(run(tiny_mixtral, out), sign)
    run(tiny_mixtral, out)
    assert "is right" in signing.check_signature(out / "checkpoint", made.trust), "nothing was made again"
    done = CliRunner().invoke(
        app, ["convert", str(out / "checkpoint"), "--to", "dequantized", "--out", str(tmp_path / "d"), "--no-verify"]
    )
    assert done.exit_code == 0
    assert not (tmp_path / "d" / "model.sig").exists()
    context = Context(
        recipe=load_recipe(None, LESS), model_name=str(tiny_mixtral), out=out, reporter=Reporter(quiet=True)
    )
    pipeline.run(context)
    assert not (out / "checkpoint" / "model.sig").exists(), "the card has figures now"
    signing.sign(out / "checkpoint", sign)
    run(tiny_mixtral, out, "assign.bits=4")
    assert not (out / "checkpoint" / "model.sig").exists()
