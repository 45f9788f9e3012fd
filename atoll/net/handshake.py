"""The client's side of the handshake: Hello and Welcome."""

from __future__ import annotations

import asyncio
import secrets

from atoll import __version__
from atoll.errors import (
    AtollError,
    AuthError,
    HubError,
    HubUnreachable,
    VersionMismatch,
    WireError,
    from_dict,
)
from atoll.net.transport import ConnectionLost, Transport
from atoll.wire.frames import Kind, decode
from atoll.wire.limits import PROTOCOL
from atoll.wire.messages import Failure, Hello, NodeInfo, Welcome, pack, unpack

HELLO_TIMEOUT_S = 10.0

REPLACED = 4000
"""Close code: another process took over the session."""


class Replaced(HubError):
    """Another process took over the session; this one must not reconnect."""


FINAL = (AuthError, VersionMismatch, Replaced)
"""Errors after which the link does not reconnect."""


def make_hello(
    session: str, token: str, *, incarnation: str | None = None, info: NodeInfo | None = None
) -> Hello:
    """Return the Hello of this process.

    Args:
        session: The session's address, e.g. ``"job/w0"``.
        token: Authenticates this process for the session.
        incarnation: Id of this process among those of one address; random unless given.
        info: Description of the machine (of a node).
    """
    return Hello(
        protocol=PROTOCOL,
        version=__version__,
        session=session,
        token=token,
        incarnation=incarnation or secrets.token_hex(8),
        info=info,
    )


async def greet(transport: Transport, hello: Hello, *, id: int) -> tuple[Welcome, int, int]:
    """Send Hello and return the Welcome, and the bytes sent and received.

    Raises:
        AuthError: the hub rejects the token or the address.
        VersionMismatch: the hub speaks another version of the protocol.
        HubUnreachable: no answer arrived in time, or the connection ended first.
    """
    frame = pack(hello, id=id)
    try:
        async with asyncio.timeout(HELLO_TIMEOUT_S):
            await transport.send(frame)
            message = await transport.receive()
    except TimeoutError:
        raise HubUnreachable(
            "the hub accepted the connection but did not answer",
            given=f"silence for {HELLO_TIMEOUT_S:g} s after Hello",
            remedy="look at the hub's log; it may be stopped or overloaded",
        ) from None
    except ConnectionLost as error:
        raise HubUnreachable(
            "the connection ended before the hub had answered",
            given=error.given,
            remedy="look at the hub's log",
        ) from error
    return _read_welcome(message, id=id), len(frame), len(message)


def _read_welcome(message: bytes, *, id: int) -> Welcome:
    """Return the Welcome in the hub's first message; raise the error in a Failure."""
    frame = decode(message)
    if frame.kind is not Kind.CONTROL:
        raise WireError("the hub's first message is not an answer", given=frame.kind.name)
    envelope = unpack(frame)
    body = envelope.body
    if isinstance(body, Failure):
        raise from_dict(body.error)
    if not isinstance(body, Welcome) or envelope.id not in (0, id):
        raise WireError("the hub's first message is not Welcome", given=type(body).__name__)
    return body


def is_final(error: AtollError) -> bool:
    """Return whether reconnecting cannot help."""
    return isinstance(error, FINAL) or (
        isinstance(error, ConnectionLost) and error.code == REPLACED
    )


def refusal(error: AtollError, *, session: str) -> AtollError:
    """Return a final error with the message shown to users."""
    if isinstance(error, ConnectionLost):
        return Replaced(
            "another process took this session over",
            given=session,
            expected="one process per session",
            remedy="stop this process; the newer one continues",
        )
    return error
