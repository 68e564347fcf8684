"""The hub on 127.0.0.1, which also takes uploads: repositories, branches, Git LFS and commits, each with its rights."""

from __future__ import annotations

import base64
import json
import shutil
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import yaml
from models.hub_server import COMMIT, KNOWN, TOKEN, Handler, Hub

READER, OTHER = "hf_reader", "hf_other"
KNOWN |= {READER}
ROLES = {TOKEN: ("org", "write"), OTHER: ("somebody", "write"), READER: ("org", "read")}
BASE_MODEL = "is not valid. Use a model id from https://hf.co/models"


@dataclass
class WritableHub(Hub):
    """root: where branches lie, NAME/BRANCH. sent: bytes that came of each object, also of those that broke off."""

    root: Path = Path()
    private: set[str] = field(default_factory=set)
    objects: dict[str, bytes] = field(default_factory=dict)
    sent: Counter[str] = field(default_factory=Counter)
    cut: dict[str, int] = field(default_factory=dict)  # object: bytes after which its connection breaks, every time
    on_upload: Callable[[str], None] = lambda moment: None  # called when an object has "come", and when it is "stored"
    moved: bool = False  # whether somebody else commits before every commit
    commits: list[tuple[str, str, list[str]]] = field(default_factory=list)  # repository, branch, what it did

    def branch(self, name: str, branch: str) -> Path:
        return self.root / name / branch

    def add(self, name: str, *, private: bool = False) -> None:
        """Make a repository as the hub does: with a branch that holds .gitattributes."""
        self.repositories[name] = self.branch(name, "main")
        self.repositories[name].mkdir(parents=True)
        (self.repositories[name] / ".gitattributes").write_text("*.safetensors filter=lfs\n")
        if private:
            self.private.add(name)


