"""Roles of the hub's clients, and the identity that a token stands for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Role = Literal["operator", "viewer", "node", "job", "program"]

PEOPLE: tuple[Role, ...] = ("operator", "viewer")
"""Roles of people's logins; nodes join instead."""

PROGRAM: Role = "program"
"""Role of programs that use queues without a job."""
LOGINS: tuple[Role, ...] = (*PEOPLE, PROGRAM)
"""Roles that exchange a ticket for a login."""


@dataclass(frozen=True, slots=True)
class Identity:
    """The owner of a token."""

    role: Role
    name: str
    """Node id, job id, `operator`, or the name of a login."""
    member: str = ""
    """The member that a job token was issued to; empty: any process of the job."""
    attempt: int = 0
    queues: tuple[str, ...] = ()
    """Names below which a program may use queues and topics; empty: all that are shared."""
