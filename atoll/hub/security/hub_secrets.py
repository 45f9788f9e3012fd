"""The secrets that a hub makes at its first start, in a file that only its owner can read."""

from __future__ import annotations

from pathlib import Path

import msgspec

from atoll.errors import AuthError
from atoll.hub.security.certificates import write_secret
from atoll.ids import new_token

FILE = "secrets.json"


class HubSecrets(msgspec.Struct, frozen=True):
    """Contents of the file."""

    operator_token: str
    ticket: str
    limited: dict[str, str] = {}
    """Tickets of `--ticket-uses`, by number of uses; the same after every start."""
    members: str = msgspec.field(default_factory=new_token)
    """Members' keys are derived from it. Never rotated, because running jobs use those keys."""
    former: dict[str, float] = {}
    """SHA-256 of replaced operator tokens -> time at which they expire, seconds since 1970."""


def load_or_make(folder: Path) -> HubSecrets:
    """Return the secrets of a hub's folder, or new ones, which are not stored yet.

    Raises:
        AuthError: the file is damaged. New secrets would shut out owner and running members.
    """
    path = folder / FILE
    try:
        return msgspec.json.decode(path.read_bytes(), type=HubSecrets)
    except FileNotFoundError:
        return HubSecrets(operator_token=new_token(), ticket=new_token())
    except msgspec.DecodeError as error:
        raise AuthError(
            "the hub's secrets cannot be read",
            given=f"{path} ({error})",
            remedy="restore the file from a backup; if there is none, delete it: the hub then "
            "makes new secrets, and machines have to join again",
        ) from error


def save(folder: Path, secrets: HubSecrets) -> None:
    """Store the secrets, readable by their owner only."""
    write_secret(folder / FILE, msgspec.json.encode(secrets))
