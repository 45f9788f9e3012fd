"""The format in which a state is handed over: a hub checks its digests without torch.

First one line of JSON, `{"model": BYTES}`, then so many bytes of the model's vector (float32,
parameters and then floating-point buffers), then the own part: one line of JSON, and the bytes of
its tensors (see `train/verification/own_part.py`).
"""

from __future__ import annotations

import json
from pathlib import Path

from atoll.digest import Digest
from atoll.errors import WireError

LINE_BYTES = 4096
CHUNK_BYTES = 1 << 20


def heading(model_bytes: int) -> bytes:
    """Return the first line of a state whose model's vector has so many bytes."""
    return json.dumps({"model": model_bytes}).encode() + b"\n"


def read_heading(line: bytes) -> int:
    """Return the length of the model's vector from a state's first line; raises WireError."""
    try:
        size = json.loads(line)["model"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise WireError("this is not a state", given=repr(line[:80])) from error
    if not isinstance(size, int) or isinstance(size, bool) or size < 0 or not line.endswith(b"\n"):
        raise WireError("this is not a state", given=repr(line[:80]))
    return size


def digests_of(path: Path) -> tuple[str, str]:
    """Return the digests of a state file's model and of its own part.

    Raises:
        WireError: it is no state, or is cut off within the model.
        OSError: it cannot be read.
    """
    model, own = (Digest() for _ in range(2))
    with path.open("rb") as file:
        left = read_heading(file.readline(LINE_BYTES))
        while left:
            chunk = file.read(min(left, CHUNK_BYTES))
            if not chunk:
                raise WireError("this state is cut off", given=f"{left} bytes are missing")
            model.update(chunk)
            left -= len(chunk)
        while chunk := file.read(CHUNK_BYTES):
            own.update(chunk)
    return model.hexdigest(), own.hexdigest()
