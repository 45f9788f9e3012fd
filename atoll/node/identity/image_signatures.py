"""Signatures of container images and packs of code, for owners that run trusted ones only.

The signed text is `NAME@sha256:DIGEST` of a pinned image, or `code@sha256:DIGEST` of a pack, with
Ed25519. The digest fixes the content, so neither registry nor hub need be trusted. Command or
arguments, mounts and network of a job are not signed.
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
"""Prefix of a public key in a policy."""

_PINNED = re.compile(r"[^@\s]+@sha256:[0-9a-f]{64}")


def is_pinned(image: str) -> bool:
    """Return whether an image is named by the hash of its content."""
    return _PINNED.fullmatch(image) is not None


def make_key(path: Path) -> str:
    """Create a private key in a new file, readable by its owner only; return the public key.

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
    """Return the private key in a file; raises ConfigError if there is none."""
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
    """Return a key's line for `trusted_keys`."""
    raw = key.public_key().public_bytes(serialization.Encoding.Raw, serialization.PublicFormat.Raw)
    return PREFIX + base64.b64encode(raw).decode("ascii")


def sign_image(image: str, *, key: Ed25519PrivateKey) -> str:
    """Return the signature of an image, as base64; raises ConfigError if it is not pinned."""
    if not is_pinned(image):
        raise ConfigError(
            "an image that is not pinned cannot be signed",
            given=image,
            expected="NAME@sha256:DIGEST",
            remedy="docker image inspect --format '{{index .RepoDigests 0}}' NAME prints it",
        )
    return base64.b64encode(key.sign(image.encode("utf-8"))).decode("ascii")


def check_image(image: str, *, signature: str, trusted_keys: Sequence[str]) -> None:
    """Check that one of the trusted keys has signed an image.

    Raises:
        NotAllowed: it is not pinned, or has no signature of a trusted key.
        ConfigError: a trusted key is malformed.
    """
    remedy = "sign it with a key that the owner trusts: atoll sign image NAME@sha256:... --key FILE"
    if not is_pinned(image):
        raise NotAllowed(
            "this machine runs signed images only, and those are pinned",
            given=image,
            expected="NAME@sha256:DIGEST",
            remedy=remedy,
        )
    check_signature(image, signature=signature, trusted_keys=trusted_keys, remedy=remedy)


def pinned_code(code: str) -> str:
    """Return the text that is signed for a pack of code, given as `sha256:HEX` or HEX."""
    return f"code@sha256:{code.removeprefix('sha256:')}"


def check_signature(name: str, *, signature: str, trusted_keys: Sequence[str], remedy: str) -> None:
    """Check that one of the trusted keys has signed a pinned name; raises as `check_image`."""
    keys = [read_public(text) for text in trusted_keys]
    if not any(_signed(name, signature, key) for key in keys):
        raise NotAllowed(
            "this is not signed by a key that this machine's owner trusts",
            given=f"{name}, {'another signature' if signature else 'no signature'}",
            expected=f"a signature by one of {len(keys)} trusted keys"
            if keys
            else "a trusted key; the owner has listed none",
            remedy=remedy,
        )


def read_public(text: str) -> Ed25519PublicKey:
    """Parse a line of `trusted_keys`; raises ConfigError if it is malformed."""
    try:
        if not text.startswith(PREFIX):
            raise ValueError("it has another form")
        raw = base64.b64decode(text.removeprefix(PREFIX), validate=True)
        return Ed25519PublicKey.from_public_bytes(raw)
    except (ValueError, binascii.Error) as error:
        raise ConfigError(
            "a trusted key is not valid",
            given=f"{text} ({error})",
            expected=f"{PREFIX}BASE64, as `atoll sign key` prints it",
        ) from error


def _signed(image: str, signature: str, key: Ed25519PublicKey) -> bool:
    try:
        key.verify(base64.b64decode(signature, validate=True), image.encode("utf-8"))
    except (InvalidSignature, ValueError, binascii.Error):
        return False
    return True
