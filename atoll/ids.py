"""Names of nodes, jobs and members as distinct types, and functions to build and check them."""

from __future__ import annotations

import re
import secrets
from collections import Counter
from collections.abc import Mapping
from typing import NewType

from atoll.errors import ConfigError

NodeId = NewType("NodeId", str)
"""A machine's agent, e.g. ``"kitchen-3f9a"``; chosen when it first joins, stored on its disk."""

JobId = NewType("JobId", str)
"""A job, e.g. ``"gpt-20261121-0415"``; also the name of its folder under ``runs/``."""

MemberId = NewType("MemberId", str)
"""A training process of a job, ``"w0"``, ``"w1"``, ...: ``w`` and the slot it leases."""

REDUCER = "reducer"
"""Name of the process that sums up what members send."""

_REDUCER = re.compile(rf"{REDUCER}-[0-9]{{1,6}}")
_JOB = re.compile(r".+-[0-9]{8}-[0-9]{6}(-[0-9]+)*")
_MEMBER = re.compile(r"\bw\d+\b")
_NUMBERED = re.compile(r"(\D*)(\d*)")
_SAFE = re.compile(r"[a-z0-9][a-z0-9._-]{0,62}")


def is_job_id(name: str) -> bool:
    """Return whether a name has the form of a job id: name, date and time."""
    return _JOB.fullmatch(name) is not None


def member_id(slot: int) -> MemberId:
    """Return the member of data slot ``slot``."""
    return MemberId(f"w{slot}")


def slot_of(member: str) -> int:
    """Return a member's slot, by which members are sorted."""
    return int(member[1:])


def follower_id(slot: int, part: int) -> str:
    """Return the name of the follower on machine `part` (1, 2, ...) of an island."""
    return f"{member_id(slot)}.{part}"


def is_follower(member: str) -> bool:
    """Return whether a process is a follower: a further machine of a member."""
    return "." in member and not is_reducer(member)


def member_of_follower(follower: str) -> tuple[MemberId, int]:
    """Return a follower's member and its machine number: `w2.1` -> `w2`, 1."""
    member, _, part = follower.rpartition(".")
    return MemberId(member), int(part)


def reducer_id(number: int = 0) -> str:
    """Return the name of a reducer; those above 0 are parameter servers only."""
    return f"{REDUCER}-{number}" if number else REDUCER


def is_reducer(member: str) -> bool:
    """Return whether a process of a job is a reducer, not a member."""
    return member == REDUCER or _REDUCER.fullmatch(member) is not None


def session_id(job: str, member: str) -> str:
    """Return the hub address of a member or reducer: ``job/member``."""
    return f"{job}/{member}"


def machine_names(nodes: Mapping[str, str]) -> dict[str, str]:
    """Return a display name for each member: the name of its machine.

    The member is added if its machine has several, `lap3 (w2)`, and is used alone if the machine
    is unknown.

    Args:
        nodes: The machine of each member; an empty one is unknown.
    """
    several = Counter(nodes.values())
    names = {m: f"{node} ({m})" if several[node] > 1 else node for m, node in nodes.items()}
    return {member: names[member] if node else member for member, node in nodes.items()}


def by_number(name: str) -> list[tuple[str, int]]:
    """Return the key that sorts names as people do: lap9 before lap10."""
    return [(letters, int(digits or 0)) for letters, digits in _NUMBERED.findall(name)]


def spoken(text: str, nodes: Mapping[str, str], *, member: str = "") -> str:
    """Return a sentence with the names of :func:`machine_names` instead of members.

    A member is kept if the sentence also names its machine.

    Args:
        text: The sentence.
        nodes: The machine of each member.
        member: The member that the sentence is about, put first if it is not named; empty: none.
    """
    names = machine_names(nodes)

    def name(found: re.Match[str]) -> str:
        one = found[0]
        return one if nodes.get(one, one) in text else names.get(one, one)

    said = _MEMBER.sub(name, text)
    subject = names.get(member, member)
    return f"{subject}: {said}" if subject and nodes.get(member, member) not in said else said


def check_name(kind: str, name: str) -> str:
    """Return ``name`` if it is safe as a file name and in an address.

    Raises:
        ConfigError: it is not 1 to 63 characters of a-z, 0-9, dot, dash and underscore.
    """
    if not _SAFE.fullmatch(name) or ".." in name:
        raise ConfigError(
            f"this {kind} cannot be used as a name",
            given=repr(name),
            expected="1 to 63 of a-z 0-9 . _ - , starting with a letter or digit",
        )
    return name


def safe_name(text: str) -> str:
    """Return ``text`` as a safe name: lower case, other characters become dashes."""
    cleaned = re.sub(r"[^a-z0-9_-]+", "-", text.lower()).strip("-_")
    return cleaned[:40] or "x"


def new_token() -> str:
    """Return a fresh secret of 192 bits, safe in a URL."""
    return secrets.token_urlsafe(24)


def new_suffix() -> str:
    """Return four random characters that make a machine's name unique."""
    return secrets.token_hex(2)
