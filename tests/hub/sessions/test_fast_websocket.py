"""The short way of frames does what the ordinary one does, however bytes are cut."""

from __future__ import annotations

import asyncio
import inspect
import os
import struct
from typing import Any

from hypothesis import example, given, settings
from hypothesis import strategies as st
from uvicorn.config import Config
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from uvicorn.server import ServerState
from websockets import frames

from atoll.hub.sessions.fast_websocket import FastWebSocketProtocol
from tests.tiers import examples

LIMIT = 70_000
REQUEST = (
    b"GET /ws HTTP/1.1\r\nHost: h\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    b"Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\nSec-WebSocket-Version: 13\r\n\r\n"
)


class Wire(asyncio.Transport):
    """Keeps what is written."""

    def __init__(self) -> None:
        super().__init__()
        self.written = bytearray()
        self.closed = False

    def write(self, data: Any) -> None:
        self.written += data

    def writelines(self, pieces: Any) -> None:
        self.written += b"".join(pieces)

    def close(self) -> None:
        self.closed = True

    def is_closing(self) -> bool:
        return self.closed

    def pause_reading(self) -> None:
        pass

    def resume_reading(self) -> None:
        pass


def frame(first: int, payload: bytes, *, masked: bool = True) -> bytes:
    length, bit = len(payload), 0x80 if masked else 0
    if length < 126:
        head = bytes((first, bit | length))
    elif length < 65_536:
        head = struct.pack("!BBH", first, bit | 126, length)
    else:
        head = struct.pack("!BBQ", first, bit | 127, length)
    if not masked:
        return head + payload
    key = os.urandom(4)
    return head + key + bytes(byte ^ key[i % 4] for i, byte in enumerate(payload))


FRAMES = st.one_of(
    st.binary(max_size=200).map(lambda b: frame(0x82, b)),
    st.binary(max_size=100).map(lambda b: frame(0x89, b)),
    st.binary(max_size=100).map(lambda b: frame(0x8A, b)),
    st.sampled_from([126, 65_535, 65_536, LIMIT, LIMIT + 1]).map(lambda n: frame(0x82, bytes(n))),
    st.text(max_size=9).map(lambda t: frame(0x81, t.encode())),
    st.binary(max_size=9).map(lambda b: frame(0x02, b) + frame(0x80, b)),
    st.binary(max_size=9).map(lambda b: frame(0x82, b, masked=False)),
    st.just(frame(0x88, struct.pack("!H", 1000))),
    st.binary(min_size=1, max_size=30),
)


def exchange(kind: type[WebSocketsSansIOProtocol], pieces: list[bytes]) -> tuple[Any, ...]:
    """Return what the application receives, what the peer receives, and whether it is cut off."""

    async def work() -> tuple[Any, ...]:
        events: list[Any] = []

        async def application(scope: Any, receive: Any, send: Any) -> None:
            await receive()
            await send({"type": "websocket.accept"})
            accepted.set()
            while True:
                event = await receive()
                events.append(event)
                if event["type"] != "websocket.receive":
                    return
                await send({"type": "websocket.send", "bytes": event.get("bytes") or b"-"})

        accepted, wire = asyncio.Event(), Wire()
        config = Config(
            application, ws_max_size=LIMIT, ws_ping_interval=None, lifespan="off", log_config=None,
            ws_per_message_deflate=False, interface="asgi3",
        )  # fmt: skip
        config.load()
        protocol = kind(config, ServerState(), {})
        protocol.connection_made(wire)
        protocol.data_received(REQUEST)
        await accepted.wait()
        wire.written.clear()
        for piece in pieces:
            if not wire.closed:
                protocol.data_received(piece)
            for _ in range(4):
                await asyncio.sleep(0)
        for _ in range(50):
            await asyncio.sleep(0)
        closed = wire.closed
        protocol.connection_lost(None)
        for _ in range(50):
            await asyncio.sleep(0)
        messages = [event for event in events if event["type"] == "websocket.receive"]
        return messages, bytes(wire.written), closed

    return asyncio.run(work())


@settings(max_examples=examples(150), deadline=None, derandomize=True)
@given(st.lists(FRAMES, max_size=6), st.lists(st.integers(1, 300), max_size=12))
@example([b"\x03", b"\x82\x00"], [])  # wrong from its first byte on, and its head is not whole
@example([b"\x82\x7e\x00"], [])  # not masked, and its head is not whole
def test_it_hears_and_answers_what_the_ordinary_way_does(
    frames: list[bytes], cuts: list[int]
) -> None:
    stream, pieces = b"".join(frames), []
    for cut in cuts:
        if stream:
            pieces.append(stream[:cut])
            stream = stream[cut:]
    pieces += [stream] if stream else []
    messages, written, closed = exchange(FastWebSocketProtocol, pieces)
    expected, answered, ended = exchange(WebSocketsSansIOProtocol, pieces)
    assert closed == ended
    if closed:  # what came in one piece with something wrong, and before it, is still received
        assert messages[: len(expected)] == expected
        assert written.endswith(answered[-4:])
    else:
        assert (messages, written) == (expected, answered)


def test_a_large_message_in_many_pieces_comes_whole() -> None:
    payload = os.urandom(LIMIT)
    stream = frame(0x82, payload) + frame(0x82, b"next")
    pieces = [stream[start : start + 1000] for start in range(0, len(stream), 1000)]
    messages, _, closed = exchange(FastWebSocketProtocol, pieces)
    assert [message["bytes"] for message in messages] == [payload, b"next"]
    assert not closed


def test_uvicorn_still_has_what_the_fast_path_uses() -> None:
    source = inspect.getsource(WebSocketsSansIOProtocol)
    used = (
        "queue", "read_paused", "handshake_complete", "close_sent", "initial_response",
        "writable", "disconnected", "transport", "conn",
    )  # fmt: skip
    missing = [name for name in used if f"self.{name}" not in source]
    assert not missing, f"uvicorn has changed: see atoll/hub/sessions/fast_websocket.py: {missing}"
    assert callable(vars(frames).get("apply_mask")), "websockets has no apply_mask any more"
