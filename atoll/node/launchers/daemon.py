"""The daemon that runs containers: found, asked, and its refusals put into words.

Docker and Podman speak the same API. Its client library is the extra `docker`; it is imported
when a container is asked for, not before.
"""

from __future__ import annotations

import contextlib
import logging
import socket
from collections.abc import Iterator
from typing import TYPE_CHECKING

from atoll import config
from atoll.errors import AtollError, ConfigError, JobError

if TYPE_CHECKING:
    from docker import DockerClient

log = logging.getLogger(__name__)

ANSWER_TIMEOUT_S = 60.0
"""How long the daemon may take for one answer."""

LOOK_TIMEOUT_S = 3.0
"""The same when it is only asked whether it is there."""

_OWN_FAULT = (400, 404)
"""Answers that a daemon gives to what cannot work: no such image, program or folder."""


def connect(*, timeout_s: float = ANSWER_TIMEOUT_S) -> DockerClient:
    """Return a client of the first daemon that answers; to be closed.

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
        remedy="start Docker or `podman system service`, or tell its address by DOCKER_HOST",
    )


def is_there() -> bool:
    """Return whether a daemon for containers answers."""
    if not config.container_hosts():
        return False
    try:
        connect(timeout_s=LOOK_TIMEOUT_S).close()
    except AtollError as error:
        log.info("no containers: %s", error)
        return False
    return True


def _knock(host: str) -> None:
    """Raise OSError if nobody listens at a socket of this machine, sooner than the library."""
    if host.startswith("unix://"):
        with socket.socket(socket.AF_UNIX) as door:
            door.connect(host.removeprefix("unix://"))


@contextlib.contextmanager
def in_words(what: str, *, given: str) -> Iterator[None]:
    """Turn what the daemon or the way to it raises into an error for people.

    Raises:
        ConfigError: it is the job's own fault.
        JobError: it is the daemon's.
    """
    try:
        yield
    except _failures() as error:
        response = getattr(error, "response", None)
        if response is not None:
            response.close()  # of a stream that nobody will read
        code = getattr(error, "status_code", None)
        kind = ConfigError if code in _OWN_FAULT else JobError
        text = getattr(error, "explanation", None) or str(error)
        raise kind(what, given=f"{given}: {text}", remedy=_remedy(str(text), code)) from error


def _failures() -> tuple[type[Exception], ...]:
    """Return everything that a call to a daemon may raise."""
    import docker.errors
    import requests

    return docker.errors.DockerException, requests.exceptions.RequestException, OSError


def _remedy(text: str, code: int | None) -> str:
    if code == 404 and "executable" not in text:
        return "look at image in [launch]; private images must be pulled by the node's owner"
    if code in _OWN_FAULT:
        return "look at [launch] and at [job] command: is that program in the image?"
    return "look at the daemon on the node: docker info"
