"""What people paste to install Atoll on another machine."""

from __future__ import annotations

PACKAGE = "atoll[train]"
"""The distribution, with what a machine that trains needs."""

PIP = f'pip install "{PACKAGE}"'
"""For every shell: these quotes are understood by sh, PowerShell and cmd."""


def one_line(ticket: str) -> str:
    """Return the line that joins a hub from anywhere and needs nothing but uv before."""
    return f'uvx --from "{PACKAGE}" atoll join {ticket}'
