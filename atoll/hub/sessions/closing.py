"""How the hub ends a WebSocket: the codes, and the error that it sends before."""

from __future__ import annotations

import asyncio
import contextlib

from atoll.errors import AtollError, FrameTooLarge, HubError, VersionMismatch
from atoll.hub.sessions.relay import PolicyBroken
from atoll.hub.sessions.send_queue import Send
from atoll.wire.messages import Failure, pack

MALFORMED, TOO_LARGE, POLICY, RESTART, REPLACED, SILENT = 1002, 1009, 1008, 1012, 4000, 4001
"""WebSocket close codes."""


async def refuse(send: Send, id: int, error: AtollError) -> None:
    """Send an error, as the answer to request `id` (0: none), and close with its code."""
    if isinstance(error, FrameTooLarge):
        code = TOO_LARGE
    elif isinstance(error, PolicyBroken | HubError | VersionMismatch):
        code = POLICY
    else:
        code = MALFORMED
    failure = pack(Failure(error.to_dict()), id=id, reply=id > 0)
    with contextlib.suppress(OSError, RuntimeError, TimeoutError):  # it may be closed already
        async with asyncio.timeout(1.0):
            await send({"type": "websocket.send", "bytes": failure})
    await close(send, code, type(error).__name__)


async def close(send: Send, code: int, reason: str) -> None:
    """Close a connection; give up after one second if the peer reads nothing."""
    with contextlib.suppress(OSError, RuntimeError, TimeoutError):
        async with asyncio.timeout(1.0):
            await send({"type": "websocket.close", "code": code, "reason": reason})
