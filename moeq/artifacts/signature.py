"""model.sig: which files somebody has signed, as the package model-signing writes it; keys are looked at elsewhere.

https://github.com/sigstore/model-transparency: a Sigstore bundle around a DSSE envelope around an in-toto statement.
"""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from moeq.artifacts.provenance import Sha256
from moeq.artifacts.reading import PlainName, parse_json, read_bounded
from moeq.artifacts.sums import SIGNATURE
from moeq.errors import ArtifactError
from moeq.recipe.wording import refusal_of

MAX_BYTES = 64 << 20
REMEDY = "sign the checkpoint again, or get it anew from who signed it"


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class _File(_Part):
    name: PlainName
    algorithm: Literal["sha256"]
    digest: Sha256


class _Serialization(_Part):
    method: Literal["files"]
    hash_type: Literal["sha256"]
    allow_symlinks: bool
    ignore_paths: list[str] = []


class _Predicate(_Part):
    serialization: _Serialization
    resources: list[_File] = Field(min_length=1)


class _Statement(_Part):
    """The payload; subject: the directory's name and a digest of all digests, which the library compares."""

    type: Literal["https://in-toto.io/Statement/v1"] = Field(alias="_type")
    predicate_type: Literal["https://model_signing/signature/v1.0"] = Field(alias="predicateType")
    subject: list[dict[str, Any]]
    predicate: _Predicate


def read_signed(directory: Path) -> dict[str, str]:
    """{file: SHA-256} that a checkpoint's signature is over, by nobody's word until the signature is verified.

    Raises ArtifactError where there is no signature, or one of another kind than `moeq sign` makes.
    """
    path = directory / SIGNATURE
    data: Any = None
    try:
        envelope = parse_json(read_bounded(path, MAX_BYTES).decode("utf-8"))["dsseEnvelope"]
        data = parse_json(base64.b64decode(envelope["payload"], validate=True).decode("utf-8"))
        resources = _Statement.model_validate(data).predicate.resources
    except FileNotFoundError:
        do = "sign it with `moeq sign`, or verify it without --signature"
        raise ArtifactError("not signed", where=str(path), do=do) from None
    except ValidationError as error:
        what = f"no signature of files: {refusal_of(error, data).sentence()}"
        raise ArtifactError(what, where=str(path), do=REMEDY) from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        unread = isinstance(error, OSError | ValueError)
        what = f"cannot be read ({error})" if unread else "not as `moeq sign` writes it"
        raise ArtifactError(what, where=str(path), do=REMEDY) from None
    files = {one.name: one.digest for one in resources}
    if len(files) != len(resources):
        raise ArtifactError("a file is in it twice", where=str(path), do=REMEDY)
    return files
