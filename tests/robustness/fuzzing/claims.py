"""Targets: what a checkpoint says of itself (provenance, signature), and files of unknown kind."""

from __future__ import annotations

import base64
import json
import random
from typing import Any, ClassVar

from robustness.fuzzing.artifacts import valid_assignment
from robustness.fuzzing.mutations import json_bytes, text_bytes
from robustness.fuzzing.target import JsonTarget, Place

from moeq import watching
from moeq.artifacts import mirror, provenance, status
from moeq.artifacts.provenance import read_provenance
from moeq.artifacts.reading import plain_name
from moeq.artifacts.run import STAGES
from moeq.artifacts.signature import read_signed
from moeq.artifacts.stage import RECORD
from moeq.artifacts.sums import SIGNATURE
from moeq.comparison.subjects import _of_json, _Opening
from moeq.inspection import inspect
from moeq.progress import Reporter


class Provenance(JsonTarget):
    """provenance.json: files of the directory with digests; it is told on one line."""

    name = "provenance"
    per_byte = 8  # a name of a byte in the models of pydantic

    def prepare(self, place: Place) -> None:
        whole = json.loads((place.checkpoint / provenance.NAME).read_text("utf-8"))
        whole["subject"] = whole["subject"][:3]
        definition = whole["predicate"]["buildDefinition"]
        definition["resolvedDependencies"] = definition["resolvedDependencies"][:6]
        self.value = whole

    def read(self, data: bytes) -> None:
        self.file(provenance.NAME, data)
        found = read_provenance(self.folder)
        assert found is not None
        for name, digest in found.files.items():
            plain_name(name)
            assert len(bytes.fromhex(digest)) == 32
        assert len(provenance.words(found).splitlines()) == 1
        again = type(found).model_validate(json.loads(json.dumps(found.as_json())))
        assert again.as_json() == found.as_json()


SIGNED: dict[str, Any] = {
    "_type": "https://in-toto.io/Statement/v1",
    "predicateType": "https://model_signing/signature/v1.0",
    "subject": [{"name": "checkpoint", "digest": {"sha256": "0" * 64}}],
    "predicate": {
        "serialization": {"method": "files", "hash_type": "sha256", "allow_symlinks": False, "ignore_paths": []},
        "resources": [{"name": "a", "algorithm": "sha256", "digest": "1" * 64}],
    },
}


class Signature(JsonTarget):
    """model.sig: the files that it is over, before any key is looked at."""

    name, per_byte = "signature", 8

    def prepare(self, place: Place) -> None:
        self.value = _enveloped(json.dumps(SIGNED).encode())

    def mutated(self, chance: random.Random) -> bytes:
        if chance.random() < 0.6:
            return json.dumps(_enveloped(json_bytes(SIGNED, chance))).encode()
        return super().mutated(chance) if chance.random() < 0.5 else text_bytes(self.valid(), chance)

    def read(self, data: bytes) -> None:
        self.file(SIGNATURE, data)
        for name, digest in read_signed(self.folder).items():
            plain_name(name)
            assert len(digest) == 64


def _enveloped(payload: bytes) -> dict[str, Any]:
    envelope = {"payload": base64.b64encode(payload).decode(), "payloadType": "x", "signatures": [{"sig": ""}]}
    return {"mediaType": "x", "dsseEnvelope": envelope}


class Inspected(JsonTarget):
    """`moeq inspect` of a JSON file that it has to find out about."""

    name = "inspected"
    spare = 4 << 20  # of what the report of a kind imports

    def prepare(self, place: Place) -> None:
        self.value = valid_assignment()

    def read(self, data: bytes) -> None:
        described = inspect(self.file("some.json", data))
        assert isinstance(described["kind"], str)


class Subject(JsonTarget):
    """A JSON file that `moeq eval` is to compare with: earlier results, or an assignment of a run."""

    name = "subject"
    value: ClassVar[Any] = {"kind": "moeq evaluation", "schema_version": 1, "rows": []}

    def read(self, data: bytes) -> None:
        assert _of_json(self.file("earlier.json", data), _Opening([], False))


class Copy(JsonTarget):
    """mirror.json of a run's copy in an object store: the files that it names lie below the run."""

    name = "mirror"

    def prepare(self, place: Place) -> None:
        stamp = {"bytes": 3, "sha256": "0" * 64}
        files = {"profile/stage.json": stamp, "store/a/layer-000.safetensors": stamp}
        self.value = {"schema_version": 1, "files": files}

    def read(self, data: bytes) -> None:
        self.file(mirror.LIST, data)
        run = self.folder / "run"
        for name in mirror.Mirror(f"file://{self.folder}", run, Reporter(quiet=True)).files:
            assert (run / name).resolve().is_relative_to(run.resolve())


class CopiedRecord(JsonTarget):
    """stage.json in a run's copy in an object store: of which model it is is asked before anything is brought."""

    name, refuses = "mirrored_record", False

    def prepare(self, place: Place) -> None:
        self.value = json.loads((place.checkpoint / RECORD).read_text("utf-8"))

    def read(self, data: bytes) -> None:
        stage = self.folder / "export"
        stage.mkdir(exist_ok=True)
        (stage / RECORD).write_bytes(data)
        files = {f"export/{RECORD}": {"bytes": len(data), "sha256": "0" * 64}}
        self.file(mirror.LIST, json.dumps({"schema_version": 1, "files": files}).encode())
        mirror.Mirror(f"file://{self.folder}", self.folder / "run", Reporter(quiet=True)).record("export")


class Said(JsonTarget):
    """What a running command says in the file that locks its directory: lines and a page can be made of it."""

    name, refuses = "status", False

    def prepare(self, place: Place) -> None:
        step = {"title": "losses", "total": 4, "done": 1, "began": 1.0}
        self.value = {
            "schema_version": 1, "host": "here", "pid": 1, "model": "m", "began": 1.0, "said": 2.0,
            "stages": ["losses"], "stage": step, "counted": [step], "workers": ["waiting"], "resident_bytes": 9,
        }  # fmt: skip

    def read(self, data: bytes) -> None:
        found = status.parse_status(data)
        if found is not None:
            rows = tuple(watching._row(self.folder, name, found) for name in found.stages if name in STAGES)
            view = watching.View(out=self.folder, rows=rows, sizes={}, status=found)
            watching.lines(view)
            watching.page(view)
            json.dumps(view.as_json(), allow_nan=False)
