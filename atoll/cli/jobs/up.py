"""A hub and this machine as its first node, until Ctrl+C: what `atoll up` does.

The hub's data, this node's identity and the remembered login are those of `atoll hub` and
`atoll join`, so each command goes on with what the others have left.
"""

from __future__ import annotations

import contextlib
import ipaddress
import time
import webbrowser
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.status import Status

from atoll import config
from atoll.cli import hub_access
from atoll.cli.hub_access import KnownHub
from atoll.cli.jobs.embedded import Embedded, Interrupted, Listening, is_in_use
from atoll.cli.jobs.interrupts import Interrupts
from atoll.cli.views import screen
from atoll.config.install import PIP, one_line
from atoll.errors import AtollError, AuthError, HubError
from atoll.hub.storage.backup import load_last_folder
from atoll.net.endpoint import parse_ticket
from atoll.net.http.client import HubClient
from atoll.node.identity.discovery import FoundHub
from atoll.node.identity.pairing import already_joined
from atoll.node.machine.probe import torch_version
from atoll.wire.states import NodeState

LOOK_S = 1.0
"""Interval of questions to the hub."""

PATIENCE_S = 6.0
"""After Ctrl+C: time of each process to end; workers finish their round."""

LOGIN_S = 120.0
"""Validity of the login ticket in the address that the browser is started with."""

_SHOWN = ("node-online", "node-lost", "node-revoked", "node-draining", "pairing-refused")


@dataclass(frozen=True, slots=True, kw_only=True)
class UpOptions:
    """Options of `atoll up`."""

    port: int
    advertise: str = ""
    runs: Path | None = None
    """Folder of the jobs' files; None: the hub's last one, at first `runs`."""
    browser: bool = True


def up(options: UpOptions, *, console: Console) -> int:
    """Run a hub and a node until a signal; return the exit status of the command.

    Raises:
        PortTaken: another program listens on the port.
        HubError: the hub did not start, or ended.
    """
    home = config.home().resolve()
    data = home / "hub"
    last = load_last_folder(data)
    if last is not None and is_in_use(data):
        return _show_running(last.address, console=console)
    runs = options.runs or (Path(last.jobs) if last is not None else Path("runs"))
    listening = Listening(host="0.0.0.0", port=options.port, advertise=options.advertise, home=home)
    trains = bool(torch_version())
    embedded = Embedded(
        folder=home, jobs=runs.resolve(), nodes=1 if trains else 0, listening=listening
    )
    with contextlib.ExitStack() as stack:
        interrupts = stack.enter_context(Interrupts())
        stack.callback(embedded.close, patience_s=PATIENCE_S)
        with contextlib.suppress(Interrupted):
            ready = embedded.start(interrupts, prepare=lambda ticket: keep_identity(ticket, home))
            hub_access.remember(ready.hub)
            client = stack.enter_context(ready.hub.client())
            _show(client, ready.hub, ticket=ready.ticket, console=console)
            if not trains:
                console.print(
                    f"  [yellow]this machine is a hub only[/]: torch is not installed ({PIP})",
                    soft_wrap=True,
                )
            if options.browser:
                _open(client, ready.hub, console=console)
            _Watch(client, embedded, console=console).run(interrupts)
        console.print("stopping ...", style="dim")
    console.print("stopped; `atoll up` goes on with the same machines and jobs")
    return 0


def keep_identity(ticket: str, home: Path) -> None:
    """Let this machine's node keep its name if the hub's address has changed since the last run."""
    hub = parse_ticket(ticket)
    already_joined(
        FoundHub(
            name=hub.host, host=hub.host, port=hub.port, prefix=hub.prefix, secure=hub.secure,
            fingerprint=hub.fingerprint,
        ),
        home=home,
    )  # fmt: skip


# ------------------------------------------------------------------------------------ shown


def _show_running(address: str, *, console: Console) -> int:
    """Say where the hub of this data folder is, and how to join it."""
    try:
        known = hub_access.find(address)
    except AuthError:
        raise HubError(
            "a hub runs on this machine already",
            given=address,
            remedy="stop it first, or use it: `atoll status`",
        ) from None
    console.print(f"[bold green]a hub runs on this machine already[/] at {escape(known.url)}")
    with known.client() as client:
        _show(client, known, ticket=str(client.hub()["ticket"]), console=console)
    return 0


