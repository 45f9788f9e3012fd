"""Several servers that serve the paths of a modular model side by side.

    topic model        the router, the small model, and the file of each path, by name
    queue prompts      requests of any client: a text alone, or with options of sampling
    queue path-K       routed requests: the servers of path K take them
    topic answers      the continued texts, by the keys of their requests

Every server routes; each loads some paths only. A request is acknowledged after its next entry is
stored, so that one whose server is killed is delivered again when the lease ends. It may then be
answered twice, with the same text: take the first answer of a key.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from atoll.errors import AtollError, ConfigError, DataError, HubError, LeaseEnded
from atoll.ids import new_token
from atoll.models import LanguageModel
from atoll.paths.layout import weights_name
from atoll.queues import Item, Queue, Topic
from atoll.routing.folder import FEATURES, ROUTER, PathFolder, open_routed
from atoll.routing.together import Lines

log = logging.getLogger(__name__)

LEASE_S = 60.0
"""How long a killed server's requests wait for another one."""

WAIT_S = 1.0
MOST_PROMPTS = 10_000
KEEP_S = 7 * 86_400.0
TOKENS, TEMPERATURE = 100, 0.8
MOST_TOKENS = 10_000
"""Of one answer; a server writes those of a path in turn, so an endless one stops the others."""
LEAST_TEMPERATURE = 1e-6
"""Above 0; logits divided by less overflow."""


class Lanes:
    """The queues and topics of a job that serves paths."""

    def __init__(self, lines: Lines) -> None:
        """Open them; all members may."""
        self._lines = lines
        self.model: Topic = lines.topic("model", max_items=4096, keep_s=KEEP_S)
        self.prompts: Queue = lines.queue("prompts", max_items=MOST_PROMPTS, max_attempts=100)
        self.answers: Topic = lines.topic("answers", max_items=MOST_PROMPTS, keep_s=KEEP_S)

    def of_path(self, path: int) -> Queue:
        """Return the queue of the requests that are routed to a path."""
        return self._lines.queue(f"path-{path}", max_items=MOST_PROMPTS, max_attempts=100)

    @property
    def stopping(self) -> bool:
        """Whether the member was asked to stop."""
        return self._lines.stopping


def publish_model(lanes: Lanes, paths: PathFolder) -> None:
    """Bring all files of a modular model to the hub, unless they are there; one member calls this.

    Servers on other machines fetch what they need from there.
    """
    there = {entry.key for entry in _entries(lanes.model)}
    files = {weights_name(path): paths.file(path) for path in range(paths.num_paths)}
    files |= {FEATURES: paths.features, ROUTER: paths.router_file}
    for name, file in files.items():
        if name not in there:
            lanes.model.publish(file.read_bytes(), key=name)


class PathServer:
    """A member that routes requests, and answers those of its own paths."""

    def __init__(
        self, lanes: Lanes, folder: Path, *, server: int, servers: int, lease_s: float = LEASE_S
    ) -> None:
        """Fetch the router and this server's paths, ``server``, ``server + servers``, ...

        Args:
            lanes: The queues of the job.
            folder: Where the files are put.
            server: Number of this server.
            servers: Number of all of them.
            lease_s: How long its requests wait for another server if it is killed.

        Raises:
            CheckpointError: a file is damaged.
        """
        self.lanes, self._lease_s = lanes, lease_s
        folder.mkdir(parents=True, exist_ok=True)
        self._fetch(folder, {ROUTER, FEATURES})
        self.paths: PathFolder = open_routed(folder, folder / ROUTER, folder / FEATURES)
        self.own = list(range(server, self.paths.num_paths, servers))
        self._fetch(folder, {weights_name(path) for path in self.own})
        self._reader = self.paths.reader()
        self.models: dict[int, LanguageModel] = {path: self.paths.load(path) for path in self.own}
        self.queues = [lanes.of_path(path) for path in range(self.paths.num_paths)]
        self._errors: list[BaseException] = []

    def _fetch(self, folder: Path, names: set[str]) -> None:
        """Wait for files of the model, and write them; the others are not downloaded."""
        reading = self.lanes.model.subscribe(new_token(), start="oldest")
        while names and not self.lanes.stopping:
            for entry in reading.read(100, wait_s=WAIT_S):
                if entry.key in names:
                    (folder / entry.key).write_bytes(entry.value)
                    names = names - {entry.key}

    def serve(self, over: Callable[[], bool]) -> None:
        """Route and answer until `over` says so; raises what went wrong in a thread."""

        def until_over(step: Callable[[], None]) -> None:
            try:
                while not (over() or self.lanes.stopping or self._errors):
                    step()
            except BaseException as error:  # raised again below
                self._errors.append(error)

        steps = [self.route, *(lambda path=path: self.answer(path) for path in self.own)]
        threads = [threading.Thread(target=until_over, args=(step,)) for step in steps]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if self._errors:
            raise self._errors[0]

    def route(self) -> None:
        """Pass requests on to the queues of their paths."""
        for item in self.lanes.prompts.claim(lease_s=self._lease_s, wait_s=WAIT_S):
            with _held(item, self._lease_s), self._refusals(key_of(item)):
                request = request_of(item)
                ids = self.paths.tokenizer.encode(request["prompt"].encode())
                seen = [ids[: self.paths.router.prefix]]
                features = self._reader.features(seen, self.paths.tokenizer)
                path = int(self.paths.router.choose(features)[0])
                self.queues[path].put(request, key=request["key"])

    def answer(self, path: int) -> None:
        """Continue texts that were routed to one of this server's paths."""
        for item in self.queues[path].claim(lease_s=self._lease_s, wait_s=WAIT_S):
            with _held(item, self._lease_s), self._refusals(item.key):
                request = item.value
                text = self._continued(path, request)
                found = {"path": path, "prompt": request["prompt"], "text": text}
                self.lanes.answers.publish(found, key=request["key"])

    @contextlib.contextmanager
    def _refusals(self, key: str) -> Iterator[None]:
        """Answer a request that cannot be answered with the reason; a repetition would not help."""
        try:
            yield
        except (ConfigError, DataError, KeyError, TypeError, ValueError) as error:
            self.lanes.answers.publish({"error": f"{type(error).__name__}: {error}"}, key=key)

    def _continued(self, path: int, request: Mapping[str, Any]) -> str:
        model, tokenizer = self.models[path], self.paths.tokenizer
        ids: Tensor = tokenizer.encode(request["prompt"].encode()).long()[None]
        generator = torch.Generator().manual_seed(request["seed"])
        with torch.inference_mode():
            made = model.generate(
                ids.to(next(model.parameters()).device), tokens=request["tokens"],
                temperature=request["temperature"], generator=generator,
            )  # fmt: skip
        return tokenizer.decode(made[0].cpu()).decode("utf-8", errors="replace")


