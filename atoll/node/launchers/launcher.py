"""The seam between the agent and what runs a program: an order goes in, a process comes out.

Folders of this machine that a container sees: only those that the owner has listed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Protocol

from atoll.config import JobSpec
from atoll.errors import AtollError, ConfigError, NotAllowed
from atoll.node.processes.output import LineHandler
from atoll.wire.messages import Launch

_FORM = "HOST:CONTAINER or HOST:CONTAINER:ro, both absolute and without .."


@dataclass(frozen=True, slots=True)
class Mount:
    """One folder of the machine inside a container."""

    source: Path
    """Where it is on the machine, all links resolved."""
    target: str
    read_only: bool


def parse_mounts(wanted: Sequence[str], *, allowed: Sequence[str]) -> list[Mount]:
    """Return the mounts that a job asks for.

    A folder is allowed when, with all links resolved, it is one of the owner's or lies below one.
    An owner's entry that ends in ``:ro`` gives its folder for reading only.

    Raises:
        ConfigError: a mount is written wrongly, or its folder does not exist.
        NotAllowed: the owner has not listed it.
    """
    return [_parse(text, allowed) for text in wanted]


def _parse(text: str, allowed: Sequence[str]) -> Mount:
    source, _, rest = text.partition(":")
    target, _, mode = rest.partition(":")
    if mode not in ("", "ro", "rw") or not _is_plain(source) or not _is_plain(target):
        raise ConfigError("a mount is written wrongly", given=repr(text), expected=_FORM)
    read_only = mode == "ro"
    try:
        real = Path(source).resolve(strict=True)
    except (OSError, RuntimeError):
        real = None
    # Whoever may not have a folder does not learn whether it exists.
    if real is None or not any(_covers(entry, real, read_only=read_only) for entry in allowed):
        raise NotAllowed(
            "this machine's owner does not allow a mount",
            given=repr(text),
            expected=f"a folder that exists, below one of {', '.join(allowed)}"
            if allowed
            else "no mounts at all",
            remedy="ask the owner to add the folder to `mounts` of the node's policy",
        )
    return Mount(real, target, read_only)


def _is_plain(path: str) -> bool:
    """Return whether a path is absolute and never goes up."""
    pure = PurePosixPath(path)
    return pure.is_absolute() and ".." not in pure.parts and pure != PurePosixPath("/")


def _covers(entry: str, real: Path, *, read_only: bool) -> bool:
    folder, _, mode = entry.partition(":")
    if mode == "ro" and not read_only:
        return False
    try:
        root = Path(folder).resolve(strict=True)
    except (OSError, RuntimeError):
        return False
    return real.is_relative_to(root)


GONE_S = 5.0
"""How long the end of a process that was killed is waited for."""


OOM_SCORE = 500
"""Added to a job's badness when the system runs out of memory: it ends before its owner's work."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResourceCaps:
    """What one process may have of the machine; zero and empty mean: no limit."""

    cpus: tuple[int, ...] = ()
    """The cores that it runs on."""
    cores: float = 0.0
    """How much of them, for launchers that can share out parts of a core."""
    threads: int = 0
    """Threads that numeric libraries are told to use."""
    nice: int = 0
    memory_bytes: int = 0
    memory_from: str = ""
    """Who set the limit of memory, for people."""
    gpus: tuple[int, ...] | None = None
    """Which accelerators it sees; None: all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """Everything that a launcher needs to know about one process."""

    command: Launch
    spec: JobSpec
    directory: Path
    """The process's own folder on this machine; ATOLL_DIRECTORY."""
    folder: Path
    """Where it works: `directory`, or the job's code below it."""
    python: Path
    """The Python of its environment."""
    variables: dict[str, str]
    """ATOLL_* for its environment."""
    caps: ResourceCaps = field(default_factory=ResourceCaps)
    mounts: tuple[Mount, ...] = ()
    """Folders of this machine that a container sees."""

    @property
    def key(self) -> tuple[str, str]:
        """Job and member."""
        return self.command.job, self.command.member

    @property
    def environment(self) -> dict[str, str]:
        """What is added to its environment: the job's `[launch] env`, threads, then ATOLL_*."""
        threads = {name: str(self.caps.threads) for name in THREADS if self.caps.threads}
        own = dict(line.partition("=")[::2] for line in self.spec.launch.env)
        return {**threads, **own, **self.variables}


THREADS = (
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "NUMEXPR_NUM_THREADS",
    "VECLIB_MAXIMUM_THREADS",
)
"""Variables by which numeric libraries are told how many threads to use."""


@dataclass(frozen=True, slots=True)
class Exit:
    """How a process ended."""

    code: int
    """Exit status; negative: the signal that killed it."""
    error: AtollError | None
    """What it failed of; None when it ended well."""
    tail: list[str]
    """Last lines it printed."""


class Process(Protocol):
    """A program that has been started."""

    @property
    def name(self) -> str:
        """What it is called on this machine, e.g. `process 4711`."""
        ...

    @property
    def pid(self) -> int | None:
        """Its process id on this machine; None: it has none that could be seen here."""
        ...

    @property
    def child(self) -> bool:
        """Whether this process has started it and so must bury it."""
        ...

    async def wait(self) -> Exit:
        """Return how it ended, after its last line was read and nothing of it is left."""
        ...

    async def stop(self, *, grace_s: float) -> None:
        """Ask it to end; kill it and everything it started when it has not after `grace_s`."""
        ...

    def kill(self) -> None:
        """Kill it and everything it started, without waiting."""
        ...

    def fail(self, error: AtollError) -> None:
        """Kill it because of an error, which `wait` then tells."""
        ...


class Launcher(Protocol):
    """Starts programs in one way."""

    async def start(self, order: Order, on_line: LineHandler) -> Process:
        """Start the program that an order describes.

        Cancelled, it leaves nothing behind.

        Args:
            order: Which program, where, with what limits.
            on_line: Called with every line it prints, in another thread.

        Raises:
            AtollError: it cannot be started; nothing is left behind.
        """
        ...
