"""Whether `atoll` would accept a command line, as far as its verbs, options and arguments go."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import typer

from atoll.cli.main import app


def refusal(words: Sequence[str]) -> str:
    """Return why `atoll WORDS` would be refused before it does anything; empty: it would not."""
    command: Any = typer.main.get_command(app)
    parent: Any = None
    name, rest = "atoll", list(words)
    while True:
        try:
            context = command.make_context(name, rest, parent=parent)
        except Exception as error:  # what parsing raises has no base that is typer's own
            tell: Any = getattr(error, "format_message", lambda told=error: repr(told))
            return str(tell())
        below = getattr(command, "commands", {})
        rest = [*getattr(context, "_protected_args", []), *context.args] if below else []
        if not rest:
            return ""
        name = rest.pop(0)
        if name not in below:
            return f"no verb {name!r} of {command.name}"
        command, parent = below[name], context
