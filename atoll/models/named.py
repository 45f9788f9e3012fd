"""Models that are named as a model hub names them: can they be had here?"""

from __future__ import annotations

import socket
from urllib.parse import urlsplit
from urllib.request import getproxies

from atoll.errors import DataError

CONNECT_S = 5.0
"""Longest wait for the hub; the library itself tries for most of a minute."""


def check_named(name: str, *, file: str = "config.json") -> None:
    """Refuse a model that is neither on this machine nor at a hub that can be reached.

    Args:
        name: As at the hub, e.g. `HuggingFaceTB/SmolLM2-135M`.
        file: A file of it that would be on this machine, had it been loaded before.

    Raises:
        DataError: says how to bring the files here.
    """
    from huggingface_hub import constants, try_to_load_from_cache

    if isinstance(try_to_load_from_cache(name, file), str):
        return
    place = urlsplit(constants.ENDPOINT)
    port = place.port or (443 if place.scheme == "https" else 80)
    why = "HF_HUB_OFFLINE is set" if constants.is_offline_mode() else ""
    if not why and place.scheme not in getproxies():  # a proxy knows more names than this machine
        try:
            socket.create_connection((place.hostname or "", port), timeout=CONNECT_S).close()
        except OSError as error:
            why = f"{place.hostname}:{port} cannot be reached ({error})"
    if why:
        raise DataError(
            "this model is not on this machine, and its hub cannot be asked",
            given=f"{name}: {why}",
            expected="a network, or a folder with the model's files, on every machine that trains",
            remedy=f"where there is a network: hf download {name} --local-dir FOLDER; then give "
            "that folder in place of the name (HF_ENDPOINT names another hub)",
        )
