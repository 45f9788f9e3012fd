"""Signatures of container images: who trusts a key runs what its holder has signed, no more.

What is signed is the text `NAME@sha256:DIGEST` of a pinned image, with Ed25519. The digest names
one content for ever, so the signature needs no registry that is trusted. It says nothing about
the command, the mounts or the network of a job.
"""

from __future__ import annotations

import base64
import binascii
import os
import re
from collections.abc import Sequence
from pathlib import Path

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from atoll.errors import ConfigError, NotAllowed

PREFIX = "ed25519:"
"""How a public key in a policy starts."""

_PINNED = re.compile(r"[^@\s]+@sha256:[0-9a-f]{64}")


def is_pinned(image: str) -> bool:
    """Return whether an image is named by the hash of its content."""
    return _PINNED.fullmatch(image) is not None


def make_key(path: Path) -> str:
    """Make a private key in a new file that its owner alone can read; return the public key.

    Raises:
        ConfigError: the file exists, or cannot be written.
    """
    key = Ed25519PrivateKey.generate()
    text = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(text)
    except OSError as error:
        raise ConfigError(
            "the key cannot be written",
            given=f"{path} ({error.strerror or error})",
            expected="a new file in a folder that you may write to",
        ) from error
    return public_text(key)


def load_key(path: Path) -> Ed25519PrivateKey:
    """Return the private key in a file.

    Raises:
        ConfigError: there is none.
    """
    try:
        key = serialization.load_pem_private_key(path.read_bytes(), password=None)
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(
            "the key cannot be read",
            given=f"{path} ({error})",
            expected="a file that `atoll sign key` made",
        ) from error
    if not isinstance(key, Ed25519PrivateKey):
        raise ConfigError(
            "the key is of another kind", given=str(path), expected="an Ed25519 private key"
        )
    return key


def public_text(key: Ed25519PrivateKey) -> str:
    """Return the line for `trusted_keys` that stands for a key."""
    raw = key.public_key().public_bytes(serialization.Encoding.Raw, serialization.PublicFormat.Raw)
    return PREFIX + base64.b64encode(raw).decode("ascii")


def sign_image(image: str, *, key: Ed25519PrivateKey) -> str:
    """Return the signature of a pinned image, as base64.

    Raises:
        ConfigError: the image is not pinned, and so may change any time.
    """
    if not is_pinned(image):
        raise ConfigError(
            "an image that is not pinned cannot be signed",
            given=image,
            expected="NAME@sha256:DIGEST",
            remedy="docker image inspect --format '{{index .RepoDigests 0}}' NAME tells it",
        )
    return base64.b64encode(key.sign(image.encode("utf-8"))).decode("ascii")


def check_image(image: str, *, signature: str, trusted_keys: Sequence[str]) -> None:
    """Refuse an image that none of the trusted keys has signed.

    Raises:
        NotAllowed: it is not pinned, has no signature, or nobody trusted made the signature.
        ConfigError: a trusted key is none.
    """
    remedy = "sign it with a key that the owner trusts: atoll sign image NAME@sha256:... --key FILE"
    if not is_pinned(image):
        raise NotAllowed(
            "this machine runs signed images only, and those are pinned",
            given=image,
            expected="NAME@sha256:DIGEST",
            remedy=remedy,
        )
    keys = [read_public(text) for text in trusted_keys]
    if not any(_signed(image, signature, key) for key in keys):
        raise NotAllowed(
            "nobody whom this machine's owner trusts has signed the image",
            given=f"{image}, {'another signature' if signature else 'no signature'}",
            expected=f"a signature by one of {len(keys)} trusted keys"
            if keys
            else "a trusted key; the owner has listed none",
            remedy=remedy,
        )


def read_public(text: str) -> Ed25519PublicKey:
    """Return the public key that a line of `trusted_keys` stands for.

    Raises:
        ConfigError: it is none.
    """
    try:
        if not text.startswith(PREFIX):
            raise ValueError("it has another form")
        raw = base64.b64decode(text.removeprefix(PREFIX), validate=True)
        return Ed25519PublicKey.from_public_bytes(raw)
    except (ValueError, binascii.Error) as error:
        raise ConfigError(
            "a trusted key is no key",
            given=f"{text} ({error})",
            expected=f"{PREFIX}BASE64, as `atoll sign key` prints it",
        ) from error


def _signed(image: str, signature: str, key: Ed25519PublicKey) -> bool:
    try:
        key.verify(base64.b64decode(signature, validate=True), image.encode("utf-8"))
    except (InvalidSignature, ValueError, binascii.Error):
        return False
    return True
