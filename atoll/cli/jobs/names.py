"""Find the job that a command names: in full, or by any prefix that no other job has."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from atoll.errors import ConfigError, JobError
from atoll.wire.states import JobState

if TYPE_CHECKING:
    from atoll.net.http.client import HubClient

NAMED_MOST = 5
"""Most names that a message lists."""

SPEC_NAME = "job.toml"
"""What makes a folder the folder of a job."""


def job_named(client: HubClient, prefix: str, *, live: bool = False) -> str:
    """Return the full name of a job of the hub.

    Args:
        client: The hub.
        prefix: Its name or a prefix of it; empty: the newest job.
        live: The command is for jobs that have not ended: of several with this prefix, the only
            one that has not.

    Raises:
        JobError: no job, or more than one, has this name.
        ConfigError: no name was entered, and the hub has none.
    """
    views = client.jobs(brief=True)
    if not prefix:
        return _newest(views, live=live)
    names = [str(view["job"]) for view in views]
    going = [str(view["job"]) for view in views if not JobState(view["state"]).ended]
    return full_name(prefix, names, preferred=going if live else ())


def jobs_named(prefixes: Sequence[str], names: Sequence[str]) -> list[str]:
    """Return full names, each once; raises as :func:`full_name`."""
    return list(dict.fromkeys(full_name(one, names) for one in prefixes))


def full_name(prefix: str, names: Iterable[str], *, preferred: Iterable[str] = ()) -> str:
    """Return the one name that equals `prefix` or begins with it.

    Args:
        prefix: What was entered.
        names: All names, the newest first.
        preferred: If several match and one of these does, that one is meant.

    Raises:
        JobError: none matches, or several do; the message lists them.
    """
    everything = list(names)
    if prefix in everything:
        return prefix
    matching = [name for name in everything if name.startswith(prefix)]
    if len(matching) > 1:
        matching = [name for name in preferred if name in matching] or matching
    if len(matching) == 1:
        return matching[0]
    if matching:
        raise JobError(
            f"{len(matching)} jobs begin with {prefix!r}",
            given=prefix,
            expected=listed(matching),
            remedy="type enough of the name to tell it from the others",
        )
    raise JobError(
        "there is no such job",
        given=repr(prefix),
        expected=listed(everything) if everything else "a job; the hub has none",
        remedy=did_you_mean(prefix, everything) or "`atoll status` lists all jobs",
    )


def listed(names: Sequence[str]) -> str:
    """Return some names for a message, and how many more there are."""
    more = len(names) - NAMED_MOST
    return ", ".join(names[:NAMED_MOST]) + (f" and {more} more" if more > 0 else "")


def did_you_mean(prefix: str, names: Sequence[str]) -> str:
    """Return the name that is most like what was typed, as a question; empty: none is like it."""
    size = len(prefix)  # what was typed may be the beginning of a name, with a letter missing
    lengths = {name[:end]: name for name in reversed(names) for end in (size, size + 1)}
    close = difflib.get_close_matches(prefix, [*lengths, *names], n=1)
    return f"did you mean {lengths.get(close[0], close[0])}?" if close else ""


def local_run(run: str, runs: Path) -> Path | None:
    """Return the folder of a run on this machine: `run` is a path, or a name or prefix in `runs`.

    Raises:
        JobError: several runs begin with it.
    """
    for folder in (Path(run), runs / run):
        if folder.is_dir():
            return folder if (folder / SPEC_NAME).exists() else None
    name = Path(run).name
    folder = runs if name == run else Path(run).parent
    found = sorted(path.parent.name for path in folder.glob(f"*/{SPEC_NAME}"))
    if not any(one.startswith(name) for one in found):
        return None
    return folder / full_name(name, reversed(found))


def _newest(views: Sequence[dict[str, Any]], *, live: bool) -> str:
    """Return the job that was submitted last; of those that have not ended, if there are any."""
    if not views:
        raise ConfigError(
            "the hub has no job", expected="a job", remedy="submit one with `atoll run`"
        )
    going = [view for view in views if live and not JobState(view["state"]).ended]
    return str((going or views)[0]["job"])
