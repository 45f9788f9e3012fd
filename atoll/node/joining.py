"""How a machine becomes a node: a ticket is exchanged for an identity, which is kept."""

from __future__ import annotations

from pathlib import Path

from atoll.ids import safe_name
from atoll.net.api import HubClient
from atoll.net.ticket import Ticket
from atoll.node import identity
from atoll.node.identity import Identity
from atoll.wire.messages import NodeInfo


def enter(ticket: Ticket, *, home: Path, name: str, info: NodeInfo) -> Identity:
    """Exchange a ticket for a node id and its token, and keep them.

    Args:
        ticket: What the hub printed.
        home: Folder of this agent.
        name: Wished start of the id; empty: the machine's host name.
        info: What this machine is.

    Raises:
        HubUnreachable: no hub answers.
        AuthError: the ticket is unknown or used up.
    """
    with HubClient(ticket.url) as client:
        node, token = client.join(ticket.secret, name=safe_name(name or info.hostname), info=info)
    me = Identity(hub=ticket.url, node=node, token=token)
    identity.save_identity(home, me)
    return me
