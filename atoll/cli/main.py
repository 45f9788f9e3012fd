"""The `atoll` command: the table of its commands, and the one place that prints errors."""

from __future__ import annotations

import copy
import errno
import gc
import os
import sys
from typing import Annotated, Any

import typer

from atoll import __version__
from atoll.cli.access import audit, keys, login, secret, ticket
from atoll.cli.commands import (
    alarms,
    challenges,
    checkpoint,
    demo,
    doctor,
    drain,
    generate,
    hub,
    join,
    limits,
    logs,
    methods,
    paths,
    policy,
    queue,
    resume,
    rm,
    run,
    scale,
    scaling,
    service,
    sign,
    status,
)
from atoll.cli.jobs.interrupts import remembering_interrupts
from atoll.cli.nodes import slurm
from atoll.cli.planning import plan, rehearse, simulate
from atoll.cli.trained import chat, evaluate, export
from atoll.cli.tuning import tune

app = typer.Typer(
    name="atoll",
    help="Turns the computers people already have into one training cluster for PyTorch.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)
app.command("demo")(remembering_interrupts(demo.demo))
app.command("up")(remembering_interrupts(hub.up))
app.add_typer(hub.app, name="hub")
app.command("join")(join.join)
app.add_typer(slurm.app, name="nodes")
app.command("policy")(policy.policy)
app.command("run")(remembering_interrupts(run.run))
app.command("tune")(remembering_interrupts(tune.tune))
app.command("chat")(chat.chat)
app.command("evaluate")(evaluate.evaluate)
app.command("export")(export.export)
app.command("push")(export.push)
app.command("status")(status.status)
app.command("watch")(remembering_interrupts(status.watch))
app.command("logs")(logs.logs)
app.command("scale")(scale.scale)
app.command("collect")(logs.collect)
app.command("alarms")(alarms.alarms)
app.command("limits")(limits.limits)
app.command("challenges")(challenges.challenges)
app.command("worth")(alarms.worth)
app.command("stop")(scale.stop)
app.command("rm")(rm.remove)
app.command("drain")(drain.drain)
app.command("resume")(remembering_interrupts(resume.resume))
app.add_typer(checkpoint.app, name="checkpoint")
app.add_typer(queue.app, name="queue")
app.command("generate")(generate.generate)
app.command("report")(generate.report)
app.add_typer(paths.app, name="paths")
app.command("methods")(methods.methods)
app.add_typer(plan.app, name="plan")
app.command("rehearse")(remembering_interrupts(rehearse.rehearse))
app.command("simulate")(simulate.simulate)
app.add_typer(scaling.app, name="scaling")
app.add_typer(ticket.app, name="ticket")
app.command("login")(login.login)
app.command("logout")(login.logout)
app.add_typer(drain.app, name="node")
app.command("audit")(audit.audit)
app.add_typer(secret.app, name="secret")
app.add_typer(keys.app, name="keys")
app.add_typer(service.app, name="service")
app.add_typer(sign.app, name="sign")
app.command("doctor")(doctor.doctor)


_UsageErrors: Any = next(c for c in typer.BadParameter.__mro__ if c.__name__ == "ClickException")
"""Base class of command-line errors; its module depends on typer's version."""


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"atoll {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version."),
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks of errors.")] = False,
) -> None:
    """Turns the computers people already have into one training cluster for PyTorch."""


def main(arguments: list[str] | None = None) -> None:
    """Run one command and exit with its status."""
    words = sys.argv[1:] if arguments is None else arguments
    own = words[: words.index("--")] if "--" in words else words
    debug = "--debug" in own
    if debug:
        words = ["--debug", *(word for word in own if word != "--debug"), *words[len(own) :]]
    status = _run(words, debug=debug)
    gc.freeze()  # a final garbage collection over all of torch would take half a second
    sys.exit(status)


def _interrupted() -> int:
    from atoll.cli.views import screen

    screen.errors().print("[yellow]interrupted[/]")
    return 130


def _app_of(words: list[str]) -> typer.Typer:
    """Return the app with the named command only: reading the options of all takes 70 ms."""
    named = next((word for word in words if not word.startswith("-")), "")
    lean = copy.copy(app)
    lean.registered_commands = [one for one in app.registered_commands if one.name == named]
    lean.registered_groups = [one for one in app.registered_groups if one.name == named]
    return lean if lean.registered_commands or lean.registered_groups else app


def _run(words: list[str], *, debug: bool) -> int:
    """Run a command and return its exit status; every exception becomes one message."""
    from atoll.cli.views import screen
    from atoll.errors import AtollError, StorageFull

    try:
        return _app_of(words)(words, prog_name="atoll", standalone_mode=False) or 0
    except typer.Abort:
        return 130
    except KeyboardInterrupt:
        return _interrupted()
    except BrokenPipeError:  # e.g. `atoll logs | head`
        screen.close_output()
        return 0
    except AtollError as error:
        if debug:
            screen.show_traceback()
        screen.show_error(error)
        return error.exit_code
    except Exception as error:  # the outermost handler of the process
        if isinstance(error, _UsageErrors):
            shown: Any = error
            shown.show()
            return int(shown.exit_code)
        if isinstance(error.__cause__, KeyboardInterrupt):
            return _interrupted()  # Python wraps what is raised while a class is created
        if debug:
            screen.show_traceback()
        if isinstance(error, ModuleNotFoundError) and error.name == "torch":
            from atoll.cli.jobs.precheck import needs_torch

            without = needs_torch()
            screen.show_error(without)
            return without.exit_code
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            full = StorageFull(
                "the disk of this machine has no room",
                given=error.filename or os.getcwd(),
                remedy="free some space, or choose another folder (--data, --home, ATOLL_HOME)",
            )
            screen.show_error(full)
            return full.exit_code
        screen.show_surprise(error)
        return 70
