"""Signing checkpoints, and verifying who signed them: keys and certificates in files, nothing of a network.

Signatures are those of the package model-signing (OpenSSF), over every file of a checkpoint but the signature itself.
The key or the roots to verify with come from the verifier: one that lies in the checkpoint would prove nothing.
"""

from __future__ import annotations

import base64
import getpass
import io
import json
import os
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moeq.artifacts.files import write_bytes
from moeq.artifacts.provenance import check_provenance, words
from moeq.artifacts.reading import inside
from moeq.artifacts.signature import REMEDY, read_signed
from moeq.artifacts.storage import storage_errors
from moeq.artifacts.sums import BESIDE, SIGNATURE, check_sums
from moeq.artifacts.sums import NAME as SUMS
from moeq.errors import ArtifactError, RecipeError, first_line, missing

PASSPHRASE = "MOEQ_KEY_PASSPHRASE"
KEY_BYTES = 1 << 20
UNSIGNED_FILES = frozenset({SIGNATURE, "stage.json", ".gitattributes"})  # of a run here, and of the hub
UNSIGNED_FOLDERS = frozenset({".git", ".cache"})  # of git and of the hub's client; loaders look into neither
MAKE_KEY = "make one: openssl ecparam -name prime256v1 -genkey -noout -out key.pem"


@dataclass(frozen=True, kw_only=True)
class Signer:
    """key: private, in PEM; certificate: of that key, and chain: of who issued it, up to a root."""

    key: Path
    certificate: Path | None = None
    chain: Sequence[Path] = ()


@dataclass(frozen=True, kw_only=True)
class Trust:
    """Whom a verifier trusts: public_key of a signer, or roots of certificates; one of the two."""

    public_key: Path | None = None
    roots: Sequence[Path] = ()


def check_signer(checkpoint: Path, signer: Signer) -> None:
    """What signing needs, before anything is read: MissingError, RecipeError."""
    if signer.chain and signer.certificate is None:
        raise RecipeError("of no certificate", where="--certificate-chain", do="give --certificate too")
    named: dict[str, Sequence[Path | None]] = {"--key": [signer.key], "--certificate": [signer.certificate]}
    named["--certificate-chain"] = signer.chain
    _check_named(checkpoint, named)
    if signer.certificate is not None and not signer.chain:
        raise RecipeError("its issuers are not named", where="--certificate", do="give --certificate-chain too")


def check_trust(checkpoint: Path, trust: Trust, *, wanted: bool) -> None:
    """What verifying a signature needs; wanted: whether it was asked for. MissingError, RecipeError."""
    given = trust.public_key is not None or bool(trust.roots)
    if not wanted:
        if given:
            raise RecipeError("a key, and no signature is verified", where="--public-key", do="give --signature too")
        return
    if not given or (trust.public_key is not None and trust.roots):
        do = "give --public-key or --certificate-chain, as you got it from who signed"
        raise RecipeError("needs one key or root to trust", where="--signature", do=do)
    _check_named(checkpoint, {"--public-key": [trust.public_key], "--certificate-chain": trust.roots})


def _check_named(checkpoint: Path, named: Mapping[str, Sequence[Path | None]]) -> None:
    """MissingError for files that are not there, RecipeError for those that lie in the checkpoint or are none."""
    for option, paths in named.items():
        for path in paths:
            if path is None:
                continue
            if not path.exists():
                raise missing(path, f"give a file in PEM to {option}")
            if not path.is_file() or path.stat().st_size > KEY_BYTES:
                raise RecipeError("not a key or certificate in PEM", where=f"{option} {path}", do="give its file")
            if path.resolve().is_relative_to(checkpoint.resolve()):
                what = "lies in the checkpoint itself: who changes that changes it too"
                raise RecipeError(what, where=f"{option} {path}", do="keep keys elsewhere, and get them another way")


