"""An agent's home and a person who sends code to a real hub."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path
from typing import Any

from atoll.code import pack
from atoll.config import JobSpec, JobTable
from atoll.hub.server import HubServer
from atoll.net.http.client import HubClient
from atoll.node.agent.workspace import Workspace, WorkspaceBuilder
from atoll.wire.messages import Launch
from tests.node.packages.packages import wheel
from tests.patience import PATIENCE_S

COMMAND = Launch(job="job", member="w0", slot=0, token="token", spec="")


class Machine:
    """An agent's home, and a person who sends code to the hub."""

    def __init__(self, hub: HubServer, folder: Path, **limits: Any) -> None:
        self.hub = hub
        self.folder = folder
        self.home = folder / "home"
        self.lines: list[str] = []
        self.requests: list[str] = []
        self.preparer = WorkspaceBuilder(self.home, self._client, **limits)

    def _client(self, token: str) -> HubClient:
        self.requests.append(token)
        return HubClient(self.hub.url, self.hub.operator_token)

    def send(self, **files: str | bytes) -> str:
        """Send a folder with these files; return what `code` of its job is."""
        source = self.folder / f"source-{time.monotonic_ns()}"
        source.mkdir()
        for name, content in files.items():
            path = source / name.replace("__", "/").replace("_DOT_", ".")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content if isinstance(content, bytes) else content.encode())
        with pack(source) as packed, self._client("") as client:
            return f"sha256:{client.put_blob(packed.path)}"

    async def prepare(
        self, code: str, *, requirements: str = "", member: str = "w0", at: Path | None = None
    ) -> Workspace:
        spec = JobSpec(job=JobTable(code=code, requirements=requirements))
        directory = at or self.folder / "work" / member
        return await self.preparer.prepare(
            COMMAND, spec, directory=directory, on_line=self.lines.append
        )

    def kept(self, kind: str) -> list[str]:
        """Return the packs (`code`) or the environments (`venvs`) in the cache."""
        found = (self.home / kind).glob("*.tar.gz" if kind == "code" else "*/ready.json")
        return [path.parent.name if kind == "venvs" else path.name[:-7] for path in found]


def with_package(name: str, **more: str | bytes) -> dict[str, str | bytes]:
    """Return the files of a project whose requirements are a package that it carries along."""
    return {
        f"{name}-1.0-py3-none-any_DOT_whl": wheel(name),
        "requirements_DOT_txt": f"--no-index\n./{name}-1.0-py3-none-any.whl\n",
        **more,
    }


def run(python: Path, code: str) -> str:
    done = subprocess.run(
        [python, "-c", code],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=True,
        cwd="/",
    )
    return done.stdout.strip()
