"""`hooks.toml`: the targets of alarm notifications.

The file contains secrets (webhook key, mail password), so only its owner should be able to read it.
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
    """Options of every target: which alarms it gets, and how often."""

    table: ClassVar[str] = ""

    min_severity: str = "warning"
    """`warning`: all alarms; `critical`: only those."""
    kinds: tuple[str, ...] = ()
    """Kinds of alarms, e.g. `straggler`; empty: all."""
    jobs: tuple[str, ...] = ()
    """Jobs, with `*` at the end as a wildcard; empty: all, and alarms on nodes."""
    ends: bool = True
    pause_s: float = 60.0
    """Minimum interval of messages; alarms in between are combined."""
    timeout_s: float = 15.0
    attempts: int = 5
    """Attempts per message; the pause between them starts at one second and doubles."""

    @property
    def name(self) -> str:
        """Name in events; contains no secret."""
        return self.table

    def check(self) -> None:
        """Validate the values; raises ConfigError."""
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
    """Sends JSON by HTTP POST."""

    table: ClassVar[str] = "webhook"

    url: str = ""
    secret: str = ""
    """Key of the signature header `X-Atoll-Signature`; empty: not signed."""

    @property
    def name(self) -> str:
        """Host only, because the rest of the URL may be secret."""
        return f"webhook {self.url.partition('://')[2].partition('/')[0].rpartition('@')[2]}"

    def check(self) -> None:
        """Validate the values; raises ConfigError."""
        super().check()
        if not self.url.startswith(("http://", "https://")):
            raise ConfigError(
                "the url of a webhook cannot be used", given=self.url[:100] or "nothing",
                expected="http://... or https://...",
            )  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class Command(NotifyTarget):
    """Runs a program with the alarms as JSON on standard input."""

    table: ClassVar[str] = "command"

    argv: tuple[str, ...] = ()
    """Program and arguments; not run through a shell."""

    @property
    def name(self) -> str:
        """Program name."""
        return f"command {Path(self.argv[0]).name}"

    def check(self) -> None:
        """Validate the values; raises ConfigError."""
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
    """Use STARTTLS; switch it off only for a server on this machine."""
    user: str = ""
    password: str = ""
    ca: str = ""
    """PEM file of the authority to trust; empty: that of the system."""
    sender: str = ""
    to: tuple[str, ...] = ()
    pause_s: float = 300.0

    @property
    def name(self) -> str:
        """Server name."""
        return f"email through {self.host}"

    def check(self) -> None:
        """Validate the values; raises ConfigError."""
        super().check()
        if not self.host or not self.to or not self.sender:
            raise ConfigError(
                "an email hook needs a server, a sender and recipients",
                given=f"host {self.host!r}, sender {self.sender!r}, to {list(self.to)}",
            )
        if self.password and not self.starttls:
            raise ConfigError(
                "a password must not be sent unencrypted", given="starttls = false",
                remedy="leave starttls out, or the user and password",
            )  # fmt: skip


TABLES: dict[str, type[NotifyTarget]] = {kind.table: kind for kind in (Webhook, Command, Email)}


def load_targets(path: Path) -> list[NotifyTarget]:
    """Read the targets of a file; raises ConfigError, naming the table."""
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
