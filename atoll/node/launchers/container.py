"""Programs in containers of Docker or Podman."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import secrets
import threading
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from atoll import system
from atoll.errors import AtollError, JobError, OutOfMemory
from atoll.node.launchers.container_daemon import connect, describe_daemon, find_image
from atoll.node.launchers.container_options import (
    ImageFacts,
    container_options,
    container_user,
    image_facts,
    make_writable,
)
from atoll.node.launchers.launcher import GONE_S, Exit, Order
from atoll.node.launchers.process import explain
from atoll.node.launchers.threads import tell
from atoll.node.processes.output import TAIL_LINES, LineHandler, read_output
from atoll.node.processes.threads import StillWanted, in_thread

if TYPE_CHECKING:
    from docker import DockerClient
    from docker.models.containers import Container
    from docker.types.daemon import CancellableStream

log = logging.getLogger(__name__)

LAST_LINES_S = 5.0
"""How long to wait for the output of an ended container."""

LINUX_KILL = 9

CAUSE_TRIES, CAUSE_S = 5, 0.2
"""How often the daemon is asked why a container was killed, and the pause between."""

SIGNALS_FROM = 128
"""Exit statuses above this stand for signals."""

LAST_SIGNAL = 64  # the highest signal number of Linux
GB = 10**9


@dataclass(frozen=True, slots=True)
class _Started:
    """A running container."""

    client: DockerClient
    container: Container
    stream: CancellableStream
    """Its output; to be closed."""
    image: ImageFacts


class ContainerLauncher:
    """Starts containers, labelled so that the next agent of this home can find orphans."""

    def __init__(self, *, home: Path, node: str) -> None:
        self._home = home_label(home)
        self._node = node
        self._agent = secrets.token_hex(8)
        """Distinguishes containers of this agent from those of earlier ones."""

    async def start(self, order: Order, on_line: LineHandler) -> ContainerProcess:
        """Start a container, after pulling its image if the job asks for that.

        Raises:
            ConfigError: image, program or network cannot work.
            JobError: the daemon does not answer or refuses.
        """
        started: list[_Started] = []
        try:
            await in_thread(lambda wanted: started.append(self._start(order, on_line, wanted)))
        except asyncio.CancelledError:
            for late in started:  # it started just before the cancellation
                _close(late.stream)
                await asyncio.to_thread(_remove, late.client, late.container)
            raise
        return ContainerProcess(order, started[0], on_line)

    def _start(self, order: Order, on_line: LineHandler, wanted: StillWanted) -> _Started:
        client = connect()
        try:
            image = find_image(client, order.spec.launch, on_line=on_line, wanted=wanted)
            facts = image_facts(image.attrs)
            user = container_user(facts, rootless=_is_rootless(client))
            if user or facts.user:
                make_writable(order.directory, user=user or facts.user)
            labels = {
                "atoll.home": self._home,
                "atoll.agent": self._agent,
                "atoll.node": self._node,
                "atoll.job": order.command.job,
                "atoll.member": order.command.member,
                "atoll.attempt": str(order.command.attempt),
            }
            options = container_options(order, facts, user=user, labels=labels)
            with describe_daemon("the container cannot be started", given=order.spec.launch.image):
                container, stream = _run(client, options, wanted)
            return _Started(client, container, stream, facts)
        except BaseException:
            client.close()
            raise

    def remove_orphans(self) -> int:
        """Remove containers left by earlier agents of this home; return their number; blocks.

        Raises:
            AtollError: no daemon answers, or it refuses.
        """
        client = connect()
        try:
            with describe_daemon(
                "containers that were left over cannot be removed", given=self._node
            ):
                mine = {"label": f"atoll.home={self._home}"}
                found = client.containers.list(all=True, filters=mine, ignore_removed=True)
                orphans = [c for c in found if c.labels.get("atoll.agent") != self._agent]
                for container in orphans:
                    log.warning("the container %s was left over: removed", container.name)
                    container.remove(force=True, v=True)
                return len(orphans)
        finally:
            client.close()


class ContainerProcess:
    """A running container, created by :class:`ContainerLauncher` on an event loop."""

    def __init__(self, order: Order, started: _Started, on_line: LineHandler) -> None:
        """Monitor a container that has just started, on two threads."""
        self._order = order
        self._image = started.image
        self._client = started.client
        self._container = container = started.container
        self._failure: AtollError | None = None
        self._tail: deque[str] = deque(maxlen=TAIL_LINES)
        self._pid = _local_pid(container)
        loop = asyncio.get_running_loop()
        self._end: asyncio.Future[int | AtollError] = loop.create_future()
        self._read_all: asyncio.Future[None] = loop.create_future()
        listening = (loop, started.stream, on_line)
        threading.Thread(target=self._listen, args=listening, daemon=True).start()
        threading.Thread(target=self._await_end, args=(loop,), daemon=True).start()

    @property
    def name(self) -> str:
        """Its name on this machine."""
        return f"container {self._container.name}"

    @property
    def pid(self) -> int | None:
        """Id of its first process, if the daemon runs on this system."""
        return self._pid

    @property
    def child(self) -> bool:
        """False: it is a child of the daemon."""
        return False

    async def wait(self) -> Exit:
        """Return its exit after its last line was read; then remove it."""
        end = await asyncio.shield(self._end)
        await asyncio.wait([self._read_all], timeout=LAST_LINES_S)
        try:
            if isinstance(end, AtollError):
                return Exit(1, self._failure or end, list(self._tail))
            return Exit(end, self._failure or await self._explain(end), list(self._tail))
        finally:
            removing = asyncio.to_thread(_remove, self._client, self._container)
            await asyncio.wait([asyncio.ensure_future(removing)], timeout=GONE_S)

    async def stop(self, *, grace_s: float) -> None:
        """Send the image's stop signal; kill it after `grace_s`."""
        if self._end.done():
            return
        if grace_s > 0:
            self._signal(self._image.stop_signal)
            await asyncio.wait([self._end], timeout=grace_s)
        if not self._end.done():
            log.info("%s %s did not end in %.1f s: killed", *self._order.key, grace_s)
            self._signal("SIGKILL")
            await asyncio.wait([self._end], timeout=GONE_S)

    def kill(self) -> None:
        """Kill it, without waiting."""
        if not self._end.done():
            self._signal("SIGKILL")

    def fail(self, error: AtollError) -> None:
        """Kill it because of an error, which `wait` then returns."""
        if not self._end.done():
            self._failure = error
            self.kill()

    def _signal(self, name: str) -> None:
        """Send it a signal, on a thread, because the daemon may be slow."""
        threading.Thread(target=self._send, args=(name,), daemon=True).start()

    def _send(self, name: str) -> None:
        try:
            with describe_daemon("a container cannot be signalled", given=name):
                self._container.kill(signal=name)
        except AtollError as error:  # usually because it has just ended
            log.debug("%s %s: %s", *self._order.key, error)

    def _listen(
        self, loop: asyncio.AbstractEventLoop, stream: CancellableStream, on_line: LineHandler
    ) -> None:
        try:
            with describe_daemon("the output of a container is lost", given=self.name):
                path = self._order.directory / "output.log"
                read_output(_Blocks(stream), path, on_line, self._tail, hide=self._order.hide)
        except AtollError as error:
            log.warning("%s %s: %s", *self._order.key, error)
        finally:
            _close(stream)
            tell(loop, self._read_all, None)

    def _await_end(self, loop: asyncio.AbstractEventLoop) -> None:
        end: int | AtollError
        try:
            with describe_daemon(
                "the container daemon no longer lists a container", given=self.name
            ):
                end = _status(int(self._container.wait()["StatusCode"]))
        except AtollError as error:
            end = JobError(error.what, given=str(error.given), remedy=error.remedy)
        tell(loop, self._end, end)

    async def _explain(self, code: int) -> AtollError | None:
        if code == 0:
            return None
        # The daemon may learn of the exit before its cause.
        pauses = [0.0, *[CAUSE_S] * CAUSE_TRIES] if code == -LINUX_KILL else [0.0]
        for pause_s in pauses:
            await asyncio.sleep(pause_s)
            if await asyncio.to_thread(self._was_out_of_memory):
                return self._out_of_memory()
        return explain(self._order, code, oom_kills=0)

    def _was_out_of_memory(self) -> bool:
        with contextlib.suppress(AtollError), describe_daemon("no state", given=self.name):
            self._container.reload()
            return bool(self._container.attrs["State"].get("OOMKilled"))
        return False

    def _out_of_memory(self) -> OutOfMemory:
        caps = self._order.caps
        limit = f"{caps.memory_bytes / GB:.2f} GB, a limit of {caps.memory_from}"
        return OutOfMemory(
            f"{self._order.command.member} ran out of memory in its container",
            given="the system killed it",
            expected=f"at most {limit}" if caps.memory_bytes else "what this machine has",
            remedy="make batch or the model smaller, or ask for more: memory_gb in [needs]",
        )