class WritingHandler(Handler):
    hub: WritableHub

    def do_POST(self) -> None:
        self.write()

    def do_PUT(self) -> None:
        self.write()

    def answer(self) -> None:
        hub, path = self.hub, unquote(urlsplit(self.path).path)
        token = self.token()
        if path == "/api/whoami-v2":
            hub.requests.append((self.command, path, None, token))
            if token not in ROLES:
                return self.refuse(401, message="Invalid credentials in Authorization header")
            name, role = ROLES[token]
            return self.json({"name": name, "auth": {"accessToken": {"role": role}}})
        parts = path.strip("/").split("/")
        name = "/".join(parts[2:4])
        if parts[:2] == ["api", "models"] and name in hub.repositories and self.sees(name):
            hub.requests.append((self.command, path, None, token))
            if len(parts) == 4:
                return self.json(self.info(name))
            folder = hub.branch(name, "main" if parts[5] == COMMIT else parts[5])
            if not folder.is_dir():
                return self.refuse(404, "RevisionNotFound")
            return self.json(self.info(name) if parts[4] == "revision" else tree(folder))
        super().answer()

    def token(self) -> str | None:
        return (self.headers.get("Authorization") or "").removeprefix("Bearer ") or None

    def sees(self, name: str) -> bool:
        return name not in self.hub.private or self.may(name)

    def may(self, name: str) -> bool:
        return ROLES.get(self.token() or "") == (name.split("/")[0], "write")

    def info(self, name: str) -> dict[str, Any]:
        return {"id": name, "sha": COMMIT, "private": name in self.hub.private, "tags": [], "siblings": []}

    def write(self) -> None:
        hub, path = self.hub, unquote(urlsplit(self.path).path)
        hub.requests.append((self.command, path, None, self.token()))
        if path.startswith("/objects/"):
            return self.store(path.removeprefix("/objects/"))
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if hub.broken:
            return self.refuse(hub.broken)
        if path == "/api/validate-yaml":
            return self.validate(json.loads(body)["content"])
        if self.token() not in ROLES:
            return self.refuse(401, message="Invalid credentials in Authorization header")
        if path == "/api/repos/create":
            return self.create(json.loads(body))
        parts = path.strip("/").split("/")
        name = "/".join(parts[2:4]) if parts[0] == "api" else path.split(".git/")[0].strip("/")
        if name not in hub.repositories or not self.sees(name):
            return self.refuse(404, "RepoNotFound")
        if not self.may(name):
            return self.refuse(403, message="You don't have the rights to write")
        if path.endswith("/info/lfs/objects/batch"):
            return self.batch(json.loads(body))
        action, branch = parts[4], parts[5]
        if action == "branch":
            shutil.copytree(hub.branch(name, "main"), hub.branch(name, branch))
            return self.json({})
        if action == "preupload":
            return self.json({"files": [mode(file) for file in json.loads(body)["files"]]})
        assert action == "commit"
        self.commit(name, branch, [json.loads(line) for line in body.splitlines()])

    def create(self, asked: dict[str, Any]) -> None:
        name = f"{asked['organization']}/{asked['name']}"
        if not self.may(name):
            return self.refuse(403, message="You don't have the rights to create a model there")
        if name in self.hub.repositories:
            return self.json({"url": f"/{name}"}, 409)
        self.hub.add(name, private=asked.get("visibility") == "private")
        self.json({"url": f"http://{self.headers['Host']}/{name}"})

    def validate(self, card: str) -> None:
        """As the hub does it: names of base models are names on the hub."""
        front = yaml.safe_load(card.split("---\n")[1])
        base = front.get("base_model", "org/name")
        if not isinstance(base, str) or ":" in base:
            return self.json({"errors": [{"message": f'"base_model" {BASE_MODEL}'}]}, 400)
        self.json({"errors": [], "warnings": [] if "license" in front else [{"message": "no license"}]})

    def batch(self, asked: dict[str, Any]) -> None:
        objects = []
        for one in asked["objects"]:
            upload = {"upload": {"href": f"http://{self.headers['Host']}/objects/{one['oid']}"}}
            objects.append(one if one["oid"] in self.hub.objects else one | {"actions": upload})
        self.json({"transfer": "basic", "objects": objects})

    def store(self, oid: str) -> None:
        """An object, as its storage takes it: whole and with the digest that it is named by, or not at all."""
        size = int(self.headers["Content-Length"])
        data = self.rfile.read(min(size, self.hub.cut.get(oid, size)))
        self.hub.sent[oid] += len(data)
        if len(data) < size:
            self.close_connection = True
            return None
        self.hub.on_upload("come")
        if sha256(data).hexdigest() != oid:
            return self.refuse(400, message="the digest differs")
        self.hub.objects[oid] = data
        self.hub.on_upload("stored")
        self.json({})

    def commit(self, name: str, branch: str, lines: list[dict[str, Any]]) -> None:
        header, *operations = lines
        if self.hub.moved or header["value"].get("parentCommit") != COMMIT:
            return self.refuse(412, message="A commit has happened since")
        folder = self.hub.branch(name, branch)
        for operation in operations:
            value = operation["value"]
            path = folder / value["path"]
            if operation["key"] == "deletedFile":
                path.unlink()
            elif operation["key"] == "lfsFile":
                path.write_bytes(self.hub.objects[value["oid"]])
            else:
                path.write_bytes(base64.b64decode(value["content"]))
        self.hub.commits.append((name, branch, [f"{one['key']} {one['value']['path']}" for one in operations]))
        self.json({"commitUrl": f"http://{self.headers['Host']}/{name}/commit/{COMMIT}", "commitOid": COMMIT})


def mode(file: dict[str, Any]) -> dict[str, Any]:
    """Weights go through LFS, all else through git."""
    way = "lfs" if file["path"].endswith(".safetensors") else "regular"
    return {"path": file["path"], "uploadMode": way, "shouldIgnore": False}


def tree(folder: Path) -> list[dict[str, Any]]:
    """The files of a branch, with the digests of those in LFS."""
    entries: list[dict[str, Any]] = []
    for path in sorted(one for one in folder.rglob("*") if one.is_file()):
        data = path.read_bytes()
        entry = {"type": "file", "path": path.relative_to(folder).as_posix(), "size": len(data), "oid": "0" * 40}
        if path.suffix == ".safetensors":
            entry["lfs"] = {"oid": sha256(data).hexdigest(), "size": len(data), "pointerSize": 134}
        entries.append(entry)
    return entries