def _show(client: HubClient, hub: KnownHub, *, ticket: str, console: Console) -> None:
    """Print the page's address and what to type on other machines."""

    def line(text: str, style: str = "") -> None:
        console.print(text, soft_wrap=True, style=style)

    line(f"[bold green]Atoll is up[/]   page   {escape(hub.url)}/?token={hub.token}")
    line("a browser warns about the hub's own certificate: accept it once", "dim")
    code = shown_code(client)
    if code:
        line("on another machine of this network, type:", "dim")
        line(f"    [bold]atoll join[/]        and the code [bold]{code}[/]")
    line("on a machine anywhere, with uv (https://docs.astral.sh/uv), paste this line:", "dim")
    line(f"    [bold]{escape(one_line(ticket))}[/]")
    line(f"    (or: {escape(PIP)}, then the part from `atoll join`)", "dim")
    place = parse_ticket(ticket)
    if _is_private(place.host):
        line(
            f"    {place.host} is known in this network only; for machines outside, forward TCP "
            f"port {place.port} to it and start `atoll up --advertise PUBLIC_ADDRESS`",
            "dim",
        )
    line("then, here:   [bold]atoll run demo[/]   (or a job file, or a script of yours)")


def shown_code(client: HubClient) -> str:
    """Return the pairing code, or an empty text if there is none."""
    with contextlib.suppress(AtollError):
        return str(client.pairing()["code"])
    return ""


def _is_private(host: str) -> bool:
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host).is_private
    return False


def _open(client: HubClient, hub: KnownHub, *, console: Console) -> None:
    """Open the page, with a ticket for one use: command lines are visible to other users."""
    if not config.has_display():
        console.print("no screen here: open the page's address in a browser", style="dim")
        return
    ticket = client.create_ticket(role="operator", uses=1, valid_s=LOGIN_S, name="browser")
    with contextlib.suppress(webbrowser.Error, OSError):
        webbrowser.open(f"{hub.url}/?ticket={parse_ticket(ticket).secret}")


class _Watch:
    """Prints the hub's events; the last line shows the code and the number of machines."""

    def __init__(self, client: HubClient, embedded: Embedded, *, console: Console) -> None:
        self._client = client
        self._embedded = embedded
        self._console = console
        self._spinner: Status | None = None
        self._code = ""
        self._last = 0
        self._node_ended = False

    def run(self, interrupts: Interrupts) -> None:
        """Watch until a signal comes; raises HubError when the hub ends."""
        self._last = int(self._client.hub_events()["last"])
        self._code = shown_code(self._client)
        self._say("Ctrl+C stops the hub and this node; jobs continue at the next `atoll up`", "dim")
        self._list_online()
        if self._console.is_terminal:
            self._spinner = self._console.status("")
            self._spinner.start()
        try:
            while not interrupts.sleep(LOOK_S):
                self._embedded.check_hub()
                with contextlib.suppress(AtollError):  # asked again
                    self._look()
        finally:
            if self._spinner is not None:
                self._spinner.stop()

    def _list_online(self) -> None:
        for node in self._client.nodes():
            if node["state"] == NodeState.ONLINE:
                self._say(f"{escape(str(node['node']))} is online")

    def _look(self) -> None:
        found = self._client.hub_events(after=self._last)
        self._last = int(found["last"])
        for event in found["events"]:
            if event["kind"] in _SHOWN:
                self._say(escape(str(event["text"])))
        pairing = self._client.pairing()
        code = str(pairing["code"])
        if code != self._code:
            self._code = code
            self._say(
                f"pairing code [bold]{code}[/]"
                if code
                else "[yellow]no more pairings after three wrong codes[/]: `atoll ticket code` "
                "makes a new one"
            )
        ended = self._embedded.ended_node()
        if ended and not self._node_ended:
            self._node_ended = True
            self._say(f"[yellow]this machine's node has ended[/]: {escape(ended)}")
        if self._spinner is not None:
            self._spinner.update(_state(self._client.nodes(), pairing))

    def _say(self, text: str, style: str = "") -> None:
        now = f"[dim]{time.strftime('%H:%M:%S')}[/] " if not style else ""
        self._console.print(now + text, style=style, soft_wrap=True)


def _state(nodes: list[dict[str, Any]], pairing: dict[str, Any]) -> str:
    online = sum(node["state"] == NodeState.ONLINE for node in nodes)
    text = f"{online} machine{'s' * (online != 1)} online"
    if pairing["code"]:
        left = screen.duration(float(pairing["left_s"]))
        text += f"; pairing code {pairing['code']} ({left} left)"
    return text
