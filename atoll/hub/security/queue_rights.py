"""Which queues an identity may use."""

from __future__ import annotations

from collections.abc import Iterable

from atoll.hub.security.auth import Identity


def may_use_queue(identity: Identity, queue: str, *, shared: Iterable[str] = ()) -> bool:
    """Return whether this identity may put into and claim from a queue.

    A node has `node/ITS-ID`. A job has the queues that start with `ITS-ID/`, those in `shared`
    (`[job] queues` of its spec), and those below one of these (`a/b` of `a`).
    """
    if identity.role == "operator":
        return True
    if identity.role == "node":
        return queue == f"node/{identity.name}"
    if identity.role == "viewer" or queue.startswith("node/"):
        return False
    return queue in shared or queue.startswith((f"{identity.name}/", *(f"{s}/" for s in shared)))
