"""What the tests with real processes share: the command, a small job, and a look for leftovers."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest

from atoll.cli.hub_access import KnownHub, find
from atoll.net.http.client import HubClient
from atoll.node.machine.probe import Gpus, known_compute
from tests.commands import Done, run_here
from tests.patience import PATIENCE_S, PROMPT_S

TINY = """
[job]
name = "tiny"
nodes = 2
route = "relay"
[model]
name = "{model}"
layers = 1
width = 16
heads = 2
context = 16
[data]
corpus = "files:{text}"
[train]
steps = {steps}
batch = 4
lr = 4e-3
warmup = 5
eval_tokens = 512
[strategy]
preset = "diloco"
every = {every}
[checkpoint]
every = 1
"""


ENDLESS = 1_000_000
"""More steps than any test waits for: it stops the job when it has seen everything."""

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.05, 0.2
"""Between two looks at what a test waits for."""

LONGEST_WAIT = 4
"""Times the usual patience: what pytest allows a test (`timeout`) is a little more."""

ROOT = Path(__file__).resolve().parents[2]


@dataclass
class Running:
    """A command that runs."""

    popen: subprocess.Popen[str]
    lines: list[str] = field(default_factory=list)

    def interrupt(self, number: int = signal.SIGINT) -> None:
        self.popen.send_signal(number)

    def wait(self, *, timeout_s: float = PATIENCE_S) -> Done:
        out, err = self.popen.communicate(timeout=timeout_s)
        return Done(self.popen.returncode, out, err)


def _hear_interrupts() -> None:
    """Let Ctrl+C be heard, as at a terminal, also where the tests themselves run in background."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


