"""How a link to a hub is opened: dialled over a WebSocket, greeted, and started."""

from __future__ import annotations

from collections.abc import Callable

from atoll.net.greeting import make_hello
from atoll.net.link import Link
from atoll.net.way import PLAIN, Way
from atoll.net.websocket import dial
from atoll.wire.messages import NodeInfo


async def open_link(
    url: str,
    *,
    session: str,
    token: str,
    way: Way = PLAIN,
    info: NodeInfo | None = None,
    incarnation: str | None = None,
    stats: Callable[[], dict[str, float]] | None = None,
    timeout_s: float = 20.0,
    patient: bool = False,
) -> Link:
    """Return a started link to the hub at `url`; see `Link.start` for what it raises."""
    hello = make_hello(session=session, token=token, incarnation=incarnation, info=info)
    dial_s = min(timeout_s, 10.0)
    link = Link(lambda: dial(url, way=way, timeout_s=dial_s), hello, stats=stats)
    await link.start(timeout_s=timeout_s, patient=patient)
    return link
