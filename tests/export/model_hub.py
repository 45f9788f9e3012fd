"""A model hub on this machine: the part of Hugging Face's protocol that uploads and downloads use.

Models are repositories as OWNER/NAME, data sets as datasets/OWNER/NAME.

Commits are lines of JSON (https://huggingface.co/docs/hub/api), large files go by Git LFS's batch
API (https://github.com/git-lfs/git-lfs/blob/main/docs/api/batch.md) with basic transfers.
"""

from __future__ import annotations

import base64
import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

TOKEN = "hf_writes"
COMMIT = "c" * 40


@dataclass
class Repository:
    """A model at the hub."""

    private: bool
    files: dict[str, bytes] = field(default_factory=dict)
    messages: list[str] = field(default_factory=list)
    large: set[str] = field(default_factory=set)


@dataclass
class ModelHub:
    """What the hub has."""

    url: str
    repositories: dict[str, Repository] = field(default_factory=dict)
    objects: dict[str, bytes] = field(default_factory=dict)
    read: list[str] = field(default_factory=list)
    """Files that were asked for, in order."""


@contextmanager
def model_hub() -> Iterator[ModelHub]:
    """Run a hub on the loopback interface."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    hub = ModelHub(f"http://127.0.0.1:{server.server_port}")
    server.hub = hub  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    @property
    def hub(self) -> ModelHub:
        found: ModelHub = self.server.hub  # type: ignore[attr-defined]
        return found

    def log_message(self, format: str, *args: object) -> None:
        """Be silent."""

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") == "chunked":
            parts = []
            while size := int(self.rfile.readline(), 16):
                parts.append(self.rfile.read(size))
                self.rfile.readline()
            self.rfile.readline()
            return b"".join(parts)
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def _answer(self, value: object, status: int = 200, **headers: str) -> None:
        body = value if isinstance(value, bytes) else json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("X-Repo-Commit", COMMIT)
        for name, text in headers.items():
            self.send_header(name.replace("_", "-"), text)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def do_POST(self) -> None:
        body, path = self._body(), unquote(urlsplit(self.path).path)
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            self._answer({"error": "who are you?"}, 401)
            return
        if path == "/api/repos/create":
            self._create(json.loads(body))
        elif path == "/api/validate-yaml":
            self._answer({"errors": [], "warnings": []})
        elif "/preupload/" in path:
            files = json.loads(body)["files"]
            modes = [
                {"path": one["path"], "shouldIgnore": False,
                 "uploadMode": "lfs" if one["path"].endswith(".safetensors") else "regular"}
                for one in files
            ]  # fmt: skip
            self._answer({"files": modes})
        elif path.endswith("/info/lfs/objects/batch"):
            self._batch(json.loads(body))
        elif path.endswith("/verify"):
            self._answer({})
        elif "/commit/" in path:
            self._commit(path.removeprefix("/api/models/").partition("/commit/")[0], body)
        else:
            self._answer({"error": path}, 404)

    def _create(self, request: dict[str, Any]) -> None:
        name = (
            f"{request['organization']}/{request['name']}"
            if request.get("organization")
            else request["name"]
        )
        address = {"url": f"{self.hub.url}/{name}", "name": name, "id": name}
        if name in self.hub.repositories:
            self._answer({"error": "exists", **address}, 409)
            return
        self.hub.repositories[name] = Repository(private=_private(request))
        self._answer(address)

    def _batch(self, request: dict[str, Any]) -> None:
        rows = []
        for one in request["objects"]:
            row = {"oid": one["oid"], "size": one["size"]}
            if one["oid"] not in self.hub.objects:
                place = f"{self.hub.url}/objects/{one['oid']}"
                row["actions"] = {"upload": {"href": place, "header": {}}}
            rows.append(row)
        self._answer({"transfer": "basic", "objects": rows})

    def _commit(self, name: str, body: bytes) -> None:
        repository = self.hub.repositories[name]
        for line in body.splitlines():
            entry = json.loads(line)
            value = entry["value"]
            if entry["key"] == "header":
                repository.messages.append(value["summary"])
            elif entry["key"] == "file":
                repository.files[value["path"]] = base64.b64decode(value["content"])
            elif entry["key"] == "lfsFile":
                repository.files[value["path"]] = self.hub.objects[value["oid"]]
                repository.large.add(value["path"])
        self._answer({"commitUrl": f"{self.hub.url}/{name}/commit/{COMMIT}", "commitOid": COMMIT,
                      "success": True})  # fmt: skip

    def do_PUT(self) -> None:
        body, oid = self._body(), self.path.rpartition("/")[2]
        if hashlib.sha256(body).hexdigest() != oid:
            self._answer({"error": "another content"}, 422)
            return
        self.hub.objects[oid] = body
        self._answer(b"")

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path).strip("/")
        if path.startswith(("api/models/", "api/datasets/")):
            name = "/".join(path.split("/")[2:4])
            if path.startswith("api/datasets/"):
                name = f"datasets/{name}"
            repository = self.hub.repositories.get(name)
            if repository is None:
                self._answer({"error": "no such model"}, 404, X_Error_Code="RepoNotFound")
                return
            files = [{"rfilename": one} for one in sorted(repository.files)]
            rows = [
                {"type": "file", "path": one, "size": len(data), "oid": COMMIT}
                for one, data in sorted(repository.files.items())
            ]  # fmt: skip
            info = {"id": name, "sha": COMMIT, "siblings": files, "private": repository.private}
            self._answer(rows if "/tree/" in f"/{path}/" else info)
            return
        name, _, file = path.partition("/resolve/")
        repository = self.hub.repositories.get(name)
        data = repository.files.get(file.partition("/")[2]) if repository is not None else None
        if data is None:
            self._answer({"error": "no such file"}, 404, X_Error_Code="EntryNotFound")
            return
        self.hub.read.append(file.partition("/")[2])
        self._answer(data, ETag=f'"{hashlib.sha256(data).hexdigest()}"')

    do_HEAD = do_GET


def _private(request: dict[str, Any]) -> bool:
    """Return what is asked for in the older or the newer form."""
    return bool(request.get("private")) or request.get("visibility") == "private"
