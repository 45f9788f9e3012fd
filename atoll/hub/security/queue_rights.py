"""Which queues an identity may use."""

from __future__ import annotations

from collections.abc import Iterable

from atoll.hub.security.auth import Identity
from atoll.hub.security.scopes import is_below


def may_use_queue(identity: Identity, queue: str, *, shared: Iterable[str] = ()) -> bool:
    """Return whether this identity may put into and claim from a queue.

    A node has `node/ITS-ID`. A job has the queues that start with `ITS-ID/`, those in `shared`
    (`[job] queues` of its spec), and those below one of these (`a/b` of `a`). A program has all
    that are shared, or those below the names of its ticket; the caller refuses queues of a job.
    """
    if identity.role == "operator":
        return True
    if identity.role == "node":
        return queue == f"node/{identity.name}"
    if identity.role == "program":
        shared_name = "/" in queue and not queue.startswith(("node/", "/"))
        return shared_name and (not identity.queues or is_below(queue, identity.queues))
    if identity.role == "viewer" or queue.startswith("node/"):
        return False
    return queue.startswith(f"{identity.name}/") or is_below(queue, tuple(shared))
