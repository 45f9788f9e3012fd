"""A TCP proxy whose line can be made long or slow, be cut, or fall silent."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Self

BLOCK_BYTES = 16 * 2**10
"""Read at once; on a slow line a block is what others wait for."""

OPEN_BLOCKS = 64
"""Blocks under way in one direction of one connection; then the sender has to wait."""


class Proxy:
    """Forwards connections to one port of this machine; usable from any thread, in a block."""

    def __init__(self, port: int, *, delay_s: float = 0.0) -> None:
        """Forward to `port`; each byte takes `delay_s` in each direction."""
        self._target = port
        self.delay_s = delay_s
        self.rate_bps = 0.0
        """Bits per second in each direction of each connection; 0: no limit."""
        self.port = 0
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._open = asyncio.Event()
        self._open.set()
        self._server: asyncio.Server | None = None
        self._lines: set[asyncio.Task[None]] = set()

    # ------------------------------------------------------------------------ what can happen

    def cut(self) -> None:
        """Reset every connection; new ones are taken as before."""
        self._call(self._reset)

    def silence(self) -> None:
        """Let nothing through any more; connections stay open without notice."""
        self._call(self._open.clear)

    def speak(self) -> None:
        """End the silence; what was under way arrives now."""
        self._call(self._open.set)

    # ------------------------------------------------------------------------- life and death

    def __enter__(self) -> Self:
        """Listen on a free port."""
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._listen(), self._loop).result(10.0)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        asyncio.run_coroutine_threadsafe(self._close(), self._loop).result(10.0)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10.0)
        self._loop.close()

    async def _listen(self) -> None:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.port = int(self._server.sockets[0].getsockname()[1])

    async def _close(self) -> None:
        if self._server is not None:
            self._server.close()
        self._reset()
        await asyncio.gather(*self._lines, return_exceptions=True)

    def _call(self, action: Callable[[], None]) -> None:
        self._loop.call_soon_threadsafe(action)

    def _reset(self) -> None:
        for line in self._lines:
            line.cancel()

    # ------------------------------------------------------------------------------ forwarding

    async def _accept(self, near: asyncio.StreamReader, back: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        if task is None:
            return
        self._lines.add(task)
        writers = [back]
        try:
            far, onward = await asyncio.open_connection("127.0.0.1", self._target)
            writers.append(onward)
            await asyncio.gather(self._carry(near, onward), self._carry(far, back))
        except (OSError, asyncio.CancelledError):
            pass  # a line that breaks, or is cut, ends for both sides
        finally:
            self._lines.discard(task)
            for writer in writers:
                writer.transport.abort()

    async def _carry(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        """Forward one direction until it ends; then the other side gets a notice."""
        under_way: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(OPEN_BLOCKS)
        reading = asyncio.create_task(self._read(source, under_way))
        try:
            while True:
                due, block = await under_way.get()
                await asyncio.sleep(max(0.0, due - self._loop.time()))
                await self._open.wait()
                if not block:
                    break
                if self.rate_bps:
                    await asyncio.sleep(len(block) * 8 / self.rate_bps)
                sink.write(block)
                await sink.drain()
            with contextlib.suppress(OSError):
                sink.write_eof()
        finally:
            reading.cancel()

    async def _read(
        self, source: asyncio.StreamReader, under_way: asyncio.Queue[tuple[float, bytes]]
    ) -> None:
        """Take blocks as they come; an empty one is the end."""
        block = b"-"
        while block:
            try:
                block = await source.read(BLOCK_BYTES)
            except OSError:
                block = b""
            await under_way.put((self._loop.time() + self.delay_s, block))
