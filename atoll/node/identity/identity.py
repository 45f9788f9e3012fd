"""The identity of this machine: the node id and token that it received for a ticket."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

from atoll.errors import ConfigError, StorageFull
from atoll.net.endpoint import HubEndpoint

_FILE = "node.json"


@dataclass(frozen=True, slots=True)
class Identity:
    """What a machine keeps from its first join."""

    hub: str
    """URL of the hub, http(s)://HOST:PORT[/PREFIX]."""
    node: str
    """Node id, the address of its session."""
    token: str
    ca: str = ""
    """PEM file of the hub's certificate authority."""
    certificate: str = ""
    """PEM file of this machine's certificate."""
    key: str = ""
    """PEM file of its private key."""
    proxy: str = ""
    """URL of the proxy to the hub."""

    @property
    def endpoint(self) -> HubEndpoint:
        """How to reach the hub."""
        return HubEndpoint(ca=self.ca, certificate=self.certificate, key=self.key, proxy=self.proxy)


def load_identity(home: Path, *, hub: str) -> Identity | None:
    """Return this machine's identity at a hub, or None if it never joined."""
    try:
        known = json.loads((home / _FILE).read_text(encoding="utf-8"))
        return Identity(**known[hub])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def identities(home: Path) -> list[Identity]:
    """Return this machine's identities at all hubs, the newest last."""
    try:
        known = json.loads((home / _FILE).read_text(encoding="utf-8"))
        return [Identity(**fields) for fields in known.values()]
    except (OSError, ValueError, TypeError, AttributeError):
        return []


def save_identity(home: Path, identity: Identity) -> None:
    """Store the identity, readable by the owner only; identities at other hubs stay."""
    try:
        known = json.loads((home / _FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        known = {}
    known[identity.hub] = asdict(identity)
    write_secret(home / _FILE, json.dumps(known, indent=1))


def write_secret(path: Path, text: str) -> None:
    """Replace a file atomically, readable by its owner only.

    Raises:
        StorageFull: the disk has no room.
        ConfigError: the folder cannot be written.
    """
    scratch = path.with_name(f"{path.name}.{os.getpid()}.new")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "w", encoding="utf-8", newline="\n") as file:
            file.write(text)
        scratch.replace(path)
    except OSError as error:
        raise write_failed(path, error) from error


def write_failed(path: Path, error: OSError) -> StorageFull | ConfigError:
    """Return the error for a file that could not be written."""
    if error.errno == 28:  # ENOSPC
        return StorageFull(
            "no room left on the disk",
            given=str(path),
            remedy="free some space, or choose another folder (ATOLL_HOME)",
        )
    return ConfigError(
        "a file cannot be written",
        given=f"{path} ({error.strerror or error})",
        remedy="choose a folder that you may write to (ATOLL_HOME)",
    )
