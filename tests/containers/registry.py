"""A registry of images in a thread: enough of the protocol for a daemon to pull from it."""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import json
import platform
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

ABSENT = b'{"errors": [{"code": "MANIFEST_UNKNOWN", "message": "manifest unknown"}]}'
MANIFEST = "application/vnd.docker.distribution.manifest.v2+json"


class Registry:
    """Holds images of one layer each."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.asked: list[str] = []
        self.open = threading.Event()
        """Layers are sent while this is set."""
        self.open.set()
        self._blobs: dict[str, bytes] = {}
        self._manifests: dict[str, bytes] = {}

    def add(self, name: str, archive: bytes, **config: Any) -> str:
        """Add an image; return its pinned name."""
        layer = gzip.compress(archive, mtime=0)
        machine = {"x86_64": "amd64", "aarch64": "arm64"}.get(platform.machine(), "amd64")
        about = {
            "architecture": machine,
            "os": "linux",
            "config": {"Labels": {"name": name}, **config},
            "rootfs": {"type": "layers", "diff_ids": [_digest(archive)]},
        }
        parts = {
            "config": (
                json.dumps(about).encode(),
                "application/vnd.docker.container.image.v1+json",
            ),
            "layer": (layer, "application/vnd.docker.image.rootfs.diff.tar.gzip"),
        }
        described = {
            part: {"mediaType": kind, "size": len(data), "digest": _digest(data)}
            for part, (data, kind) in parts.items()
        }
        manifest = json.dumps(
            {
                "schemaVersion": 2,
                "mediaType": MANIFEST,
                "config": described["config"],
                "layers": [described["layer"]],
            }
        ).encode()
        for data, _ in parts.values():
            self._blobs[_digest(data)] = data
        for reference in ("latest", _digest(manifest)):
            self._manifests[f"{name}/manifests/{reference}"] = manifest
        return f"{self.address(name)}@{_digest(manifest)}"

    def address(self, name: str) -> str:
        return f"127.0.0.1:{self.port}/{name}"

    def find(self, path: str) -> tuple[bytes, str] | None:
        """Return what is at a path, and its type."""
        self.asked.append(path)
        if path == "/v2/":
            return b"{}", "application/json"
        rest = path.removeprefix("/v2/")
        if rest in self._manifests:
            return self._manifests[rest], MANIFEST
        blob = self._blobs.get(rest.rpartition("/blobs/")[2])
        if blob is None:
            return None
        if not blob.startswith(b"{"):
            self.open.wait()
        return blob, "application/octet-stream"


@contextlib.contextmanager
def start_registry() -> Iterator[Registry]:
    """Serve a registry on a free port of this machine."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            found = registry.find(self.path)
            body, kind = found or (ABSENT, "application/json")
            self.send_response(404 if found is None else 200)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            if kind == MANIFEST:
                self.send_header("Docker-Content-Digest", _digest(body))
            self.end_headers()
            if self.command == "GET":
                with contextlib.suppress(OSError):
                    self.wfile.write(body)

        do_HEAD = do_GET

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    registry = Registry(server.server_address[1])
    serving = threading.Thread(target=server.serve_forever, daemon=True)
    serving.start()
    try:
        yield registry
    finally:
        registry.open.set()
        server.shutdown()
        server.server_close()
        serving.join()


def _digest(data: bytes) -> str:
    return f"sha256:{hashlib.sha256(data).hexdigest()}"
