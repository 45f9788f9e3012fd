"""`hooks.toml`: whom the hub tells of alarms, and when.

Secrets stand in this file (the key of a webhook, the password of a mailbox), so it should be
readable by the hub's owner alone.
"""

from __future__ import annotations

import dataclasses
import logging
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from atoll.errors import ConfigError, unknown

log = logging.getLogger(__name__)

SEVERITIES = ("warning", "critical")


@dataclasses.dataclass(frozen=True, kw_only=True)
class NotifyTarget:
    """What every hook has: which alarms it is told of, and how often."""

    table: ClassVar[str] = ""

    min_severity: str = "warning"
    """`warning`: all alarms; `critical`: only those."""
    kinds: tuple[str, ...] = ()
    """Kinds of alarms, e.g. `straggler`; empty: all."""
    jobs: tuple[str, ...] = ()
    """Jobs; empty: all, and alarms about machines. `*` at the end stands for any rest."""
    ends: bool = True
    """Tell also when an alarm has ended."""
    pause_s: float = 60.0
    """Least time between two messages; what comes in between is told together."""
    timeout_s: float = 15.0
    """Longest time of one attempt."""
    attempts: int = 5
    """Attempts before a message is given up; the pauses between them double from one second."""

    @property
    def name(self) -> str:
        """What events call it; no secrets."""
        return self.table

    def check(self) -> None:
        """Raise ConfigError if a value is out of range."""
        if self.min_severity not in SEVERITIES:
            raise unknown("severity", self.min_severity, SEVERITIES)
        for option, least in (("pause_s", 0.0), ("timeout_s", 0.001), ("attempts", 1)):
            if not least <= getattr(self, option) <= 86_400:
                raise ConfigError(
                    f"{option} of a hook is out of range", given=getattr(self, option),
                    expected=f"{least} to 86400",
                )  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class Webhook(NotifyTarget):
    """POSTs JSON to an address."""

    table: ClassVar[str] = "webhook"

    url: str = ""
    secret: str = ""
    """Key of the signature in the header `X-Atoll-Signature`; empty: it is not signed."""

    @property
    def name(self) -> str:
        """Its host: the rest of the address may be a secret."""
        return f"webhook {self.url.partition('://')[2].partition('/')[0].rpartition('@')[2]}"

    def check(self) -> None:
        """Raise ConfigError if a value is out of range."""
        super().check()
        if not self.url.startswith(("http://", "https://")):
            raise ConfigError(
                "the url of a webhook cannot be used", given=self.url[:100] or "nothing",
                expected="http://... or https://...",
            )  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class Command(NotifyTarget):
    """Starts a program with the alarms as JSON on its standard input."""

    table: ClassVar[str] = "command"

    argv: tuple[str, ...] = ()
    """Program and arguments; no shell sees them."""

    @property
    def name(self) -> str:
        """Its program."""
        return f"command {Path(self.argv[0]).name}"

    def check(self) -> None:
        """Raise ConfigError if a value is out of range."""
        super().check()
        if not self.argv:
            raise ConfigError("a command hook needs argv", expected='argv = ["program", "..."]')


@dataclasses.dataclass(frozen=True, kw_only=True)
class Email(NotifyTarget):
    """Sends a message through an SMTP server."""

    table: ClassVar[str] = "email"

    host: str = ""
    port: int = 587
    starttls: bool = True
    """Encrypt before anything is said; only a server on this machine can do without."""
    user: str = ""
    password: str = ""
    ca: str = ""
    """PEM file of the authority to trust; empty: those of this machine."""
    sender: str = ""
    to: tuple[str, ...] = ()
    pause_s: float = 300.0

    @property
    def name(self) -> str:
        """Its server."""
        return f"email through {self.host}"

    def check(self) -> None:
        """Raise ConfigError if a value is out of range."""
        super().check()
        if not self.host or not self.to or not self.sender:
            raise ConfigError(
                "an email hook needs a server, a sender and somebody to send to",
                given=f"host {self.host!r}, sender {self.sender!r}, to {list(self.to)}",
            )
        if self.password and not self.starttls:
            raise ConfigError(
                "a password must not travel in the clear", given="starttls = false",
                remedy="leave starttls out, or the user and password",
            )  # fmt: skip


TABLES: dict[str, type[NotifyTarget]] = {kind.table: kind for kind in (Webhook, Command, Email)}


def load_targets(path: Path) -> list[NotifyTarget]:
    """Return the hooks of a file.

    Raises:
        ConfigError: the file is missing or wrong; the message names the table.
    """
    try:
        text = path.read_text(encoding="utf-8")
        tables = tomllib.loads(text)
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError("the file of hooks cannot be read", given=f"{path}: {error}") from error
    if path.stat().st_mode & 0o077:
        log.warning("%s may hold secrets and is readable by others: chmod 600 %s", path, path)
    hooks: list[NotifyTarget] = []
    for name, entries in tables.items():
        if name not in TABLES:
            raise unknown("table of hooks", name, list(TABLES))
        for entry in entries if isinstance(entries, list) else [entries]:
            if not isinstance(entry, Mapping):
                raise ConfigError("a hook is a table", given=name, expected=f"[[{name}]]")
            hooks.append(_made(TABLES[name], entry))
    return hooks


def _made(kind: type[NotifyTarget], entry: Mapping[str, Any]) -> NotifyTarget:
    """Return a hook from its table."""
    fields = {field.name: field for field in dataclasses.fields(kind)}
    values: dict[str, Any] = {}
    for name, value in entry.items():
        if name not in fields:
            raise unknown(f"option of a {kind.table} hook", name, list(fields))
        usual = fields[name].default
        if isinstance(usual, tuple):
            good = isinstance(value, list) and all(isinstance(text, str) for text in value)
            value = tuple(value) if good else value
        elif isinstance(usual, float):
            good = isinstance(value, int | float) and not isinstance(value, bool)
        else:
            good = type(value) is type(usual)
        if not good:
            raise ConfigError(
                f"{name} of a {kind.table} hook has the wrong type", given=repr(value)[:80],
                expected=type(usual).__name__.replace("tuple", "a list of texts"),
            )  # fmt: skip
        values[name] = value
    hook = kind(**values)
    hook.check()
    return hook
