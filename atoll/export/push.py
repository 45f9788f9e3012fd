"""Upload of an exported folder to a hub that speaks the protocol of Hugging Face's."""

from __future__ import annotations

import re
from pathlib import Path

from atoll.errors import ConfigError, HubError

_NAME = re.compile(r"[\w.-]{1,96}/[\w.-]{1,96}")


def check_name(name: str) -> None:
    """Raise ConfigError unless it is OWNER/NAME."""
    if not _NAME.fullmatch(name):
        raise ConfigError(
            "this cannot be the name of a model", given=repr(name),
            expected="OWNER/NAME, e.g. ada/smollm2-docstrings",
        )  # fmt: skip


def push_folder(folder: Path, name: str, *, private: bool, message: str) -> str:
    """Upload a folder in one commit and return the address of the model.

    Uses the token and endpoint of `huggingface_hub`: HF_TOKEN or its login, HF_ENDPOINT.

    Args:
        folder: Its files, large ones included.
        name: OWNER/NAME; created if it does not exist.
        private: Whether a new one is private.
        message: Of the commit.

    Raises:
        ConfigError: the library is missing.
        HubError: the hub cannot be reached, or refuses.
    """
    try:
        from huggingface_hub import HfApi
        from huggingface_hub.errors import HfHubHTTPError
    except ImportError as error:
        raise ConfigError(
            "pushing needs a library that is not installed", given=str(error),
            expected="huggingface_hub", remedy="pip install 'atoll[hf]'",
        ) from error  # fmt: skip
    import httpx

    api = HfApi()
    try:
        url = api.create_repo(name, private=private, exist_ok=True)
        api.upload_folder(repo_id=name, folder_path=folder, commit_message=message)
    except (HfHubHTTPError, httpx.HTTPError, OSError) as error:
        said = " ".join(str(error).split())[:300]
        refused = getattr(getattr(error, "response", None), "status_code", None)
        login = "log in: hf auth login, or set HF_TOKEN to a token that may write"
        raise HubError(
            "the model hub did not take the model", given=f"{name} at {api.endpoint}: {said}",
            expected="a hub that can be reached, and the right to write there",
            remedy=login if refused in (401, 403) else "check HF_ENDPOINT and the network",
        ) from error  # fmt: skip
    return str(url)
