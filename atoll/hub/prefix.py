"""A hub below a path prefix, e.g. `https://HOST/atoll`, whether or not the proxy takes it off."""

from __future__ import annotations

import re
from collections.abc import MutableMapping
from typing import Any
from urllib.parse import urlsplit

from atoll.errors import ConfigError

_PREFIX = re.compile(r"(?:/[A-Za-z0-9_.-]+)*")


def check_prefix(text: str) -> str:
    """Return a prefix with a slash at its start and none at its end; empty: none.

    Raises:
        ConfigError: it has other characters than addresses of hubs may have.
    """
    prefix = text.strip().strip("/")
    prefix = f"/{prefix}" if prefix else ""
    if not _PREFIX.fullmatch(prefix):
        raise ConfigError(
            "this cannot be the path of a hub",
            given=text,
            expected="letters, digits, dots and dashes between slashes, e.g. /atoll",
        )
    return prefix


def told_address(advertise: str, prefix: str) -> tuple[str, str]:
    """Return what tickets say of a hub's address, and the prefix that its requests may have.

    Args:
        advertise: What a person wants to be told: nothing, HOST, HOST:PORT or a whole URL.
        prefix: The prefix; empty: the path of that URL.

    Raises:
        ConfigError: the prefix, or the path of the URL, is none that a hub may have.
    """
    prefix = check_prefix(prefix)
    if "://" not in advertise:
        return advertise, prefix
    path = check_prefix(urlsplit(advertise).path)
    if path:
        return advertise, prefix or path
    return advertise.rstrip("/") + prefix, prefix


def without_prefix(scope: MutableMapping[str, Any], prefix: str) -> MutableMapping[str, Any]:
    """Return the scope of a request as it would be without a prefix; others as they are."""
    path = str(scope.get("path", ""))
    if not prefix or not (path == prefix or path.startswith(f"{prefix}/")):
        return scope
    changed = dict(scope)
    changed["path"] = path[len(prefix) :] or "/"
    raw = scope.get("raw_path")
    if isinstance(raw, bytes) and raw.startswith(prefix.encode()):
        changed["raw_path"] = raw[len(prefix) :] or b"/"
    return changed