class _Blocks:
    """A container's output, with the interface of a pipe."""

    def __init__(self, stream: Iterator[bytes]) -> None:
        self._stream = stream

    def read1(self, size: int = -1, /) -> bytes:
        """Return the next block, of any size; empty at the end."""
        return next((block for block in self._stream if block), b"")


def home_label(home: Path) -> str:
    """Return the label of an agent's home: a hash, because a path may be private."""
    return hashlib.sha256(str(home.resolve()).encode("utf-8")).hexdigest()[:16]


def _run(
    client: DockerClient, options: dict[str, Any], wanted: StillWanted
) -> tuple[Container, CancellableStream]:
    """Create and start a container, with an init process if the daemon has one.

    With an init, signals and orphans behave inside as they do outside.
    """
    import docker.errors

    try:
        return _run_once(client, {**options, "init": True}, wanted)
    except docker.errors.APIError as error:
        text = str(error)
        if not any(word in text for word in ("docker-init", "container-init", "catatonit")):
            raise
        return _run_once(client, options, wanted)


def _run_once(
    client: DockerClient, options: dict[str, Any], wanted: StillWanted
) -> tuple[Container, CancellableStream]:
    container = client.containers.create(**options)
    try:
        # Attach before the start, so that no line is missed.
        stream = container.attach(stdout=True, stderr=True, stream=True, logs=False)
        try:
            container.start()
            container.reload()
            wanted.check()
        except BaseException:
            _close(stream)
            raise
    except BaseException:
        container.remove(force=True, v=True)
        raise
    return container, stream


def _close(stream: CancellableStream) -> None:
    """Close the connection to a container's output.

    The library's own close raises if the daemon has closed it already, and leaks the socket.
    """
    with contextlib.suppress(OSError, AttributeError):
        stream.close()
    stream._response.close()


def _remove(client: DockerClient, container: Container) -> None:
    """Remove a container in any state, and close the client; blocks."""
    try:
        with describe_daemon("a container cannot be removed", given=str(container.name)):
            container.remove(force=True, v=True)
    except AtollError as error:
        log.warning("%s", error)
    finally:
        client.close()


def _is_rootless(client: DockerClient) -> bool:
    with describe_daemon("the container daemon does not report its version", given="docker info"):
        return any("rootless" in option for option in client.info().get("SecurityOptions") or [])


def _local_pid(container: Container) -> int | None:
    """Return the process id if it denotes that container on this system."""
    pid = int(container.attrs.get("State", {}).get("Pid") or 0)
    return pid if pid and str(container.id)[:12] in system.control_group(pid) else None


def _status(code: int) -> int:
    """Return an exit status as in `subprocess`: negative for a signal."""
    if SIGNALS_FROM < code <= SIGNALS_FROM + LAST_SIGNAL:
        return SIGNALS_FROM - code
    return code
