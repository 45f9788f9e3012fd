"""Get a ticket from a hub by the short code that it shows to its owner."""

from __future__ import annotations

import dataclasses
import hmac
from pathlib import Path

from atoll.errors import AuthError
from atoll.net import pinned
from atoll.net.endpoint import HubEndpoint, Ticket, parse_ticket
from atoll.net.http.client import HubClient
from atoll.net.proxies import proxy_of
from atoll.node.identity import identity
from atoll.node.identity.discovery import FoundHub
from atoll.node.identity.join import known_hub
from atoll.wire.pairing import read_code, side, unseal
from atoll.wire.spake2 import Password


def pair(found: FoundHub, code: str, *, proxy: str = "") -> Ticket:
    """Return a ticket of the hub that shows this code, at the address where it was found.

    The connection itself is not authenticated: the code authenticates both sides, and the ticket
    brings the fingerprint that every later connection is checked against.

    Raises:
        WrongCode: the hub has another code; `given` says how many tries are left.
        AuthError: the hub has no open code, or the server there does not know the code.
        ConfigError: this is not a code, or the hub does not pair.
        HubUnreachable: no hub answers.
    """
    own = side(Password.of_code(read_code(code)), is_joiner=True)
    endpoint = HubEndpoint(proxy=proxy_of(proxy, hub=found.url), verified=False)
    with HubClient(found.url, endpoint=endpoint) as client:
        sent = own.share()
        answer = client.start_pairing(sent)
        keys = own.keys(sent, answer.share)
        done = client.finish_pairing(answer.exchange, keys.mac_a)
    if not hmac.compare_digest(done.proof, keys.mac_b):
        raise AuthError(
            "the server at this address does not know the pairing code",
            given=found.url,
            remedy="if this repeats, the connection may be intercepted: use a ticket",
        )
    ticket = parse_ticket(unseal(done.sealed, keys))
    if not ticket.fingerprint:  # a public authority signs host names, not this address
        return ticket
    return found.ticket(ticket.secret, mark=ticket.mark)


def already_joined(found: FoundHub, *, home: Path) -> Ticket | None:
    """Return a ticket without a secret if this machine has an identity at the found hub.

    The announced fingerprint selects the identity and proves nothing: the connection is checked
    against the pinned authority, before the token is sent. A hub whose address has changed keeps
    its fingerprint; the identity is then stored for the new address, too.
    """
    if not found.fingerprint:
        return None
    for me in identity.identities(home):
        if me.ca and found.fingerprint in pinned.fingerprints(Path(me.ca)):
            if me.hub != found.url:
                identity.save_identity(home, dataclasses.replace(me, hub=found.url))
            ticket = found.ticket("joined-before", mark=found.fingerprint)
            return ticket if known_hub(ticket, home=home) else None
    return None
