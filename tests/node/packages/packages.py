"""Packages as pip installs them, made without tools and without a network."""

from __future__ import annotations

import io
import zipfile


def wheel(name: str, version: str = "1.0", *, text: str = "here") -> bytes:
    """Return a package of one module as a wheel."""
    info = f"{name}-{version}.dist-info"
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr(f"{name}.py", f"TEXT = {text!r}\n")
        metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        archive.writestr(f"{info}/METADATA", metadata)
        tags = "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        archive.writestr(f"{info}/WHEEL", tags)
        archive.writestr(f"{info}/RECORD", "")
    return buffer.getvalue()
