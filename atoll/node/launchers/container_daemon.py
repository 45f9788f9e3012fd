"""The container daemon: connecting, pulling images, and its errors.

Docker and Podman have the same API. Its client library is the extra `docker`, imported only when a
container is needed.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Generator, Iterator
from typing import TYPE_CHECKING, Any

from atoll import config, system
from atoll.config import LaunchTable
from atoll.errors import AtollError, ConfigError, JobError
from atoll.node.processes.threads import StillWanted

if TYPE_CHECKING:
    import requests
    from docker import DockerClient
    from docker.models.images import Image


log = logging.getLogger(__name__)

ANSWER_TIMEOUT_S = 60.0
"""Time limit for one answer of the daemon."""

LOOK_TIMEOUT_S = 20.0
"""The same for a check whether it runs. An agent takes no containers if its first one fails, and a
daemon that the system starts on demand needs seconds."""

_OWN_FAULT = (400, 404)
"""Statuses for faults of the job: no such image, program or folder."""


def connect(*, timeout_s: float = ANSWER_TIMEOUT_S) -> DockerClient:
    """Return a client of the first daemon that answers; the caller closes it.

    Raises:
        JobError: the client library is not installed, or no daemon answers.
    """
    try:
        import docker
    except ImportError as error:
        raise JobError(
            "jobs in containers need the Docker client library on this machine",
            remedy="pip install 'atoll[docker]'",
        ) from error
    hosts, reasons = config.container_hosts(), []
    for host in hosts:
        try:
            _knock(host)
            return docker.DockerClient(base_url=host, timeout=timeout_s)  # asks for the version
        except _failures() as error:
            reasons.append(f"{host}: {error}")
    raise JobError(
        "no daemon for containers answers on this machine",
        given="; ".join(reasons) or "no socket of Docker or Podman is there",
        remedy="start Docker or `podman system service`, or give its address in DOCKER_HOST",
    )


def daemon_available() -> bool:
    """Return whether a container daemon answers."""
    if not config.container_hosts():
        return False
    try:
        connect(timeout_s=LOOK_TIMEOUT_S).close()
    except AtollError as error:
        log.info("no containers: %s", error)
        return False
    return True


def _knock(host: str) -> None:
    """Raise OSError if a local socket has no listener, faster than the library."""
    if host.startswith("unix://"):
        system.try_local_socket(host.removeprefix("unix://"))


@contextlib.contextmanager
def describe_daemon(what: str, *, given: str) -> Iterator[None]:
    """Convert errors of the daemon, or of the connection to it.

    Raises:
        ConfigError: the job's fault.
        JobError: the daemon's fault.
    """
    try:
        yield
    except _failures() as error:
        response = getattr(error, "response", None)
        if response is not None:
            response.close()  # its stream will not be read
        code = getattr(error, "status_code", None)
        kind = ConfigError if code in _OWN_FAULT else JobError
        text = getattr(error, "explanation", None) or str(error)
        raise kind(what, given=f"{given}: {text}", remedy=_remedy(str(text), code)) from error


def _failures() -> tuple[type[Exception], ...]:
    import docker.errors
    import requests

    return docker.errors.DockerException, requests.exceptions.RequestException, OSError


def _remedy(text: str, code: int | None) -> str:
    if code == 404 and "executable" not in text:
        return "look at image in [launch]; private images must be pulled by the node's owner"
    if code in _OWN_FAULT:
        return "look at [launch] and at [job] command: is that program in the image?"
    return "look at the daemon on the node: docker info"


TELL_EVERY_S = 5.0
"""Interval of messages about one pull."""

MB = 10**6


def find_image(
    client: DockerClient,
    launch: LaunchTable,
    *,
    on_line: Callable[[str], None],
    wanted: StillWanted,
) -> Image:
    """Return the image of a job, pulled as `[launch] pull` says; blocks.

    Raises:
        ConfigError: the image does not exist, or is not here and must not be pulled.
        JobError: the pull failed otherwise.
    """
    import docker.errors

    name = launch.image
    with describe_daemon("the image is not available", given=name):
        if launch.pull != "always":
            try:
                return client.images.get(name)
            except docker.errors.ImageNotFound:
                if launch.pull == "never":
                    raise ConfigError(
                        "the image is not on this machine and must not be pulled",
                        given=name,
                        remedy='pull it there, or set pull = "missing" in [launch]',
                    ) from None
        _pull(client, name, on_line, wanted)
        return client.images.get(name)


def _pull(
    client: DockerClient, name: str, on_line: Callable[[str], None], wanted: StillWanted
) -> None:
    import docker.errors
    from docker.utils import parse_repository_tag

    repository, tag = parse_repository_tag(name)
    on_line(f"pulls the image {name}")
    progress, reported_at = _Progress(), time.monotonic()
    try:
        with contextlib.closing(_events(client, repository, tag or "latest")) as events:
            for event in events:
                wanted.check()  # the daemon abandons a pull when its connection is closed
                if "error" in event:
                    raise _refused(name, str(event["error"]))
                progress.note(event)
                if time.monotonic() >= reported_at + TELL_EVERY_S:
                    on_line(f"pulls the image {name}: {progress}")
                    reported_at = time.monotonic()
    except docker.errors.APIError as error:
        raise _refused(name, str(error.explanation or error)) from error
    on_line(f"has pulled the image {name}: {progress}")


def _refused(name: str, text: str) -> ConfigError | JobError:
    """Return the error of a failed pull; its text shows whether it is the job's fault."""
    missing = any(
        word in text for word in ("not found", "unknown", "denied", "unauthorized", "invalid")
    )
    return (ConfigError if missing else JobError)(
        "the image cannot be pulled",
        given=f"{name}: {text}",
        remedy="look at image in [launch], and whether the node reaches the registry",
    )


def _events(
    client: DockerClient, repository: str, tag: str
) -> Generator[dict[str, Any], None, None]:
    """Yield the daemon's events of a pull; the connection ends with the iteration."""
    responses: list[requests.Response] = []

    def keep(response: requests.Response, *_: Any, **__: Any) -> None:
        responses.append(response)

    client.api.hooks["response"].append(keep)
    try:
        yield from client.api.pull(repository, tag=tag, stream=True, decode=True)
    finally:
        client.api.hooks["response"].remove(keep)
        for response in responses:
            response.close()


class _Progress:
    """Progress of an image's layers."""

    def __init__(self) -> None:
        self._layers: dict[str, tuple[int, int]] = {}
        self._done: set[str] = set()

    def note(self, event: dict[str, Any]) -> None:
        """Update from an event of the daemon."""
        layer, status = event.get("id", ""), event.get("status", "")
        if status.startswith(("Pulling fs layer", "Waiting")):
            self._layers.setdefault(layer, (0, 0))
        elif status.startswith("Downloading"):
            detail = event.get("progressDetail") or {}
            self._layers[layer] = (detail.get("current", 0), detail.get("total", 0))
        elif status.startswith(("Download complete", "Pull complete", "Already exists")):
            total = self._layers.get(layer, (0, 0))[1]
            self._layers[layer] = (total, total)
            if not status.startswith("Download"):
                self._done.add(layer)

    def __str__(self) -> str:
        if not self._layers:
            return "already present"
        here = sum(current for current, _ in self._layers.values()) / MB
        total = sum(total for _, total in self._layers.values()) / MB
        size = f", {here:.0f} of {total:.0f} MB" if total >= MB else ""
        return f"{len(self._done)} of {len(self._layers)} layers{size}"