class Atoll:
    """The `atoll` command in a folder of its own, with everything that it starts."""

    def __init__(self, folder: Path, *, cache: Path) -> None:
        self.folder = folder
        self.cache = cache
        self.home = folder / "home"
        self.runs = folder / "runs"
        self.started: list[subprocess.Popen[str]] = []

    def environment(self, home: Path | None = None) -> dict[str, str]:
        own = {"ATOLL_HOME": str(home or self.home), "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
        own["XDG_CACHE_HOME"] = str(self.cache)
        own |= {"PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1"}
        own["PYTHONPATH"] = os.pathsep.join(
            [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        )
        return {**os.environ, **own, "ATOLL_TEST": str(self.folder)}

    def start(self, *words: str, home: Path | None = None) -> Running:
        popen = subprocess.Popen(
            [sys.executable, "-m", "atoll.cli", *words],
            cwd=self.folder,
            env=self.environment(home),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            preexec_fn=_hear_interrupts,
        )
        self.started.append(popen)
        return Running(popen)

    def run(self, *words: str, timeout_s: float = PATIENCE_S) -> Done:
        return self.start(*words).wait(timeout_s=timeout_s)

    def run_here(self, *words: str) -> Done:
        """Run a command that starts no other in this process: it has loaded all that it needs."""
        return run_here(*words, environment=self.environment(), folder=self.folder)

    def job(self, *, steps: int = 40, every: int = 10, paced: bool = False, **changes: str) -> Path:
        """Write a small job and its text; `changes` replace lines, e.g. nodes="3".

        A `paced` one pauses at every step (see `tests/paced.py`).
        """
        text = self.folder / "text.txt"
        if not text.exists():
            words = random.Random(5)
            known = ["".join(words.choices("abcdefgh", k=5)) for _ in range(50)]
            text.write_text(" ".join(words.choices(known, k=12_000)))
        model = "tests.paced:gpt" if paced else "gpt"
        spec = TINY.format(text=text, model=model, steps=steps, every=every)
        lines = spec.splitlines()
        for key, value in changes.items():
            lines = [f"{key} = {value}" if x.startswith(f"{key} =") else x for x in lines]
        path = self.folder / "tiny.toml"
        path.write_text("\n".join(lines))
        return path

    def hub(self, *options: str) -> KnownHub:
        """Start a hub on a free port; return it when it answers."""
        self.start("hub", "--host", "127.0.0.1", "--port", "0", *options)
        until(lambda: (self.home / "hubs.json").exists())
        return find(home=self.home)

    def join(self, ticket: str, *, name: str, slots: int = 1) -> Running:
        home = self.folder / name
        return self.start("join", ticket, "--name", name, "--slots", str(slots), home=home)

    def job_folder(self) -> Path:
        """Return the folder of the only job."""
        found = [path for path in self.runs.iterdir() if not path.name.startswith(".")]
        assert len(found) == 1, found
        return found[0]

    def processes(self) -> list[psutil.Process]:
        """Return everything that runs with this test's environment."""
        found = []
        for process in psutil.process_iter():
            try:
                mine = process.environ().get("ATOLL_TEST") == str(self.folder)
                if mine and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
            except (psutil.Error, ProcessLookupError):  # it ended in between, or is another's
                continue
        return found

    def assert_ended(self) -> None:
        """Check that nothing of it is left; what was killed last may take a moment to end."""
        deadline = time.monotonic() + PROMPT_S
        while left := self.processes():
            assert time.monotonic() < deadline, [process.cmdline() for process in left]
            time.sleep(0.02)

    def running(self, word: str) -> list[psutil.Process]:
        """Return this test's processes whose command has a word."""
        found = []
        for process in self.processes():
            with contextlib.suppress(psutil.Error):  # it ended in between; a zombie is one too
                if word in process.cmdline():
                    found.append(process)
        return found

    def workers(self) -> list[psutil.Process]:
        return self.running("atoll.node.worker")

    def worker(self, member: str) -> psutil.Process:
        """Return the process of a member, as soon as there is one."""

        def look() -> psutil.Process | None:
            for process in self.workers():
                with contextlib.suppress(psutil.Error):  # it ended in between
                    if process.environ().get("ATOLL_MEMBER") == member:
                        return process
            return None

        found: psutil.Process = until(look)
        return found

    def end(self) -> None:
        while left := self.processes():  # one may have started another meanwhile
            for process in left:
                with contextlib.suppress(psutil.Error):
                    process.kill()
            psutil.wait_procs(left, timeout=0.05)  # what others started is reaped by none of us
        for popen in self.started:
            popen.communicate()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Add to a failure what the cluster says: it is gone when somebody reads the report."""
    report = yield
    made = getattr(item, "funcargs", {}).get("atoll")
    if report.when == "call" and report.failed and isinstance(made, Atoll):
        from tests import evidence

        report.sections.append(("what the cluster says", evidence.of(made)))
    return report


def shared_cache(factory: pytest.TempPathFactory) -> Path:
    """Return the user's cache of all tests of a worker.

    The speed of this machine is in it: agents that start together would all measure it, each in a
    process that loads torch.
    """
    folder = factory.getbasetemp() / "cache"
    known_compute(folder / "atoll", Gpus())
    return folder


@pytest.fixture
def atoll(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Atoll]:
    made = Atoll(tmp_path, cache=shared_cache(tmp_path_factory))
    yield made
    made.end()


def until(condition: Callable[[], Any], *, timeout_s: float = PATIENCE_S) -> Any:
    """Wait until a condition holds and return it.

    Most conditions ask the hub, or look at all processes: what takes long is asked for less often.
    """
    deadline, pause_s = time.monotonic() + timeout_s, FIRST_PAUSE_S
    while not (found := condition()):
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(pause_s)
        pause_s = min(1.1 * pause_s, LONGEST_PAUSE_S)
    return found


def ticket_of(hub: KnownHub) -> str:
    with hub.client() as client:
        return str(client.hub()["ticket"])


def lines_until(client: HubClient, job: str, words: str, *, count: int = 1) -> list[str]:
    """Return all lines of a job, as soon as so many of them have these words."""

    def look() -> list[str] | None:
        lines = [str(line["text"]) for line in client.logs(job)["lines"]]
        return lines if sum(words in line for line in lines) >= count else None

    found: list[str] = until(look)
    return found


def wait_for(
    client: HubClient, job: str, *states: str, timeout_s: float = PATIENCE_S
) -> dict[str, Any]:
    """Return a job's view once it has one of these states; see `while_working`."""

    def look(view: dict[str, Any]) -> dict[str, Any] | None:
        return view if view["state"] in states else None

    found: dict[str, Any] = while_working(client, job, look, timeout_s=timeout_s)
    return found


def while_working(
    client: HubClient, job: str, look: Callable[[dict[str, Any]], Any], *,
    timeout_s: float = PATIENCE_S,
) -> Any:  # fmt: skip
    """Return what `look` finds in a job's view, as soon as it finds anything.

    On a busy machine all of a job may take longer than any of its parts: the time limit begins
    anew, for at most `LONGEST_WAIT` times as long, whenever a member has done something.
    """
    began, signs, pause_s = time.monotonic(), None, FIRST_PAUSE_S
    changed = began
    while not (found := look(view := client.job(job))):
        now = time.monotonic()
        if (new := signs_of_life(view)) != signs:
            signs, changed = new, now
        late = now > changed + timeout_s or now > began + LONGEST_WAIT * timeout_s
        assert not late, f"it did not happen in time: {signs}"
        time.sleep(pause_s)
        pause_s = min(1.1 * pause_s, LONGEST_PAUSE_S)
    return found


def signs_of_life(view: dict[str, Any]) -> list[Any]:
    """Return what changes in a job's view while its members work."""
    members = [[m.get(k) for k in ("member", "attempt", "state", "step")] for m in view["members"]]
    swarm = view.get("swarm") or {}
    return [view["state"], view["committed_round"], swarm.get("measured"), *members]
