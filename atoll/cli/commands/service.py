"""`atoll service`: run the hub or the agent as a system service."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Annotated, Any

import typer

from atoll import system as machine
from atoll.cli.commands import hub, join
from atoll.errors import ConfigError, unknown

if TYPE_CHECKING:
    from atoll.cli.service_files import Service

app = typer.Typer(
    no_args_is_help=True, help="Run the hub or the agent as a service: install, uninstall, status."
)

ROLES = ("hub", "node")
PLATFORMS = {"linux": "linux", "darwin": "macos", "win32": "windows"}

RoleArgument = Annotated[str, typer.Argument(help="hub or node.", metavar="hub|node")]
SystemOption = Annotated[
    bool,
    typer.Option("--system", help="Install it as a system service (needs root or administrator)."),
]
UserOption = Annotated[
    str, typer.Option(help="With --system: user that it runs as (Windows: always LOCAL SERVICE).")
]


@app.command()
def install(
    role: RoleArgument,
    arguments: Annotated[
        list[str] | None,
        typer.Argument(help="Arguments of `atoll hub` or `atoll join`, after --."),
    ] = None,
    system: SystemOption = False,
    user: UserOption = "atoll",
    show: Annotated[
        bool, typer.Option("--print", help="Print the commands without running them.")
    ] = False,
    platform: Annotated[
        str, typer.Option("--for", help="With --print: linux, macos or windows.")
    ] = "",
) -> None:
    """Start the hub or the agent now and whenever this machine starts.

    For example `atoll service install node -- atoll://HOST:PORT/SECRET --slots 2`. The ticket goes
    to a file that only its owner can read.
    """
    from atoll.cli.views import screen

    words = list(arguments or [])
    _check(role, words)
    service = _service(role, system=system, user=user, platform=platform)
    ticket, words = _without_ticket(role, words, service.home)
    service = _with_arguments(service, words)
    place = service.place(person=Path.home())
    if show:
        _show(service, place)
        return
    _check_here(service, user=user)
    for command in service.preparing():
        Path(service.home).mkdir(parents=True, exist_ok=True)
        _run(command)
    if ticket:
        _write(Path(service.home) / "ticket", ticket + "\n", user=service.user, private=True)
    Path(service.home).mkdir(parents=True, exist_ok=True)
    _write(place, service.text(), encoding=service.encoding)
    for command in service.installing(place):
        _run(command)
    console = screen.output()
    text = f"{service.label} runs, now and whenever this machine starts ({place})"
    console.print(text, markup=False)
    if service.platform == "linux" and not service.user:
        console.print(
            "  it starts when you log in; run `loginctl enable-linger` to start it at boot",
            style="dim",
        )
    if service.platform == "windows":
        log = f"{service.home}/{service.label}.log"
        console.print(f"  its log: {log}", style="dim", markup=False)


@app.command()
def uninstall(role: RoleArgument, system: SystemOption = False, user: UserOption = "atoll") -> None:
    """Stop the service and remove it; its data stays."""
    from atoll.cli.views import screen

    _check_role(role)
    service = _service(role, system=system, user=user, platform="")
    place = service.place(person=Path.home())
    if not place.exists():
        raise ConfigError(
            "this service is not installed",
            given=str(place),
            remedy="add --system if it is a system service",
        )
    for command in service.removing():
        _run(command)
    place.unlink()
    for command in service.removed():
        _run(command)
    text = f"{service.label} is removed; its data in {service.home} stays"
    screen.output().print(text, markup=False)


@app.command()
def status(role: RoleArgument, system: SystemOption = False, user: UserOption = "atoll") -> None:
    """Show the status of the service as the system reports it."""
    import subprocess

    _check_role(role)
    service = _service(role, system=system, user=user, platform="")
    command = service.asking()
    try:
        done = subprocess.run(command, check=False)
    except FileNotFoundError as error:
        raise _absent(command) from error
    raise typer.Exit(done.returncode)


def _service(role: str, *, system: bool, user: str, platform: str) -> Service:
    """Return the service without its arguments."""
    import getpass

    from atoll import config
    from atoll.cli.service_files import SYSTEM_HOME, Service

    here = PLATFORMS.get(sys.platform, "")
    chosen = platform or here
    if chosen not in PLATFORMS.values():
        if platform:
            raise unknown("system", platform, PLATFORMS.values())
        raise ConfigError(
            "services can be installed on Linux, macOS and Windows only",
            given=sys.platform,
            remedy="let the system's own scheduler start `atoll hub` or `atoll join`",
        )
    home = SYSTEM_HOME[chosen] if system else PurePosixPath(config.home().resolve().as_posix())
    return Service(
        role=role,
        platform=chosen,
        python=sys.executable,
        home=home,
        user=user if system else "",
        account=getpass.getuser() if chosen == "windows" and not system else "",
    )


def _with_arguments(service: Service, arguments: Sequence[str]) -> Service:
    import dataclasses

    return dataclasses.replace(service, arguments=tuple(arguments))


def _check_role(role: str) -> None:
    if role not in ROLES:
        raise unknown("service", role, ROLES)


def _check(role: str, arguments: list[str]) -> None:
    """Raise for arguments that `atoll hub` or `atoll join` would refuse."""
    _check_role(role)
    starting = typer.Typer()
    starting.add_typer(hub.app, name="hub")
    starting.command("join")(join.join)
    verbs: Any = typer.main.get_command(starting)
    verb = "join" if role == "node" else "hub"
    verbs.commands[verb].make_context(f"atoll {verb}", list(arguments))
    if role == "node" and not any(word.startswith(("atoll://", "@")) for word in arguments):
        raise ConfigError(
            "a node needs a ticket to join with",
            given=" ".join(arguments) or "nothing",
            expected="atoll service install node -- TICKET [options of `atoll join`]",
        )


def _without_ticket(role: str, arguments: list[str], home: PurePosixPath) -> tuple[str, list[str]]:
    """Take a ticket out of a command line, which every user of a machine can read."""
    ticket = next((word for word in arguments if word.startswith("atoll://")), "")
    if role != "node" or not ticket:
        return "", arguments
    return ticket, [f"@{home}/ticket" if word == ticket else word for word in arguments]


def _check_here(service: Service, *, user: str) -> None:
    """Raise if the service cannot be installed on this machine or by this user."""
    if service.platform != PLATFORMS.get(sys.platform):
        raise ConfigError("a service can be installed for this system only", remedy="add --print")
    if not service.user or service.platform == "windows":  # Windows itself says who may
        return
    if not machine.has_user(user):
        raise ConfigError(
            "the service has no user to run as",
            given=f"no user {user!r} on this machine",
            remedy=f"`useradd --system --home-dir {service.home} {user}`, or name another: --user",
        )
    if (machine.user_ids() or (0, 0))[0] != 0:
        raise ConfigError("installing a system service needs root", remedy="use sudo")


def _write(
    path: Path, text: str, *, user: str = "", private: bool = False, encoding: str = "utf-8"
) -> None:
    """Write a file atomically; the same bytes on every system."""
    import secrets

    scratch = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700 if private else 0o755)
        mode = 0o600 if private else 0o644
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0)
        with os.fdopen(os.open(scratch, flags, mode), "wb") as file:
            file.write(text.encode(encoding))
        if user:
            machine.give_to(user, path.parent, scratch)
        scratch.replace(path)
    except OSError as error:
        raise ConfigError("a file of the service cannot be written", given=str(error)) from error
    finally:
        scratch.unlink(missing_ok=True)


def _run(command: list[str]) -> None:
    """Run a system command; its error output is shown."""
    import subprocess

    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", check=False
        )
    except FileNotFoundError as error:
        raise _absent(command) from error
    if done.returncode:
        raise ConfigError(
            "the system refused the service",
            given=f"`{' '.join(command)}`: {(done.stderr or done.stdout).strip()[-500:]}",
            remedy="`atoll service install ... --print` shows what is done, to do it by hand",
        )


def _absent(command: list[str]) -> ConfigError:
    return ConfigError(
        "no supported service manager was found",
        given=f"no `{command[0]}`",
        remedy="start `atoll hub` or `atoll join` some other way; --print shows the command",
    )


def _show(service: Service, place: Path) -> None:
    """Print the file and the commands."""
    import subprocess

    typer.echo(f"# {place}")
    typer.echo(service.text(), nl=False)
    for command in [*service.preparing(), *service.installing(place)]:
        typer.echo("# " + subprocess.list2cmdline(command))
