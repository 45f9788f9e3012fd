"""Images of containers: looked up, pulled when the job says so, with the progress told."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, Any

from atoll.config import LaunchTable
from atoll.errors import ConfigError, JobError
from atoll.node.in_thread import Wanted
from atoll.node.launchers.daemon import in_words

if TYPE_CHECKING:
    import requests
    from docker import DockerClient
    from docker.models.images import Image

TELL_EVERY_S = 5.0
"""Pause between two lines about one pull."""

MB = 10**6


def find_image(
    client: DockerClient,
    launch: LaunchTable,
    *,
    on_line: Callable[[str], None],
    wanted: Wanted,
) -> Image:
    """Return the image of a job, pulled as `[launch] pull` says; blocks.

    Args:
        client: The daemon.
        launch: Which image, and when it is pulled.
        on_line: Told how the pull gets on.
        wanted: Ends the pull when it is not any more.

    Raises:
        ConfigError: there is no such image, or it is not here and must not be pulled.
        JobError: the pull failed otherwise.
    """
    import docker.errors

    name = launch.image
    with in_words("the image cannot be had", given=name):
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


def _pull(client: DockerClient, name: str, on_line: Callable[[str], None], wanted: Wanted) -> None:
    import docker.errors
    from docker.utils import parse_repository_tag

    repository, tag = parse_repository_tag(name)
    on_line(f"pulls the image {name}")
    progress, told = _Progress(), time.monotonic()
    try:
        with contextlib.closing(_events(client, repository, tag or "latest")) as events:
            for event in events:
                wanted.check()  # the daemon gives a pull up when nobody listens any more
                if "error" in event:
                    raise _refused(name, str(event["error"]))
                progress.note(event)
                if time.monotonic() >= told + TELL_EVERY_S:
                    on_line(f"pulls the image {name}: {progress}")
                    told = time.monotonic()
    except docker.errors.APIError as error:
        raise _refused(name, str(error.explanation or error)) from error
    on_line(f"has pulled the image {name}: {progress}")


def _refused(name: str, text: str) -> ConfigError | JobError:
    """Return the error for a pull that failed; whether it is the job's own fault is in the text."""
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
    """Yield what the daemon tells of a pull; the connection ends with the iteration."""
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
    """How far the layers of an image are."""

    def __init__(self) -> None:
        self._layers: dict[str, tuple[int, int]] = {}
        self._done: set[str] = set()

    def note(self, event: dict[str, Any]) -> None:
        """Take in what the daemon tells."""
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
        """Return it in words."""
        if not self._layers:
            return "all of it was here"
        here = sum(current for current, _ in self._layers.values()) / MB
        total = sum(total for _, total in self._layers.values()) / MB
        size = f", {here:.0f} of {total:.0f} MB" if total >= MB else ""
        return f"{len(self._done)} of {len(self._layers)} layers{size}"