def sign(checkpoint: Path, signer: Signer) -> dict[str, Any]:
    """Sign a checkpoint that is as its SHA256SUMS and its provenance say; returns what was signed.

    Raises ArtifactError for a damaged checkpoint and RecipeError for a key that cannot sign.
    """
    signing, _ = _library()
    files = _files(checkpoint)
    found: dict[str, str] = {}
    statement: list[str] = []

    def check(digests: Mapping[str, str]) -> None:
        """Before the key is used: what is signed is a whole checkpoint."""
        sums = check_sums(checkpoint, known=digests)
        if sums is None:
            raise ArtifactError(f"no {SUMS}", where=str(checkpoint), do="export it again")
        for name in sorted(set(digests) - set(sums.files) - BESIDE):
            raise ArtifactError(f"{SUMS} does not list it", where=str(checkpoint / name), do="remove it")
        statement.append(words(check_provenance(checkpoint, sums)))
        found.update(digests)

    config = signing.Config()
    _use(config, signer)
    config.set_hashing_config(_hashing(files, check))
    with tempfile.TemporaryDirectory(prefix="moeq-sign-") as folder, redirect_stdout(io.StringIO()):
        made = Path(folder) / SIGNATURE
        with storage_errors(checkpoint, "read"):
            config.sign(checkpoint, made)
        write_bytes(checkpoint / SIGNATURE, made.read_bytes())
    by = {"key": str(signer.key)} if signer.certificate is None else {"certificate": str(signer.certificate)}
    return {"signed": str(checkpoint / SIGNATURE), "files": len(found), **by, "provenance": statement[0]}


def _use(config: Any, signer: Signer) -> None:
    """Give the library its key; RecipeError for one that it cannot take."""
    passphrase = _passphrase(signer)
    try:
        if signer.certificate is None:
            config.use_elliptic_key_signer(private_key=signer.key, password=passphrase)
        else:
            config.use_certificate_signer(
                private_key=signer.key, signing_certificate=signer.certificate, certificate_chain=list(signer.chain)
            )
    except OSError:
        raise
    except Exception as error:  # of any kind that OpenSSL and the library know
        of = f"--key {signer.key}"
        what = f"no private key of an elliptic curve (P-256, P-384 or P-521) in PEM that opens ({first_line(error)})"
        if signer.certificate is not None:
            what, of = f"{what}, or its certificate is not of this key", f"{of}, --certificate {signer.certificate}"
        raise RecipeError(what, where=of, do=MAKE_KEY) from None


def _passphrase(signer: Signer) -> bytes | None:
    """Of an encrypted key: from the environment, or asked for at a terminal."""
    if b"ENCRYPTED" not in signer.key.read_bytes():
        return None
    where = f"--key {signer.key}"
    if signer.certificate is not None:
        what = "encrypted, which model-signing does not open beside a certificate"
        raise RecipeError(what, where=where, do="give the key without a passphrase")
    if PASSPHRASE in os.environ:
        return os.environ[PASSPHRASE].encode()
    if not sys.stdin.isatty():
        raise RecipeError("encrypted", where=where, do=f"set {PASSPHRASE}, or sign at a terminal")
    return getpass.getpass(f"Passphrase of {signer.key}: ").encode()


def check_signature(checkpoint: Path, trust: Trust) -> str:
    """Whose signature a checkpoint has, in words.

    Raises ArtifactError naming the file: for a signature that is not there, is damaged, or not of this key or these
    roots, and for the first file that was changed, added, taken away or put elsewhere by a link.
    """
    _, verifying = _library()
    signature = checkpoint / SIGNATURE
    stated = read_signed(checkpoint)
    files = _files(checkpoint)
    _check_canonical(signature)
    config, hashing = verifying.Config(), _hashing(files)
    try:
        if trust.public_key is not None:
            config.use_elliptic_key_verifier(public_key=trust.public_key)
        else:
            config.use_certificate_verifier(certificate_chain=list(trust.roots))
    except Exception as error:
        where = ", ".join(map(str, [trust.public_key] if trust.public_key is not None else trust.roots))
        what = f"no public key of an elliptic curve, or no certificate, in PEM ({first_line(error)})"
        raise RecipeError(what, where=where, do="give what the signer published") from None
    config.set_hashing_config(hashing)
    failed: Exception | None = None
    with redirect_stdout(io.StringIO()), storage_errors(checkpoint, "read"):
        try:
            config.verify(checkpoint, signature)
        except OSError:
            raise
        except Exception as error:  # of any kind that OpenSSL and the library know
            failed = error
    if failed is not None and not hashing.digests:
        whose = "this key" if trust.public_key is not None else "these roots"
        what = f"not a signature by {whose}, or changed since ({first_line(failed)})"
        raise ArtifactError(what, where=str(signature), do=REMEDY)
    _compare(checkpoint, stated, hashing.digests)
    if failed is not None:
        raise ArtifactError(f"not verified ({first_line(failed)})", where=str(signature), do=REMEDY)
    by = f"public key {trust.public_key}" if trust.public_key is not None else _certified(signature, trust.roots)
    return f"{SIGNATURE} is right: {len(stated)} files, by {by}"


