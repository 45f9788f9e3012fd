from __future__ import annotations

import asyncio
import contextlib
import http.server
import socket
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator

import pytest
from websockets.asyncio.server import ServerConnection, serve

from atoll.errors import ConfigError, HubUnreachable
from atoll.net.endpoint import HubEndpoint
from atoll.net.handshake import make_hello
from atoll.net.link import Link
from atoll.net.proxies import unreachable
from atoll.net.transport import ConnectionLost, Transport
from atoll.net.websocket import dial
from atoll.wire.frames import decode, encode_relay
from atoll.wire.limits import MAX_FRAME_BYTES
from atoll.wire.messages import Done, Welcome, pack, unpack
from tests.net.scripted import WAIT_S, run


@contextlib.asynccontextmanager
async def server(handler: Callable[[ServerConnection], Awaitable[None]]) -> AsyncIterator[str]:
    async with serve(handler, "127.0.0.1", 0, max_size=None, max_queue=1, close_timeout=1) as open_:
        yield f"http://127.0.0.1:{open_.sockets[0].getsockname()[1]}"


@contextlib.contextmanager
def free_port() -> Iterator[int]:
    """Yield a port that is in use, but that no process listens on."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield bound.getsockname()[1]


@contextlib.contextmanager
def web_server() -> Iterator[int]:
    """Yield the port of an HTTP server that knows no WebSockets."""

    class Quiet(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self.send_error(404)

        def log_message(self, format: str, *args: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Quiet) as httpd:
        thread = threading.Thread(target=httpd.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        yield httpd.server_address[1]
        httpd.shutdown()
        thread.join()


def test_messages_cross_both_ways_whole_and_in_order() -> None:
    async def echo(connection: ServerConnection) -> None:
        async for message in connection:
            await connection.send(message)

    async def scenario() -> None:
        async with server(echo) as url:
            transport = await dial(url)
            for message in (b"", b"a", bytes(300_000), memoryview(b"view")):
                await transport.send(message)
                assert await transport.receive() == bytes(message)
            await transport.close()
            await transport.close()
            with pytest.raises(ConnectionLost):
                await transport.send(b"late")

    run(scenario())


def test_the_path_is_ws_and_nothing_is_compressed() -> None:
    seen: list[tuple[str, str | None]] = []

    async def note(connection: ServerConnection) -> None:
        assert connection.request is not None
        headers = connection.request.headers
        seen.append((connection.request.path, headers.get("Sec-WebSocket-Extensions")))

    async def scenario() -> None:
        async with server(note) as url:
            transport = await dial(url)
            with pytest.raises(ConnectionLost):
                await transport.receive()

    run(scenario())
    assert seen == [("/ws", None)]


def test_the_code_that_the_hub_closed_with_is_known() -> None:
    async def refuse(connection: ServerConnection) -> None:
        await connection.send(b"last words")
        await connection.close(4000, "taken over")

    async def scenario() -> None:
        async with server(refuse) as url:
            transport = await dial(url)
            assert await transport.receive() == b"last words"
            with pytest.raises(ConnectionLost, match="code 4000 taken over") as caught:
                await transport.receive()
            assert caught.value.code == 4000

    run(scenario())


def test_a_connection_that_breaks_has_the_code_of_no_farewell() -> None:
    async def drop(connection: ServerConnection) -> None:
        connection.transport.abort()

    async def scenario() -> None:
        async with server(drop) as url:
            transport = await dial(url)
            with pytest.raises(ConnectionLost, match="broke") as caught:
                await transport.receive()
            assert caught.value.code == 1006

    run(scenario())


def test_a_message_over_the_limit_ends_the_connection() -> None:
    async def shout(connection: ServerConnection) -> None:
        await connection.send(bytes(MAX_FRAME_BYTES + 1))
        await connection.wait_closed()

    async def scenario() -> None:
        async with server(shout) as url:
            transport = await dial(url)
            with pytest.raises(ConnectionLost):
                await transport.receive()

    run(scenario())


def test_send_waits_for_a_peer_that_does_not_read() -> None:
    async def scenario() -> None:
        let_go = asyncio.Event()

        async def deaf(connection: ServerConnection) -> None:
            connection.transport.pause_reading()
            await let_go.wait()
            connection.transport.abort()

        async with server(deaf) as url:
            transport = await dial(url)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(0.5):
                    for _ in range(64):
                        await transport.send(bytes(2**20))
                    pytest.fail("64 MiB went to a peer that reads nothing")
            let_go.set()
            with pytest.raises(ConnectionLost):
                await transport.receive()

    run(scenario())


def test_a_refused_connection_names_host_port_and_what_to_do() -> None:
    with free_port() as port, pytest.raises(HubUnreachable) as caught:
        run(dial(f"http://127.0.0.1:{port}"))
    message = str(caught.value)
    assert f"no hub answers at 127.0.0.1:{port}" in message
    assert "connection refused" in message
    assert f"atoll hub --port {port}" in message


def test_silent_host_times_out() -> None:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        port = listening.getsockname()[1]
        with pytest.raises(HubUnreachable, match=rf"127.0.0.1:{port}.*timed out.*firewall"):
            run(dial(f"http://127.0.0.1:{port}", timeout_s=0.1))


def test_a_web_server_that_is_no_hub_is_called_that() -> None:
    with web_server() as port, pytest.raises(HubUnreachable) as caught:
        run(dial(f"http://127.0.0.1:{port}"))
    assert f"what answers at 127.0.0.1:{port} is not a hub" in str(caught.value)
    assert "404" in str(caught.value)


def test_a_server_of_another_protocol_is_not_a_hub_either() -> None:
    def greet(listening: socket.socket) -> None:
        connection, _ = listening.accept()
        with connection:
            connection.sendall(b"SSH-2.0-OpenSSH_9.6\r\n" * 2000)
            connection.recv(10_000)

    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        thread = threading.Thread(target=greet, args=(listening,))
        thread.start()
        with pytest.raises(HubUnreachable, match="is not a hub"):
            run(dial(f"http://127.0.0.1:{listening.getsockname()[1]}"))
        thread.join()


def test_a_name_that_nobody_knows_is_named() -> None:
    error = unreachable("http://nowhere.invalid:8000", socket.gaierror(-2, "unknown"))
    assert "nowhere.invalid:8000" in str(error)
    assert "cannot be resolved" in str(error)


@pytest.mark.parametrize("url", ["", "hub:8000", "ftp://hub:1", "http://", "http://hub:99999"])
def test_a_url_that_is_none_is_refused_with_the_right_form(url: str) -> None:
    with pytest.raises(ConfigError, match="http://HOST:PORT"):
        run(dial(url))


SLOW = HubEndpoint(download_bps=1e6)


def test_a_cancelled_receive_under_a_limit_loses_nothing() -> None:
    sent = [encode_relay("job/w0", "job/r", bytes([number]) * 20_000) for number in range(3)]

    async def tensors(connection: ServerConnection) -> None:
        for message in sent:
            await connection.send(message)

    async def scenario() -> None:
        received: list[bytes] = []
        async with server(tensors) as url:
            transport = await dial(url, endpoint=SLOW)
            while len(received) < len(sent):
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(0.02):
                        received.append(await transport.receive())
            await transport.close()
        assert received == sent

    run(scenario())


def test_a_wait_for_the_limit_is_no_silence_of_the_hub() -> None:
    tensor = encode_relay("job/w0", "job/r", bytes(60_000))  # 0.4 s at this limit
    dials = 0

    async def hub(connection: ServerConnection) -> None:
        envelope = unpack(decode(await connection.recv(decode=False)))
        await connection.send(pack(Welcome("v", 1000, 0.02, False), id=envelope.id, reply=True))
        for _ in range(2):
            await connection.send(tensor)
        async for message in connection:
            beat = unpack(decode(bytes(message)))  # type: ignore[arg-type]
            await connection.send(pack(Done(), id=beat.id, reply=True))

    async def scenario() -> None:
        nonlocal dials
        received: asyncio.Queue[int] = asyncio.Queue()
        async with server(hub) as url:

            async def connect() -> Transport:
                nonlocal dials
                dials += 1
                if dials > 1:
                    received.put_nowait(0)
                return await dial(url, endpoint=SLOW)

            link = Link(connect, make_hello("job/w0", "secret"), dead_after_s=0.2)
            link.on_relay(lambda _, payload: received.put_nowait(len(payload)))
            await link.start(timeout_s=WAIT_S)
            assert [await received.get() for _ in range(2)] == [60_000] * 2
            await link.close()

    run(scenario())
