"""The status line of `atoll join`."""

from __future__ import annotations

from types import TracebackType

from rich.console import Console
from rich.markup import escape
from rich.status import Status as Spinner

from atoll.cli.views import screen
from atoll.node.agent.options import Status
from atoll.node.availability.policy import OwnerPolicy, describe_policy


class NodeLine:
    """Shows the agent's status; without a terminal, a line whenever it changes."""

    def __init__(self, console: Console, *, hub: str, policy: OwnerPolicy | None = None) -> None:
        """`hub` is the URL that is being joined; `policy` is that of this machine's owner."""
        self._console = console
        self._policy: tuple[str, ...] = ()
        self._first = tuple(describe_policy(policy or OwnerPolicy()))
        self._hub = hub
        self._spinner: Spinner | None = None
        self._said = ""
        self._device_shown = False

    def __enter__(self) -> NodeLine:
        text = f"measuring this machine, then joining {self._hub} ..."
        if self._console.is_terminal:
            self._spinner = self._console.status(escape(text))
            self._spinner.start()
        else:
            self._console.print(escape(text), soft_wrap=True)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._spinner is not None:
            self._spinner.stop()

    def ready(self, node: str) -> None:
        """Report once that this machine has joined."""
        self._console.print(
            f"[green]joined[/] {escape(self._hub)} as [bold]{escape(node)}[/]; Ctrl+C leaves",
            soft_wrap=True,
        )
        self._show_policy(self._first)

    def _show_policy(self, lines: tuple[str, ...]) -> None:
        """Show the owner's policy whenever it changes."""
        if lines != self._policy:
            self._policy = lines
            text = "; ".join(lines) or "no limits any more"
            self._console.print(escape(f"policy: {text}"), soft_wrap=True)

    def _show_device(self, status: Status) -> None:
        """Show once which device computes, and why an accelerator does not."""
        if self._device_shown:
            return
        self._device_shown = True
        if status.computes_on:
            text = f"computes on: {status.computes_on}"
            self._console.print(escape(text), soft_wrap=True)
        if status.idle:
            self._console.print(f"[yellow]note[/] {escape(status.idle)}", soft_wrap=True)

    def show(self, status: Status) -> None:
        """Show the state of the agent."""
        self._show_policy(status.policy)
        self._show_device(status)
        doing = ", ".join(status.running) if status.running else "idle, waiting for a job"
        if status.paused:
            doing = f"paused: {status.paused}; {', '.join(status.running) or 'idle'}"
        elif status.draining:
            doing = f"takes no work: {status.draining}; {', '.join(status.running) or 'idle'}"
        state = doing if status.connected else f"hub unreachable, trying again; {doing}"
        if self._spinner is not None:
            traffic = (
                f"sent {screen.size(status.sent_bytes)}, "
                f"received {screen.size(status.received_bytes)}"
            )
            self._spinner.update(escape(f"{status.node}: {state} ({traffic})"))
        elif state != self._said:
            self._said = state
            self._console.print(escape(f"{status.node}: {state}"), soft_wrap=True)
