"""`atoll logs`: the output of a job's processes; `atoll collect`: its results."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rich.console import Console

    from atoll.cli.jobs.local import LocalOutput
    from atoll.net.http.client import HubClient

LOCAL_POLL_S = 0.2
"""Interval between two looks at the files of an embedded run."""


WAIT_S = 2.0
"""How long the hub holds a request for new lines; rounds are asked for as often."""


def logs(
    job: Annotated[
        str,
        typer.Argument(
            help="A job, or the beginning of its name (default: the newest); or the folder of a "
            "local run."
        ),
    ] = "",
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Follow the output until the job ends.")
    ] = False,
    member: Annotated[
        str, typer.Option(help="One machine's output only, without rounds; or one member's, w2.")
    ] = "",
    lines: Annotated[
        int, typer.Option("--lines", "-n", min=0, help="Number of last lines; 0: all.")
    ] = 200,
    all_: Annotated[
        bool, typer.Option("--all", help="Include what libraries log about themselves.")
    ] = False,
    hub: Annotated[str, typer.Option(help="Ticket or URL of the hub (default: the last).")] = "",
) -> None:
    """Print the output of a job's processes, each line with its machine, and every round's loss."""
    from atoll.cli import hub_access
    from atoll.cli.jobs.embedded import recall_embedded
    from atoll.cli.jobs.local import LocalOutput
    from atoll.cli.jobs.names import job_named
    from atoll.cli.views import screen

    console = screen.output()
    local = recall_embedded(Path(job)) if job and not hub else None
    if local is not None:  # its hub may be gone; what its processes printed is still here
        output = LocalOutput(local[0], job_folder=Path(job).resolve())
        _Printer(console, lines=lines, all_=all_, member=member).local(output, follow=follow)
        return
    with hub_access.find(hub).client(timeout_s=60.0) as client:
        chosen = job_named(client, job)
        printer = _Printer(console, lines=lines, all_=all_, member=member)
        printer.remote(client, chosen, follow=follow)


class _Printer:
    """Prints lines of members and rounds."""

    def __init__(self, console: Console, *, lines: int, all_: bool, member: str) -> None:
        """`member` is a machine or a member; empty: all."""
        from atoll.cli.views.log_lines import Chatter

        self._console = console
        self._member = member
        self._member_known = not member
        """Whether the job had a machine or member of this name; it may have moved since."""
        self._nodes: dict[str, str] = {}
        self._names: dict[str, str] = {}
        self._lines = lines
        self._chatter = None if all_ else Chatter()
        self._after = self._rounds_after = 0

    def local(self, output: LocalOutput, *, follow: bool) -> None:
        """Print the output of an embedded run, following it until it ends."""
        import time

        found = output.lines(last=not follow)
        self._take(output.nodes)
        self._print(self._last(self._wanted(found)))
        while follow:
            ended = output.ended()
            found = output.lines(last=ended)
            self._take(output.nodes)
            self._print(self._wanted(found))
            if ended:
                return
            time.sleep(LOCAL_POLL_S)

    def remote(self, client: HubClient, job: str, *, follow: bool) -> None:
        """Print the output of a hub's job, following it until it ends."""
        from atoll.cli.views.job import ENDED, nodes_of

        self._take(nodes_of(client.job(job)))
        shown: list[dict[str, Any]] = []
        while found := self._next_lines(client, job):
            shown += found
        rounds = [] if self._member else self._next_rounds(client, job)
        self._print(self._last(self._wanted(shown)))
        self._print(self._last(rounds))
        while follow:
            view = client.job(job)
            self._take(nodes_of(view))
            ended = view["state"] in ENDED
            new = self._next_lines(client, job, wait_s=0.0 if ended else WAIT_S)
            self._print(self._wanted(new))
            if not self._member:
                self._print(self._next_rounds(client, job))
            if ended and not new:
                return

    def _take(self, nodes: dict[str, str]) -> None:
        """Store the machine of each member; raises ConfigError if none ever had the wanted name."""
        from atoll.errors import ConfigError
        from atoll.ids import machine_names

        if not self._member_known and nodes:
            if self._member not in {*nodes, *nodes.values()}:
                raise ConfigError(
                    "no machine or member of this job has this name",
                    given=f"--member {self._member}",
                    expected=", ".join(sorted(set(nodes.values()) - {""}) or sorted(nodes)),
                )
            self._member_known = True
        self._nodes, self._names = nodes, machine_names(nodes)

    def _next_lines(
        self, client: HubClient, job: str, *, wait_s: float = 0.0
    ) -> list[dict[str, Any]]:
        one = self._member if self._member in self._nodes else ""
        answer = client.logs(job, after=self._after, member=one, wait_s=wait_s)
        self._after = int(answer["last"])
        return list(answer["lines"])

    def _next_rounds(self, client: HubClient, job: str) -> list[dict[str, Any]]:
        from atoll.cli.views.log_lines import round_line

        found: list[dict[str, Any]] = []
        while True:
            answer = client.rounds(job, after=self._rounds_after)
            self._rounds_after = int(answer["last"])
            if not answer["rounds"]:
                return found
            texts = [round_line(one, self._nodes) for one in answer["rounds"]]
            found += [{"member": "hub", "text": text} for text in texts]

    def _wanted(self, lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return the lines of the wanted machine without the chatter of libraries."""
        if self._member:
            own = {m for m, node in self._nodes.items() if self._member in (m, node)}
            lines = [line for line in lines if line["member"] in own]
        return self._chatter.without(lines) if self._chatter else lines

    def _last(self, lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return lines[-self._lines :] if self._lines else lines

    def _print(self, lines: list[dict[str, Any]]) -> None:
        from atoll.cli.views import screen

        width = max(map(len, self._names.values()), default=0)
        for line in lines:
            name = self._names.get(line["member"], line["member"])
            screen.log_line(self._console, line, name=name, width=width)


def collect(
    job: Annotated[
        str, typer.Argument(help="A job, or the beginning of its name (default: the newest).")
    ] = "",
    to: Annotated[Path | None, typer.Option(help="Folder (default: runs/JOB).")] = None,
    everything: Annotated[
        bool, typer.Option("--all", help="All files of the job, checkpoints too.")
    ] = False,
    hub: Annotated[str, typer.Option(help="Ticket or URL of the hub (default: the last).")] = "",
) -> None:
    """Fetch the results of a job, its artifacts, records and model, and write their report."""
    from rich.markup import escape

    from atoll.cli import hub_access
    from atoll.cli.jobs.names import job_named
    from atoll.cli.jobs.results import fetch, write_if_measured
    from atoll.cli.views import screen

    console = screen.output()
    with hub_access.find(hub).client() as client:
        chosen = job_named(client, job)
        folder = to or Path("runs") / chosen
        view = client.job(chosen)
        names = fetch(client, chosen, folder, everything=everything)
    report = write_if_measured(folder, view=view)
    for name in names:
        console.print(f"  {escape(name)}", soft_wrap=True, style="dim")
    console.print(f"{len(names)} files in {escape(screen.shown(folder))}", soft_wrap=True)
    if report:
        console.print(f"report   {escape(screen.shown(report))}", soft_wrap=True)
