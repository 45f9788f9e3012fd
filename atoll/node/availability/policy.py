"""The policy of a machine's owner: how much the cluster may use, and when.

File `node.toml`:

  cores = 4                         # at most
  memory_gb = 8
  upload_mbps = 20
  kinds = ["trainer", "container"]  # no scripts of other people
  device = "cpu"                    # the accelerator stays the owner's
  quiet_hours = ["mon-fri 09:00-17:00"]
  pause_on_battery = true

Every key is also an option of `atoll join`, which overrides the file. The file is read again when
it changes; while it is invalid the previous policy stays in force.
"""

from __future__ import annotations

import dataclasses
import logging
import re
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any

from atoll import config
from atoll.config.constraints import AUTO_DEVICE, CPU_DEVICE, DeviceSetting, one_of
from atoll.errors import AtollError, ConfigError, unknown
from atoll.node.availability.quiet_hours import parse_quiet_hours
from atoll.wire.messages import Offer
from atoll.wire.session_messages import KINDS

log = logging.getLogger(__name__)

FILE = "node.toml"
"""Name of the policy file in the home of a node."""

SIGNED = "signed"
"""Kind of containers and scripts with an image or code signed by one of the owner's keys."""

GB = 10**9
MBPS = 1e6

LEAST_MBPS = 0.5
"""Below this one chunk of a tensor takes so long that the session would be considered dead."""

_ONE_OR_MANY = ("kinds", "labels", "readable", "mounts", "trusted_keys", "quiet_hours")
"""Keys that accept a string instead of a list."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class OwnerPolicy:
    """Limits set by a machine's owner. Zero: no limit."""

    cores: float = 0.0
    """For all work together."""
    memory_gb: float = 0.0
    """GB (10^9 bytes) for all work together."""
    disk_gb: float = 0.0
    """GB for all work together."""
    upload_mbps: float = 0.0
    """Megabits per second to the hub, for each process."""
    download_mbps: float = 0.0
    """Megabits per second from the hub, for each process."""
    device: DeviceSetting = "auto"
    """Device of the work: `auto` (what is there), `cpu` (the accelerator stays the owner's), or one
    of several, e.g. `cuda:1`. It overrides a job's `[job] device`, unless that is `cpu`."""
    nice: int = 0
    """Niceness of the work, 0 to 19; higher yields more to the owner."""
    kinds: list[str] = dataclasses.field(default_factory=lambda: list(KINDS))
    """Kinds of job: `trainer`, `rl`, `script`, `command`, `container`, `signed`."""
    sandbox: Annotated[str, one_of("off", "on")] = "off"
    """`on`: processes of jobs see the system, Python, `readable` and their own folder, nothing else
    of this machine's files and processes. Linux with Landlock."""
    readable: list[str] = dataclasses.field(default_factory=list)
    """With `sandbox`: further folders that processes of jobs may read, e.g. data."""
    network: Annotated[str, one_of("hub", "open")] = "hub"
    """With `sandbox`: what processes of jobs reach, their hub alone or everything."""
    labels: list[str] = dataclasses.field(default_factory=list)
    """Words that jobs can require in `[needs]`."""
    mounts: list[str] = dataclasses.field(default_factory=list)
    """Host folders that containers may mount."""
    trusted_keys: list[str] = dataclasses.field(default_factory=list)
    """Public keys (base64) of signatures that make an image or code `signed`."""
    quiet_hours: list[str] = dataclasses.field(default_factory=list)
    """Hours without work, e.g. `22:00-07:00` or `mon-fri 09:00-17:00`, in local time."""
    pause_on_battery: bool = False
    battery_percent: float = 100.0
    """With `pause_on_battery`: only while the charge is at or below this."""
    pause_on_metered: bool = False
    """Pause on a network that is paid by volume."""
    pause_when_active: float = 0.0
    """Pause until the machine has been idle for so many minutes."""
    pause_on_lid_close: bool = True
    """Pause while the lid is closed and no other screen is attached."""
    pause_on_sleep: bool = True
    """Return work before the machine sleeps."""

    def offer(self, *, paused: str = "") -> Offer:
        """Return the offer sent to the hub; `paused` says why it takes no work now."""
        return Offer(
            cores=self.cores,
            memory_bytes=round(self.memory_gb * GB),
            disk_bytes=round(self.disk_gb * GB),
            upload_bps=self.upload_mbps * MBPS,
            download_bps=self.download_mbps * MBPS,
            kinds=self.kinds,
            mounts=self.mounts,
            labels=self.labels,
            device=self.device,
            text=describe_policy(self),
            paused=paused,
        )

    @property
    def capped(self) -> bool:
        """Whether the bandwidth is limited."""
        return bool(self.upload_mbps or self.download_mbps)