@contextlib.contextmanager
def _held(item: Item, lease_s: float) -> Iterator[None]:
    """Extend an item's lease while it is worked on, then acknowledge it.

    If the lease has ended all the same, as after a computer slept, it is delivered again.
    """
    done = threading.Event()

    def extend() -> None:
        while not done.wait(lease_s / 3):
            with contextlib.suppress(HubError):
                item.extend(lease_s)

    keeper = threading.Thread(target=extend, daemon=True)
    keeper.start()
    try:
        with item:
            yield
    except LeaseEnded as error:
        log.warning("a request is delivered again: %s", error)
    finally:
        done.set()


def key_of(item: Item) -> str:
    """Return the key of a request: that of its item; without one it follows from its number."""
    return item.key or f"item-{item.seq}"


def request_of(item: Item) -> dict[str, Any]:
    """Return a request with all its fields; the text alone is one, too.

    Raises:
        DataError: a field is out of range, which no server could answer.
        KeyError, TypeError: it has no prompt, or is no request.
    """
    value = item.value
    fields = {"prompt": value.decode("utf-8", "replace")} if isinstance(value, bytes) else value
    key = key_of(item)
    seed = int.from_bytes(hashlib.blake2b(key.encode(), digest_size=4).digest())
    usual = {"tokens": TOKENS, "temperature": TEMPERATURE, "seed": seed}
    request = {**usual, **fields, "prompt": fields["prompt"] or "\n", "key": key}
    _check(request)
    return request


def _check(request: Mapping[str, Any]) -> None:
    prompt, tokens, seed = (request[name] for name in ("prompt", "tokens", "seed"))
    temperature = request["temperature"]
    whole = all(isinstance(one, int) and not isinstance(one, bool) for one in (tokens, seed))
    usable = (
        isinstance(prompt, str)
        and whole
        and 0 <= tokens <= MOST_TOKENS
        and -(1 << 63) <= seed < 1 << 63
        and isinstance(temperature, int | float)
        and (temperature == 0 or LEAST_TEMPERATURE <= temperature < math.inf)
    )
    if not usable:
        raise DataError(
            "a request cannot be answered",
            given=f"prompt {prompt!r}"[:60]
            + f", tokens {tokens!r}, temperature {temperature!r}, seed {seed!r}",
            expected=f"a text, 0 to {MOST_TOKENS:,} tokens and a seed, whole numbers, a "
            f"temperature that is 0 or at least {LEAST_TEMPERATURE:g}",
        )


def ask(lanes: Lanes, requests: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Put requests by key, wait for all answers, and return them by key.

    Called again with the same keys, as by a client that was killed, it answers nothing twice.

    Raises:
        AtollError: the member was asked to stop before.
    """
    reading = lanes.answers.subscribe(new_token(), start="oldest")
    for key, request in requests.items():
        lanes.prompts.put(dict(request), key=key)
    found: dict[str, dict[str, Any]] = {}
    while len(found) < len(requests):
        for entry in reading.read(100, wait_s=WAIT_S):
            if entry.key in requests:
                found.setdefault(entry.key, entry.value)
        if lanes.stopping and len(found) < len(requests):
            raise AtollError(
                "not all prompts are answered", given=f"{len(found)} of {len(requests)} answers",
                expected="to be asked to stop later",
            )  # fmt: skip
    return {key: found[key] for key in requests}


def _entries(topic: Topic) -> Sequence[Any]:
    reading = topic.subscribe(new_token(), start="oldest")
    found: list[Any] = []
    while more := reading.read(1000):
        found += more
    return found
