"""How a machine becomes a node: it exchanges a ticket for an identity."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

from atoll.errors import AtollError
from atoll.ids import safe_name
from atoll.net import pinned
from atoll.net.endpoint import HubEndpoint, Ticket
from atoll.net.http.client import HubClient
from atoll.node.identity import identity, tls_identity
from atoll.node.identity.identity import Identity
from atoll.wire.messages import NodeInfo

log = logging.getLogger(__name__)

CERTIFICATE_CHECK_S = 600.0
"""Interval of checks whether the certificate has to be renewed."""


def enter_cluster(
    ticket: Ticket, *, home: Path, name: str, info: NodeInfo, proxy: str = ""
) -> Identity:
    """Exchange a ticket for a node id, its token and its certificate, and store them in `home`.

    The id starts with `name`, by default the host name.

    Raises:
        HubUnreachable: no hub answers.
        AuthError: the ticket is unknown or used up, or another hub answers.
    """
    ca = tls_identity.pin(ticket, home=home, proxy=proxy)
    folder = tls_identity.folder_of(ticket.url, home=home)
    key, certificate, request = folder / "node.key", folder / "node.pem", ""
    if ticket.secure:
        tls_identity.make_key(key)
        request = tls_identity.signing_request(key)
    with HubClient(ticket.url, endpoint=HubEndpoint(ca=ca, proxy=proxy)) as client:
        wished = safe_name(name or info.hostname)
        joined = client.join(ticket.secret, name=wished, info=info, request=request)
    if joined.certificate:
        identity.write_secret(certificate, joined.certificate)
    me = Identity(
        hub=ticket.url,
        node=joined.node,
        token=joined.token,
        ca=ca,
        certificate=str(certificate) if joined.certificate else "",
        key=str(key) if joined.certificate else "",
        proxy=proxy,
    )
    identity.save_identity(home, me)
    return me


def known_hub(ticket: Ticket, *, home: Path) -> Identity | None:
    """Return this machine's identity at a ticket's hub, or None if it has to join.

    An identity is invalid if the ticket names another authority than the pinned one, or if its
    certificate has expired.
    """
    me = identity.load_identity(home, hub=ticket.url)
    if me is None:
        return None
    if ticket.fingerprint and ticket.fingerprint not in pinned.fingerprints(Path(me.ca)):
        return None
    if me.certificate and tls_identity.life_left(me.certificate)[0] <= 0:
        return None
    return me


def renew_if_due(me: Identity) -> bool:
    """Renew the certificate if little of its life is left; return whether it was renewed.

    It is also renewed if the hub has changed its authority. The key stays the same; the next
    connection uses the new file. Raises AtollError if the hub issues no certificate.
    """
    if not me.certificate:
        return False
    with HubClient(me.hub, me.token, endpoint=me.endpoint) as client:
        client.health()  # pins the authorities that the hub names
        left = tls_identity.life_left(me.certificate)[1]
        if left > tls_identity.RENEW_AT and tls_identity.is_of(me.certificate, ca=me.ca):
            return False
        certificate = client.renew(tls_identity.signing_request(Path(me.key)))
    identity.write_secret(Path(me.certificate), certificate)
    return True


async def keep_certificate(me: Identity, *, every_s: float = CERTIFICATE_CHECK_S) -> None:
    """Renew the certificate when it is due, until cancelled."""
    while True:
        try:
            if await asyncio.to_thread(renew_if_due, me):
                log.info("the certificate of this machine was renewed")
        except AtollError as error:
            log.warning("the certificate of this machine was not renewed: %s", error)
        await asyncio.sleep(every_s)
