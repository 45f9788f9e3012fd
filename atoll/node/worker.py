"""`python -m atoll.node.worker`: one training process of a job, started by a node agent.

It runs the built-in trainer, a role of reinforcement learning, or the user's script, which calls
`atoll.join()` itself. For a member that is an island of several ranks it becomes their supervisor,
and each rank runs this program again, with a place. On follower hosts it supervises the ranks
there.

It ends in one of three ways: exit 0 and `Finished(ok=True)`; exit 75 because the node asked it to
leave; or a traceback, `error.json`, `Finished(ok=False)` and exit 1.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import json
import logging
import os
import runpy
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from types import FrameType

from atoll import config
from atoll.config import JobSpec, RankPlace, WorkerEnvironment
from atoll.config.redaction import Redaction
from atoll.errors import AtollError, ConfigError, RankLost, ScriptError
from atoll.ids import is_follower
from atoll.island.morph_orders import Orders
from atoll.island.peer_failure import is_peer_failure, rank_lost
from atoll.island.start_phase import StartPhase, StartReport
from atoll.node.imports import load, modules_of_rank
from atoll.node.islands.failure_cause import error_file
from atoll.node.islands.moved import moved
from atoll.node.processes.exits import ERROR_FILE
from atoll.node.processes.process_tree import watch_parent
from atoll.train.results.script_errors import describe
from atoll.wire.limits import EXIT_LEFT, EXIT_REPLACED
from atoll.wire.messages import Finished

log = logging.getLogger(__name__)

EXIT_FAILED = 1


class LeaveRequested:
    """Becomes true when the node asks this process to leave (SIGTERM)."""

    def __init__(self) -> None:
        self.requested = False
        self._then: Callable[[], None] = lambda: None

    def then(self, action: Callable[[], None]) -> None:
        """Call `action` on the request, too; it MUST NOT block."""
        self._then = action
        if self.requested:
            action()

    def __call__(self) -> bool:
        """Return whether this process was asked to leave."""
        return self.requested

    def listen(self) -> None:
        """Handle SIGTERM, which then no longer ends the process."""
        signal.signal(signal.SIGTERM, self._handle)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.requested = True
        self._then()


def main() -> int:
    """Do the work of one member; return the exit status."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)  # it logs every request
    watch_parent()
    directory, place, start = Path.cwd(), None, StartReport()
    hide = Redaction({})
    try:
        environment = config.worker_environment()
        if environment is None:
            raise ConfigError(
                "a worker was started by hand",
                expected="the environment that a node agent sets",
                remedy="use `atoll run`",
            )
        directory = environment.directory
        place = config.supervised_place()
        if place is not None:
            start = StartReport(directory, rank=place.rank)
        spec = config.worker_spec(environment)
        hide = Redaction.of_environment(spec.launch)
        if place is None and is_follower(environment.member):
            from atoll.node.islands.follower import serve_island

            return serve_island(environment, spec)
        if place is None and spec.mesh.ranks > 1:
            from atoll.node.islands.supervisor import supervise

            return supervise(environment, spec)
        if spec.job.code and not spec.job.script:
            sys.path.insert(0, str(Path.cwd()))  # the job's own environments or model
        if spec.kind == "rl":
            return run_roles(environment, spec)
        if spec.job.script:
            return run_script(environment, spec, place=place, start=start)
        if place is not None and (spec.island.elastic or not place.leads):
            return run_follower(environment, spec, place, start=start)
        return run_trainer(environment, spec, place=place, start=start)
    except AtollError as error:
        _record(directory, hide.fields(error.to_dict()), place=place)
        if not isinstance(error, ScriptError):  # its traceback has been printed
            sys.stderr.write(f"{type(error).__name__}: {error}\n")
        return EXIT_FAILED
    except BaseException as error:  # the process ends here in any case
        traceback.print_exc()
        described = describe(error, where="the worker")
        _record(directory, hide.fields(described.to_dict()), place=place)
        return EXIT_FAILED


def run_follower(
    environment: WorkerEnvironment, spec: JobSpec, place: RankPlace, *, start: StartReport
) -> int:
    """Serve rank 0 of an island until it has finished; return the exit status.

    The ranks of an elastic island that is not planned yet, rank 0 too, measure and plan it instead.

    Raises:
        RankLost: another rank was lost.
        AtollError: any other failure.
    """
    orders = Orders()
    while True:
        try:
            if spec.island.elastic:
                load("atoll.plan.elastic")
                from atoll.plan.elastic import plan_island

                plan_island(spec, place=place, start=start, folder=environment.directory)
            else:
                load(*modules_of_rank(spec, place), "atoll.train.island.follower")
                from atoll.train.island.follower import follow

                following = follow(spec, place=place, start=start)
                order = orders.take(following) if following is not None else None
                if order is not None:
                    place, spec, start = moved(order, environment)
                    continue
            return 0
        except AtollError:
            raise
        except BaseException as error:
            order = orders.after(error)
            if order is None:
                raise _error_of(error, place=place, start=start) from error
        place, spec, start = moved(order, environment)


def _error_of(error: BaseException, *, place: RankPlace | None, start: StartReport) -> AtollError:
    """Return the error for an exception; prints its traceback if that says more."""
    if place is not None and is_peer_failure(error):
        start.fail(error)
        return rank_lost(error, rank=place.rank, ranks=place.ranks)
    if isinstance(error, AtollError):
        return error
    traceback.print_exception(error)
    return describe(error, where="the trainer")


