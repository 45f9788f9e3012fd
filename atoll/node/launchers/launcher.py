"""The interface between the agent and its launchers: an order goes in, a process comes out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Protocol

from atoll.config import JobSpec
from atoll.config.environment import LARGE_PAGES
from atoll.config.redaction import Redaction, variables_of
from atoll.errors import AtollError, ConfigError, NotAllowed
from atoll.ids import is_reducer
from atoll.node.processes.output import LineHandler
from atoll.wire.messages import Launch

_FORM = "HOST:CONTAINER or HOST:CONTAINER:ro, both absolute and without .."


@dataclass(frozen=True, slots=True)
class Mount:
    """One host folder inside a container."""

    source: Path
    """Path on the host, with links resolved."""
    target: str
    read_only: bool


def parse_mounts(wanted: Sequence[str], *, allowed: Sequence[str]) -> list[Mount]:
    """Parse and check the mounts of a job.

    A folder is allowed if, with links resolved, it is one of the owner's or below one. An owner's
    entry that ends in ``:ro`` allows reading only.

    Raises:
        ConfigError: a mount is malformed, or its folder does not exist.
        NotAllowed: the owner has not listed it.
    """
    return [_parse(text, allowed) for text in wanted]


def _parse(text: str, allowed: Sequence[str]) -> Mount:
    source, _, rest = text.partition(":")
    target, _, mode = rest.partition(":")
    if mode not in ("", "ro", "rw") or not _is_plain(source) or not _is_plain(target):
        raise ConfigError("a mount is not valid", given=repr(text), expected=_FORM)
    read_only = mode == "ro"
    try:
        real = Path(source).resolve(strict=True)
    except (OSError, RuntimeError):
        real = None
    # The same error in both cases: it must not reveal whether a forbidden folder exists.
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
    """Return whether a path is absolute and without `..`."""
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
"""How long to wait for the end of a killed process."""


OOM_SCORE = 500
"""oom_score_adj of jobs, so that the kernel kills them before the owner's programs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResourceCaps:
    """Limits of one process; zero and empty: no limit."""

    cpus: tuple[int, ...] = ()
    """Cores that it may run on."""
    cores: float = 0.0
    """Share of them, for launchers that support fractions of a core."""
    threads: int = 0
    """Threads of numeric libraries."""
    nice: int = 0
    memory_bytes: int = 0
    memory_from: str = ""
    """Origin of the memory limit, for people."""
    gpus: tuple[int, ...] | None = None
    """Visible accelerators; None: all."""
    gpus_by_owner: bool = False
    """The owner chose them: a job's own environment cannot show it others."""


@dataclass(frozen=True, slots=True)
class Sandbox:
    """Programs are kept apart from the rest of the machine; see `sandbox.py`."""

    readable: tuple[str, ...] = ()
    """Folders that the owner opens to all programs."""
    network: str = "hub"
    """`hub`: programs reach their hub only; `open`: no limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """Everything that a launcher needs to know about one process."""

    command: Launch
    spec: JobSpec
    directory: Path
    """The process's own folder on this machine; ATOLL_DIRECTORY."""
    folder: Path
    """Working directory: `directory`, or the job's code below it."""
    python: Path
    variables: dict[str, str]
    """ATOLL_* for its environment."""
    caps: ResourceCaps = field(default_factory=ResourceCaps)
    mounts: tuple[Mount, ...] = ()
    sandbox: Sandbox | None = None
    """Of a process; containers have their own."""
    secrets: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Values by the names of the secrets; in memory only."""

    @property
    def key(self) -> tuple[str, str]:
        """Job and member."""
        return self.command.job, self.command.member

    @property
    def hide(self) -> Redaction:
        """Hides the values of the secrets in the output."""
        return Redaction(self.secrets)

    @property
    def environment(self) -> dict[str, str]:
        """Additional variables: large pages, threads, the job's `[launch] env`, then ATOLL_*."""
        threads = {name: str(self.caps.threads) for name in THREADS if self.caps.threads}
        own = dict(line.partition("=")[::2] for line in self.spec.launch.env)
        if is_reducer(self.command.member):  # our own program, on machines that allow nothing else
            own = {}
        hidden = variables_of(self.spec.launch.secrets, self.secrets) if self.secrets else {}
        return {**LARGE_PAGES, **threads, **own, **hidden, **self.variables}


THREADS = (
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "NUMEXPR_NUM_THREADS",
    "VECLIB_MAXIMUM_THREADS",
)
"""Variables for the number of threads of numeric libraries."""


@dataclass(frozen=True, slots=True)
class Exit:
    """Exit of a process."""

    code: int
    """Exit status; negative: the signal that killed it."""
    error: AtollError | None
    """Cause of a failure; None: success."""
    tail: list[str]
    """Its last lines of output."""


class Process(Protocol):
    """A started program."""

    @property
    def name(self) -> str:
        """Its name on this machine, e.g. `process 4711`."""
        ...

    @property
    def pid(self) -> int | None:
        """Its process id on this machine; None: not visible here."""
        ...

    @property
    def child(self) -> bool:
        """Whether this process is the parent and must reap it."""
        ...

    async def wait(self) -> Exit:
        """Return its exit, after its last line was read and nothing of it is left."""
        ...

    async def stop(self, *, grace_s: float) -> None:
        """Ask it to end; kill it and everything it started after `grace_s`."""
        ...

    def kill(self) -> None:
        """Kill it and everything it started, without waiting."""
        ...

    def fail(self, error: AtollError) -> None:
        """Kill it because of an error, which `wait` then returns."""
        ...


class Launcher(Protocol):
    """Starts programs."""

    async def start(self, order: Order, on_line: LineHandler) -> Process:
        """Start the program of an order; leaves nothing behind if cancelled or failed.

        `on_line` is called with every line of output, on another thread. Raises AtollError if the
        program cannot be started.
        """
        ...
