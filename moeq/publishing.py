"""moeq push: a checkpoint, its card and its digests onto the hub, after it has been verified."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import constants

from moeq.artifacts.digests import digest_of_chunks
from moeq.artifacts.manifest import NAME as MANIFEST
from moeq.artifacts.provenance import check_provenance
from moeq.artifacts.signature import read_signed
from moeq.artifacts.sums import ACTIVE, SIGNATURE, Sums, check_sums
from moeq.artifacts.sums import NAME as SUMS
from moeq.errors import ArtifactError, PushError
from moeq.exporters.front_matter import CARD, loading_lines, published
from moeq.models import hub, hub_upload
from moeq.models.source import WEIGHTS
from moeq.progress import Reporter

HELD_BYTES = 16 << 20  # files up to this are read once: what was checked is what is sent
KEPT = {".gitattributes"}  # of a branch that is replaced


@dataclass(frozen=True, kw_only=True)
class Options:
    """replace: remove from the branch what the checkpoint does not hold; verify: load it first."""

    private: bool = False
    branch: str = hub_upload.DEFAULT_BRANCH
    replace: bool = False
    verify: bool = True
    trust_remote_code: bool = False


def push(checkpoint: Path, name: str, options: Options, reporter: Reporter) -> dict[str, Any]:
    """Upload the files that SHA256SUMS lists, itself, the card and a signature, with one commit; returns what is where.

    The card of a signed checkpoint goes as it was signed, without the repository's name in it.

    Raises ArtifactError for a damaged checkpoint and for a file that changes meanwhile, EvaluationError for one that
    loads wrongly, PushError for what the hub refuses, for other weights that are on the branch, and without a network.
    """
    (hub.be_quiet if reporter.quiet else hub.bars_on_terminals_only)()
    user = hub_upload.account()
    card = _card(checkpoint, name, options)
    if card:
        hub_upload.check_card(card)
    place = hub_upload.look(name, options.branch)
    sums, verified = _check(checkpoint, options, reporter)
    digests = _sent(checkpoint, sums, card)
    if place is not None:
        check_place(name, place, digests, options)
    reporter.say(f"  uploading {len(digests)} files to {name} as {user}")
    hub_upload.create(name, options.branch, private=options.private)
    place = hub_upload.look(name, options.branch)
    if place is None:
        raise PushError("made, but not to be seen", where=name, do="check the rights of the token that is set")
    check_place(name, place, digests, options)
    removed = sorted(set(place.files) - set(digests) - KEPT) if options.replace else []

    def unchanged(sent: Mapping[str, str]) -> None:
        check_sums(checkpoint, cached=True, reporter=reporter)
        for path, sha256 in sent.items():
            if sha256 != digests[path]:
                what = f"changed while it was uploaded; nothing of it is shown on {name}"
                raise ArtifactError(what, where=str(checkpoint / path), do="push again when nothing writes to it")

    try:
        commit, notes = hub_upload.send(
            name,
            options.branch,
            _contents(checkpoint, digests, card),
            removed=removed,
            parent=place.head,
            message="Checkpoint packed by moeq",
            check=unchanged,
        )
    except PushError:
        check_sums(checkpoint, cached=True)  # a file that changed is the cause of what the hub refuses
        raise
    size = sum((checkpoint / path).stat().st_size for path in digests)
    left_out = [path for path in sums.unlisted if path not in digests]
    return {
        "url": f"{constants.ENDPOINT}/{name}" + ("" if options.branch == "main" else f"/tree/{options.branch}"),
        "commit": commit,
        "seen_by": "its owners only" if place.private else "everybody",
        "files": len(digests),
        "bytes": size,
        **verified,
        **({"removed": removed} if removed else {}),
        **({"left_out": left_out} if left_out else {}),
        **({"notes": notes} if notes else {}),
        "load": "; ".join(line.partition("  #")[0] for line in loading_lines(card)) or f"hf download {name}",
    }


def check_place(name: str, place: hub_upload.Place, digests: Mapping[str, str], options: Options) -> None:
    """PushError where a branch holds other weights, or is seen by more people than asked for."""
    if options.private and not place.private:
        do = "leave --private out, choose another name, or make it private in its settings"
        raise PushError("is there, and everybody sees it", where=name, do=do)
    weights = [path for path in place.files if Path(path).suffix in ACTIVE - {".py"}]
    other = sorted(path for path in weights if path not in digests or place.files[path] != digests[path])
    if other and not options.replace:
        more = f" and {len(other) - 1} more" if len(other) > 1 else ""
        do = "choose another name or --branch, or remove them in the same commit with --replace"
        raise PushError(f"branch {options.branch} holds other weights: {other[0]}{more}", where=name, do=do)


def _check(checkpoint: Path, options: Options, reporter: Reporter) -> tuple[Sums, dict[str, Any]]:
    """Every byte against its digest, and what the loader makes of it; what verification found, for the summary."""
    from moeq.verification import verify
    from moeq.verification.manifest_files import check_native

    found = {}
    if options.verify:
        asked = verify.Options(trust_remote_code=options.trust_remote_code)
        verdict = verify.verify(checkpoint, asked, reporter)
        verify.require(verdict)
        found = {"verified_with": verdict.target, "logits_error": verdict.logits_error}
    elif (checkpoint / MANIFEST).is_file():
        check_native(checkpoint, reporter)
    sums = check_sums(checkpoint, cached=options.verify, reporter=reporter)
    if sums is None:
        raise ArtifactError(f"no {SUMS}", where=str(checkpoint), do="export it again")
    sums.require_inactive(checkpoint)
    check_provenance(checkpoint, sums)
    return sums, found


def _sent(checkpoint: Path, sums: Sums, card: str) -> dict[str, str]:
    """{file: SHA-256} of what is sent; ArtifactError for a signature over something else."""
    digests = {**sums.files, SUMS: _sha256((checkpoint / SUMS).read_bytes())}
    digests |= {CARD: _sha256(card.encode())} if card else {}
    return digests | _signed(checkpoint, digests)


def _signed(checkpoint: Path, digests: Mapping[str, str]) -> dict[str, str]:
    """The signature with its own digest, nothing where there is none; digests: of what is sent beside it.

    Raises ArtifactError for one that is not over what is sent: nobody could verify it there. Its key is not asked for.
    """
    if not (checkpoint / SIGNATURE).exists():
        return {}
    signed = read_signed(checkpoint)
    for path in sorted({*signed, *digests}):
        if signed.get(path) != digests.get(path):
            what = f"{SIGNATURE} is not over it as it is now"
            raise ArtifactError(what, where=str(checkpoint / path), do=f"sign again, or remove {SIGNATURE}")
    return {SIGNATURE: _sha256((checkpoint / SIGNATURE).read_bytes())}


def _card(checkpoint: Path, name: str, options: Options) -> str:
    """The card as it will stand on the hub, as it is where it is signed; "" where there is none.

    Raises PushError for one that is no text, or whose front matter cannot be read.
    """
    if not (checkpoint / CARD).is_file():
        return ""
    try:
        text = (checkpoint / CARD).read_text("utf-8")
        if (checkpoint / SIGNATURE).exists():
            return text
        return published(text, name, None if options.branch == hub_upload.DEFAULT_BRANCH else options.branch)
    except (ValueError, yaml.YAMLError) as error:
        what = f"the card cannot be read ({' '.join(str(error).split())})"
        raise PushError(what, where=str(checkpoint / CARD), do=hub_upload.CORRECT) from None


def _contents(checkpoint: Path, digests: Mapping[str, str], card: str) -> dict[str, Path | bytes]:
    """What is sent: weights and large files from where they lie, the others as they are now."""
    contents: dict[str, Path | bytes] = {}
    for path in digests:
        file = checkpoint / path
        held = file.suffix != WEIGHTS and file.stat().st_size <= HELD_BYTES
        contents[path] = file.read_bytes() if held else file
    return contents | ({CARD: card.encode()} if card else {})


def _sha256(data: bytes) -> str:
    return digest_of_chunks([data])
