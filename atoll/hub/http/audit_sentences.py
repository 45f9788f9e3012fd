"""Rows of the audit log as sentences: who did what to what."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_VERBS = {
    "submit": ("started", "start"),
    "stop": ("stopped", "stop"),
    "resume": ("resumed", "resume"),
    "scale": ("changed the number of nodes of", "change the number of nodes of"),
    "delete job": ("deleted", "delete"),
    "drain": ("drained", "drain"),
    "undrain": ("let work again", "let work again"),
    "revoke node": ("evicted", "evict"),
    "join": ("joined the cluster", "join the cluster"),
    "renew": ("renewed its certificate", "renew its certificate"),
    "log in": ("logged in", "log in"),
    "login": ("logged in at the page", "log in at the page"),
    "page": ("opened the page", "open the page"),
    "logout": ("logged out", "log out"),
    "log out": ("logged out", "log out"),
    "make ticket": ("made a ticket", "make a ticket"),
    "revoke ticket": ("revoked a ticket", "revoke a ticket"),
    "silence": ("silenced alarm", "silence alarm"),
    "requeue": ("put an item back into its queue", "put an item back into its queue"),
    "discard": ("discarded an item of a queue", "discard an item of a queue"),
    "rotate": ("renewed the keys of the hub", "renew the keys of the hub"),
    "store": ("stored the secret", "store the secret"),
    "remove": ("deleted the secret", "delete the secret"),
    "start": ("asked to pair a machine", "pair a machine"),
    "finish": ("paired a machine", "pair a machine"),
    "session": ("connected", "connect as"),
    "refused": ("made a request", "make a request"),
}
_NAMED = ("jobs", "nodes", "alarms", "secrets")
"""Collections in an address that are followed by the name of the changed object."""


def audit_sentence(row: Mapping[str, Any]) -> str:
    """Return a row of the audit log as a sentence, e.g. `operator started gpt-1`."""
    role, name = str(row["role"]), str(row["name"])
    who = name if role in ("", name) else f"{role} {name}"
    who = who or f"someone at {row['address']}"
    done, to_do = _VERBS.get(str(row["action"]), (f"did: {row['action']}", str(row["action"])))
    outcome = str(row["outcome"])
    what = _object(str(row["target"])) or ("a job" if row["action"] == "submit" else "")
    if outcome.isdigit() and int(outcome) < 400:
        return " ".join(filter(None, [who, done, what]))
    why = _OUTCOMES.get(outcome, outcome)
    return f"{' '.join(filter(None, [who, 'tried to', to_do, what]))}: {why}"


_OUTCOMES = {
    "400": "refused, the request was wrong", "401": "refused, not logged in",
    "403": "refused, not allowed", "404": "there is no such thing", "409": "refused for now",
    "429": "refused, too many tries", "500": "the hub failed", "503": "refused for now",
}  # fmt: skip


def _object(target: str) -> str:
    """Return the name in an address; a target that is no address, e.g. a session, unchanged."""
    _method, space, path = target.partition(" ")
    if not space or not path.startswith("/"):
        return target
    parts = path.strip("/").split("/")
    for place, part in enumerate(parts[:-1]):
        if part in _NAMED:
            return parts[place + 1]
    return ""
