"""A small proxy in a process of its own: HTTP CONNECT with basic authentication, or SOCKS5.

`python proxy_server.py http|socks5 [USER:PASSWORD]` prints its port, then a line for each tunnel.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import ipaddress
import struct
import sys

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


def say(line: str) -> None:
    """Print a line at once."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Copy until the end."""
    with contextlib.suppress(OSError):
        while block := await reader.read(65536):
            writer.write(block)
            await writer.drain()
    writer.close()


async def tunnel(client: Streams, server: Streams) -> None:
    """Copy both ways."""
    await asyncio.gather(pump(client[0], server[1]), pump(server[0], client[1]))


class Proxy:
    """Serves one protocol. A plain HTTP request ties its connection to one server."""

    def __init__(self, kind: str, login: str) -> None:
        self.kind, self.login = kind, login

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one connection."""
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            if self.kind == "http":
                await self.http(reader, writer)
            else:
                await self.socks(reader, writer)
        writer.close()

    async def http(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve CONNECT."""
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        method, target, *_ = head.split()
        wanted = "basic " + base64.b64encode(self.login.encode()).decode()
        given = [
            line.partition(":")[2].strip()
            for line in head.splitlines()
            if line.lower().startswith("proxy-authorization:")
        ]
        if self.login and wanted.lower() not in [text.lower() for text in given]:
            say(f"refused {target}")
            writer.write(b"HTTP/1.1 407 Proxy Authentication Required\r\nContent-Length: 0\r\n\r\n")
            return
        first = b""
        if method != "CONNECT":  # a plain request, to be passed on
            _, _, rest = target.partition("://")
            target, _, path = rest.partition("/")
            fields = [line for line in head.split("\r\n")[1:] if "onnection:" not in line]
            lines = [f"{method} /{path} HTTP/1.1", "Connection: close", *fields]
            first = "\r\n".join(lines).encode("latin-1")
        host, _, port = target.rpartition(":")
        try:
            server = await asyncio.open_connection(host.strip("[]"), int(port))
        except OSError:
            say(f"unreachable {target}")
            writer.write(b"HTTP/1.1 502 Bad Gateway\r\nContent-Length: 0\r\n\r\n")
            return
        say(f"tunnel {target}")
        if first:
            server[1].write(first)
        else:
            writer.write(b"HTTP/1.1 200 Connection established\r\n\r\n")
        await tunnel((reader, writer), server)

    async def socks(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve SOCKS5 (RFC 1928) with user and password (RFC 1929)."""
        _, count = await reader.readexactly(2)
        methods = await reader.readexactly(count)
        method = 2 if self.login else 0
        if method not in methods:
            say("refused")
            writer.write(b"\x05\xff")
            return
        writer.write(bytes((5, method)))
        if method == 2 and not await self.logged_in(reader, writer):
            return
        _, _, _, kind = await reader.readexactly(4)
        if kind == 3:
            (length,) = await reader.readexactly(1)
            host = (await reader.readexactly(length)).decode()
        else:
            host = str(ipaddress.ip_address(await reader.readexactly(4 if kind == 1 else 16)))
        (port,) = struct.unpack("!H", await reader.readexactly(2))
        try:
            server = await asyncio.open_connection(host, port)
        except OSError:
            say(f"unreachable {host}:{port}")
            writer.write(b"\x05\x05\x00\x01" + bytes(6))
            return
        say(f"tunnel {host}:{port}")
        writer.write(b"\x05\x00\x00\x01" + bytes(6))
        await tunnel((reader, writer), server)

    async def logged_in(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Return whether user and password are right."""
        _, length = await reader.readexactly(2)
        user = await reader.readexactly(length)
        (length,) = await reader.readexactly(1)
        password = await reader.readexactly(length)
        right = (user + b":" + password).decode() == self.login
        writer.write(b"\x01\x00" if right else b"\x01\x01")
        if not right:
            say("refused")
        return right


async def main(kind: str, login: str) -> None:
    """Serve until killed."""
    server = await asyncio.start_server(Proxy(kind, login).serve, "127.0.0.1", 0)
    say(str(server.sockets[0].getsockname()[1]))
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else ""))
