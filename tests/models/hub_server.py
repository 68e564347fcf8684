"""A hub on 127.0.0.1 with the answers that the client looks at: listings, files in ranges, refusals, dropped lines."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import sha1
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest

COMMIT = "0123456789abcdef0123456789abcdef01234567"
TOKEN = "hf_good"
KNOWN = {TOKEN, "hf_other"}


@dataclass
class Hub:
    """What the hub holds, whom it lets in, what it was asked."""

    repositories: dict[str, Path] = field(default_factory=dict)  # "org/name", or "datasets/org/name"
    gated: set[str] = field(default_factory=set)
    drop_after: dict[str, int] = field(default_factory=dict)  # file: bytes after which the connection breaks, once
    dead: set[str] = field(default_factory=set)  # files whose connections break before the first byte
    broken: int = 0  # an HTTP status for every request
    requests: list[tuple[str, str, str | None, str | None]] = field(default_factory=list)  # method, path, range, token

    def gets(self, name: str) -> list[str | None]:
        """The ranges in which a file was asked for."""
        return [ranges for method, path, ranges, _ in self.requests if method == "GET" and path.endswith(f"/{name}")]

    def fetched(self) -> set[str]:
        """Names of the files that were downloaded."""
        return {
            path.split(COMMIT + "/")[1] for method, path, *_ in self.requests if method == "GET" and "/resolve/" in path
        }


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def log_message(self, *_: Any) -> None:
        return

    def do_HEAD(self) -> None:
        self.answer()

    def do_GET(self) -> None:
        self.answer()

    def answer(self) -> None:
        hub, path = self.hub, unquote(urlsplit(self.path).path)
        token = (self.headers.get("Authorization") or "").removeprefix("Bearer ") or None
        hub.requests.append((self.command, path, self.headers.get("Range"), token))
        if hub.broken:
            return self.refuse(hub.broken)
        if token is not None and token not in KNOWN:
            return self.refuse(401, message="Invalid credentials in Authorization header")
        api = path.startswith("/api/")
        name = next((n for n in hub.repositories if f"{path}/".startswith((f"/{n}/", f"/api/{_plural(n)}/"))), None)
        if name is None:
            return self.refuse(401 if token is None else 404, "RepoNotFound")
        rest = f"{path}/".split(f"{name}/", 1)[1].split("/")
        folder = hub.repositories[name]
        if api:
            if rest == [""]:
                return self.json(_info(name, folder))
            if rest[1] not in ("main", COMMIT):
                return self.refuse(404, "RevisionNotFound")
            return self.json(_info(name, folder) if rest[0] == "revision" else _tree(folder, "/".join(rest[2:-1])))
        if name in hub.gated and token != TOKEN:
            return self.refuse(401 if token is None else 403, "GatedRepo")
        self.file(folder / "/".join(rest[2:-1]))

    def refuse(self, status: int, code: str | None = None, message: str | None = None) -> None:
        self.send_response(status)
        if code:
            self.send_header("X-Error-Code", code)
        if message:
            self.send_header("X-Error-Message", message)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def json(self, value: Any, status: int = 200) -> None:
        data = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def file(self, path: Path) -> None:
        if not path.is_file():
            return self.refuse(404, "EntryNotFound")
        whole = path.read_bytes()
        first, _, last = (self.headers.get("Range") or "bytes=0-").removeprefix("bytes=").partition("-")
        start, data = int(first), whole[: int(last) + 1 if last else None]
        self.send_response(206 if start or last else 200)
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("ETag", f'"{_blob(whole)}"')
        self.send_header("Accept-Ranges", "bytes")
        if start or last:
            self.send_header("Content-Range", f"bytes {start}-{len(data) - 1}/{len(whole)}")
        self.send_header("Content-Length", str(len(data) - start))
        self.end_headers()
        if self.command == "HEAD":
            return
        stop = 0 if path.name in self.hub.dead else self.hub.drop_after.pop(path.name, None)
        self.wfile.write(data[start:stop])
        if stop is not None:
            self.wfile.flush()
            self.close_connection = True


def _plural(name: str) -> str:
    return name if name.startswith("datasets/") else f"models/{name}"


def _blob(data: bytes) -> str:
    return sha1(f"blob {len(data)}\0".encode() + data).hexdigest()


def _info(name: str, folder: Path) -> dict[str, Any]:
    files = [{"rfilename": entry["path"]} for entry in _tree(folder)]
    return {"id": name.removeprefix("datasets/"), "sha": COMMIT, "siblings": files, "private": False, "tags": []}


def _tree(folder: Path, below: str = "") -> list[dict[str, Any]]:
    return [
        {
            "type": "file",
            "path": path.relative_to(folder).as_posix(),
            "size": path.stat().st_size,
            "oid": _blob(path.read_bytes()),
        }
        for path in sorted((folder / below).rglob("*"))
        if path.is_file()
    ]


@contextmanager
def serving(cache: Path, patch: pytest.MonkeyPatch, hub: Any = None, handler: type[Handler] = Handler) -> Iterator[Any]:
    """A running hub that the client of this process talks to, with an empty cache and no token."""
    import huggingface_hub
    from huggingface_hub import constants

    hub = Hub() if hub is None else hub
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Bound", (handler,), {"hub": hub}))
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    address = f"http://127.0.0.1:{server.server_port}"
    patch.setattr(constants, "ENDPOINT", address)
    patch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", address + "/{repo_id}/resolve/{revision}/{filename}")
    patch.setattr(constants, "HF_HUB_OFFLINE", False)
    patch.setattr(constants, "HF_HUB_CACHE", str(cache))
    patch.setattr(constants, "HF_TOKEN_PATH", str(cache / "token"))
    patch.delenv("HF_TOKEN", raising=False)
    huggingface_hub.close_session()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
        huggingface_hub.close_session()