def _compare(checkpoint: Path, stated: Mapping[str, str], found: Mapping[str, str]) -> None:
    """ArtifactError for the first file that is not as it was signed; whatever the library was told to leave out."""
    for name in sorted({*stated, *found}):
        if stated.get(name) != found.get(name):
            what = f"changed since {SIGNATURE} was made"
            what = what if name in stated and name in found else f"{SIGNATURE} does not cover it"
            what = what if name in found else f"missing, and {SIGNATURE} covers it"
            raise ArtifactError(what, where=str(checkpoint / name), do=REMEDY)


def _files(checkpoint: Path) -> list[Path]:
    """The files that a signature covers: all there are; ArtifactError for a folder, a pipe and a link.

    In a snapshot of the hub's cache files are links into the same model's `blobs`.
    """
    files = []
    for path in sorted(checkpoint.iterdir()):
        if path.name in UNSIGNED_FILES and path.is_file() and not path.is_symlink():
            continue
        if path.is_symlink() and checkpoint.resolve().parent.name != "snapshots":
            raise ArtifactError("a link, which no signature covers", where=str(path), do="put the file itself there")
        try:
            inside(checkpoint, path.name)
        except ValueError as error:
            raise ArtifactError(str(error), where=str(path), do=REMEDY) from None
        if path.is_dir() and path.name in UNSIGNED_FOLDERS:
            continue
        if not path.is_file():
            raise ArtifactError("no file, which no signature covers", where=str(path), do="remove it")
        if path.name not in UNSIGNED_FILES:
            files.append(path)
    return files


def _check_canonical(signature: Path) -> None:
    """ArtifactError unless the file is byte for byte what the library writes of what it reads there."""
    from sigstore_models.bundle.v1 import Bundle

    text = signature.read_text("utf-8")
    try:
        same = Bundle.from_dict(json.loads(text)).to_json() == text
    except Exception:  # of any kind that pydantic and base64 know
        same = False
    if not same or set(json.loads(text)["verificationMaterial"]) - {"publicKey", "x509CertificateChain", "tlogEntries"}:
        raise ArtifactError("changed since it was made", where=str(signature), do=REMEDY)


def _certified(signature: Path, roots: Sequence[Path]) -> str:
    """Who the certificate of a signature names; ArtifactError where it, or an issuer, is not valid today.

    The library judges certificates by the day on which they became valid: a signature has no date that could be proven.
    """
    from cryptography import x509
    from OpenSSL import crypto

    material = json.loads(signature.read_text("utf-8"))["verificationMaterial"]
    chain = [
        x509.load_der_x509_certificate(base64.b64decode(one["rawBytes"]))
        for one in material["x509CertificateChain"]["certificates"]
    ]
    store = crypto.X509Store()
    for root in x509.load_pem_x509_certificates(b"\n".join(path.read_bytes() for path in roots)):
        store.add_cert(crypto.X509.from_cryptography(root))
    leaf, *issuers = [crypto.X509.from_cryptography(one) for one in chain]
    try:
        crypto.X509StoreContext(store, leaf, issuers).verify_certificate()
    except crypto.X509StoreContextError as error:
        what = f"its certificate is not valid today ({first_line(error)})"
        raise ArtifactError(what, where=str(signature), do="have it signed with one that is") from None
    return f"certificate of {chain[0].subject.rfc4514_string()}"


def _library() -> tuple[Any, Any]:
    """signing and verifying of model-signing; RecipeError where it is not installed."""
    try:
        from model_signing import signing, verifying
    except ImportError as error:
        what = f"signatures need the package model-signing ({first_line(error)})"
        raise RecipeError(what, do="pip install 'moeq[sign]'") from None
    return signing, verifying


def _hashing(files: Sequence[Path], check: Callable[[Mapping[str, str]], None] | None = None) -> Any:
    """How the library hashes: these files and no others, each once; check: is given {name: SHA-256} before it goes on.

    `digests` of what is returned holds them then.
    """
    from model_signing import hashing

    class Hashing(hashing.Config):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.digests: dict[str, str] = {}

        def hash(self, model_path: Any, *, files_to_hash: Any = None) -> Any:
            manifest = super().hash(model_path, files_to_hash=files)
            self.digests = {one.identifier: one.digest.digest_hex for one in manifest.resource_descriptors()}
            if check is not None:
                check(self.digests)
            return manifest

    config = Hashing().set_ignored_paths(paths=[SIGNATURE, "stage.json"], ignore_git_paths=True)
    return config.set_allow_symlinks(any(path.is_symlink() for path in files))