def describe_policy(policy: OwnerPolicy) -> list[str]:
    """Return the policy for people, one line each; empty if nothing is limited."""
    limits = (
        (policy.cores, f"{policy.cores:g} cores"),
        (policy.memory_gb, f"{policy.memory_gb:g} GB of memory"),
        (policy.disk_gb, f"{policy.disk_gb:g} GB of disk"),
        (policy.upload_mbps, f"{policy.upload_mbps:g} Mbit/s up"),
        (policy.download_mbps, f"{policy.download_mbps:g} Mbit/s down"),
    )
    lines = [f"at most {text}" for value, text in limits if value]
    if policy.device != AUTO_DEVICE:
        kept = policy.device == CPU_DEVICE
        lines.append("no work on the accelerator" if kept else f"computes on {policy.device} only")
    if policy.nice:
        lines.append(f"work runs at niceness {policy.nice}")
    if set(policy.kinds) != set(KINDS):
        lines.append("runs only: " + (", ".join(policy.kinds) or "nothing"))
    if policy.sandbox == "on":
        opened = f", which read {', '.join(policy.readable)}" * bool(policy.readable)
        reach = "which reach their hub only" if policy.network == "hub" else "with any network"
        lines.append(f"a sandbox for processes of jobs, {reach}{opened}")
    if policy.mounts:
        lines.append("containers may mount " + ", ".join(policy.mounts))
    if policy.labels:
        lines.append("labels: " + ", ".join(policy.labels))
    return lines + _pauses(policy)


def _pauses(policy: OwnerPolicy) -> list[str]:
    """Return when it takes no work, except for sleep and lid, which are the defaults."""
    lines = [f"no work {span}" for span in policy.quiet_hours]
    if policy.pause_on_battery:
        low = policy.battery_percent < 100
        lines.append("no work on battery" + (f" at or below {policy.battery_percent:g} %" * low))
    if policy.pause_on_metered:
        lines.append("no work on a metered network")
    if policy.pause_when_active:
        lines.append(f"no work until idle for {policy.pause_when_active:g} minutes")
    return lines


def read_policy(
    text: str, *, name: str = FILE, options: Mapping[str, Any] | None = None
) -> OwnerPolicy:
    """Return the policy from TOML text and options, which take precedence unless None.

    Raises:
        ConfigError: names the key, its line, and the nearest known key.
    """
    try:
        given = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{name} is not valid TOML", given=str(error)) from error
    from_file = _policy_of(given, text=text, name=name)
    chosen = {key: value for key, value in (options or {}).items() if value is not None}
    from_options = _policy_of(chosen, text="", name="the options")
    changes = {key: getattr(from_options, key) for key in chosen}
    policy = dataclasses.replace(from_file, **changes)
    if policy.kinds == [SIGNED] and not policy.trusted_keys:
        raise ConfigError(
            f"{name} allows no job",
            given=f'kinds = ["{SIGNED}"] without trusted_keys',
            expected="the public keys of trusted signers",
            remedy="make one: atoll sign key NAME",
        )
    return policy


def _policy_of(given: Mapping[str, Any], *, text: str, name: str) -> OwnerPolicy:
    values: dict[str, Any] = {}
    known = [field.name for field in dataclasses.fields(OwnerPolicy)]
    for key, value in given.items():
        where = f"{name}, line {_line_of(key, text)}" if text else name
        if key not in known:
            raise unknown(f"key in {where}", key, known)
        if key in _ONE_OR_MANY and isinstance(value, str):
            value = [value]
        part = config.read_table(OwnerPolicy, {key: value}, where=where)
        _check(part, key, where=where)
        values[key] = getattr(part, key)
    return OwnerPolicy(**values)