def run_trainer(
    environment: WorkerEnvironment,
    spec: JobSpec,
    *,
    place: RankPlace | None = None,
    start: StartReport,
) -> int:
    """Run the built-in trainer as a member of the job; return the exit status.

    `place` and `start` belong to rank 0 of an island; `place` is None for a single process.

    Raises:
        AtollError: the failure, already reported to the hub. A lost rank is not reported: the
            supervisor knows the cause better, and the member will be launched again.
    """
    leave = LeaveRequested()
    leave.listen()
    trainer = "atoll.train.swarm.run" if spec.swarm.stages else "atoll.train.trainer"
    trainer = "atoll.train.paths.run" if spec.dipaco.modules else trainer
    load("atoll.train.join_job", trainer, *modules_of_rank(spec, place))
    from atoll.node.trainer_process import train
    from atoll.train.join_job import join_job

    start.enter(StartPhase.JOINING)
    enrolled = join_job(environment, spec.job, should_stop=leave)
    leave.then(lambda: enrolled.leave("this process was asked to leave"))
    try:
        orders = Orders() if place is not None else None
        result = train(enrolled, environment, spec, leave, place=place, start=start, orders=orders)
    except BaseException as error:
        if enrolled.replaced:
            sys.stderr.write(f"this process was replaced: {error}\n")
            return EXIT_REPLACED
        failure = _error_of(error, place=place, start=start)
        if isinstance(failure, RankLost):
            raise failure from error
        with contextlib.suppress(AtollError):  # the node also reports it, from the file
            enrolled.close(Finished(ok=False, error=failure.to_dict()))
        raise failure from error
    if enrolled.replaced:
        return EXIT_REPLACED
    if leave.requested and result.get("stopped"):
        enrolled.close()
        return EXIT_LEFT
    result["control_sent_bytes"] = enrolled.connection.link.counters.sent_control_bytes
    enrolled.close(Finished(ok=True, result=result))
    return 0


def run_script(
    environment: WorkerEnvironment,
    spec: JobSpec,
    *,
    place: RankPlace | None = None,
    start: StartReport,
) -> int:
    """Run the user's script as `__main__`; return the exit status.

    `place` and `start` belong to a rank of an island; `place` is None for a single process.

    Raises:
        ScriptError: it raised, or exited with a status other than 0.
        RankLost: another rank of its island was lost.
    """
    script = script_path(environment.directory, spec, folder=Path.cwd())
    sys.argv = [str(script), *spec.job.args]
    sys.path.insert(0, str(script.parent))
    try:
        runpy.run_path(str(script), run_name="__main__")
    except SystemExit as leaving:
        if leaving.code in (EXIT_LEFT, EXIT_REPLACED):
            return int(leaving.code)
        if leaving.code not in (None, 0):
            raise ScriptError(
                f"{script.name} left with exit status {leaving.code}",
                expected="exit status 0",
                remedy="see what it printed: atoll logs",
            ) from leaving
    except BaseException as error:
        if place is not None and is_peer_failure(error):
            start.fail(error)
            raise rank_lost(error, rank=place.rank, ranks=place.ranks) from error
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename != str(script):
            trace = trace.tb_next  # leave out our own frames and runpy's
        traceback.print_exception(error.with_traceback(trace or error.__traceback__))
        if isinstance(error, AtollError):
            raise
        raise describe(error, where=script.name, trace=trace) from error
    finally:
        _end_quietly()
    return 0


def run_roles(environment: WorkerEnvironment, spec: JobSpec) -> int:
    """Run a role of a reinforcement learning job; return the exit status.

    Raises:
        AtollError: the failure; other exceptions become a ScriptError.
    """
    load("atoll.rl.run")
    from atoll.rl.run import run_job
    from atoll.run import join

    try:
        with join() as run:
            run_job(spec, run)
    except SystemExit as leaving:  # asked to leave, or replaced
        return int(leaving.code or 0)
    except AtollError:
        raise
    except BaseException as error:
        traceback.print_exc()
        raise describe(error, where="reinforcement learning") from error
    finally:
        _end_quietly()
    return 0


def script_path(directory: Path, spec: JobSpec, *, folder: Path) -> Path:
    """Return the path of a job's script: in its code (`folder`), or in the process's own folder."""
    return folder / spec.job.script if spec.job.code else directory / Path(spec.job.script).name


def _end_quietly() -> None:
    """Wait for the script's threads and run its exit handlers."""
    for thread in threading.enumerate():
        if thread is not threading.current_thread() and not thread.daemon:
            thread.join()
    atexit._run_exitfuncs()


def _record(directory: Path, error: dict[str, str], *, place: RankPlace | None) -> None:
    """Store the error where the node, or the supervisor of this rank, reads it."""
    name = ERROR_FILE if place is None else error_file(place.rank)
    with contextlib.suppress(OSError):
        (directory / name).write_text(json.dumps(error), encoding="utf-8", newline="\n")


if __name__ == "__main__":
    faulthandler.enable()  # a process that a library aborts prints where each thread was
    status = main()
    sys.stdout.flush()
    sys.stderr.flush()
    # Skip the interpreter's shutdown, during which Gloo's threads may abort the process.
    os._exit(status)