def _check(policy: OwnerPolicy, key: str, *, where: str) -> None:
    value = getattr(policy, key)
    if key == "kinds":
        for kind in value:
            if kind not in (*KINDS, SIGNED):
                raise unknown(f"kind of job in {where}", kind, (*KINDS, SIGNED))
    elif key in _PARSERS:
        for text in value:
            try:
                _PARSERS[key](text)
            except ConfigError as error:
                raise ConfigError(
                    f"{key} in {where} cannot be read", given=error.given, expected=error.expected
                ) from error
    elif isinstance(value, int | float) and not isinstance(value, bool):
        low, high, words = _RANGES.get(key, (0.0, _MOST, "a number above 0, or 0 for no limit"))
        unlimited = value == 0 and key in ("upload_mbps", "download_mbps")
        if not unlimited and not low <= value <= high:
            raise ConfigError(f"{key} in {where} is out of range", given=value, expected=words)


def _parse_key(text: str) -> object:
    """Parse a trusted key; imported lazily, because few owners use any."""
    from atoll.node.identity.image_signatures import read_public

    return read_public(text)


_PARSERS: dict[str, Callable[[str], object]] = {
    "quiet_hours": parse_quiet_hours,
    "trusted_keys": _parse_key,
}

_MOST = 1e12
"""Excludes infinity."""

_RANGES = {
    "nice": (0.0, 19.0, "0 to 19"),
    "battery_percent": (1.0, 100.0, "1 to 100"),
    "upload_mbps": (LEAST_MBPS, _MOST, f"at least {LEAST_MBPS:g}, or 0 for no limit"),
    "download_mbps": (LEAST_MBPS, _MOST, f"at least {LEAST_MBPS:g}, or 0 for no limit"),
}
"""Minimum, maximum, and their description."""


def _line_of(key: str, text: str) -> int:
    """Return the line on which a key of TOML text is set; 1 if it is not found."""
    pattern = re.compile(rf"""\s*\[*\s*["']?{re.escape(key)}["']?\s*[.=\]]""")
    for number, line in enumerate(text.splitlines(), start=1):
        if pattern.match(line):
            return number
    return 1


class OwnerPolicyFile:
    """A policy file, with the options that override it."""

    def __init__(
        self, path: Path, *, options: Mapping[str, Any] | None = None, needed: bool = False
    ) -> None:
        """Prepare to read `path`; with `needed` the file must exist."""
        self.path = path
        self._options = dict(options or {})
        self._needed = needed
        self._stamp: object = None
        self._policy: OwnerPolicy | None = None
        self.error = ""
        """Error in the current file, while an older policy is in force."""

    def read(self) -> OwnerPolicy:
        """Return the policy; reads the file again if it has changed.

        Raises:
            ConfigError: the first reading failed. Later errors are kept in `error`.
        """
        stamp = self._stamp_now()
        if self._policy is not None and stamp == self._stamp:
            return self._policy
        self._stamp = stamp
        try:
            policy = read_policy(self._text(), name=str(self.path), options=self._options)
        except AtollError as error:
            if self._policy is None:
                raise
            self.error = str(error)
            log.error("the policy stays as it was: %s", error)
            return self._policy
        if self._policy is not None and policy != self._policy:
            log.info(
                "the policy has changed: %s", "; ".join(describe_policy(policy)) or "no limits"
            )
        self._policy, self.error = policy, ""
        return policy

    def _stamp_now(self) -> object:
        try:
            found = self.path.stat()
        except OSError:
            return "absent"
        return found.st_mtime_ns, found.st_size, found.st_ino

    def _text(self) -> str:
        try:
            return self.path.read_text(encoding="utf-8")
        except FileNotFoundError:
            if not self._needed:
                return ""
            raise ConfigError(
                "the policy file does not exist", given=str(self.path), expected="a TOML file"
            ) from None
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(
                "the policy cannot be read", given=f"{self.path} ({error})", expected="a TOML file"
            ) from error
