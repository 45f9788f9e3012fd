"""Versions of a policy's weights, from trainers to those that sample with it.

A sender publishes patches (`atoll.codec.sparse.patches`) in a topic and now and then a whole
version; a receiver follows them. Both may be members of a job (`run.topic`) or programs without one
(`atoll.connect`), which only dial out. Each may be killed at any time: what is published is
durable, a new receiver begins at a whole version, and one that missed a patch waits for the next.

If all of them begin with the same weights, e.g. a published model, whole versions are patches, too,
relative to these weights. This makes large models feasible over slow links.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from atoll.codec.sparse.patches import about_patch, apply_patch, bits_of, digest_of, make_patch
from atoll.errors import ConfigError, WireError
from atoll.queues import Topic

WHOLE_EVERY = 10
"""Every so many versions are sent whole; the others as patches."""
SEND_S = 1800.0
"""Longest time until a version is durable: it may be large, and the line slow."""
_PATCH, _HEAD, _FROM_START = "patch", "head", "start"
_READ_MOST = 64
_PAUSE_S = 0.5


def sampling_weights(
    model: torch.nn.Module,
    dtype: torch.dtype = torch.bfloat16,
    *,
    only: Collection[str] | None = None,
) -> dict[str, Tensor]:
    """Return copies of a model's parameters and buffers as they are sampled with, on the processor.

    Tied weights are listed under their first name only.

    Args:
        model: The model.
        dtype: Of floating-point tensors.
        only: Names of the tensors that are wanted, e.g. adapters; None: all.
    """
    seen: set[int] = set()
    found = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in seen and (only is None or name in only):
            seen.add(id(tensor))
            kind = dtype if tensor.is_floating_point() else tensor.dtype
            found[name] = tensor.detach().to("cpu", kind, copy=True)
    return found


@dataclass(slots=True)
class WeightSender:
    """Publishes versions; for one thread at a time.

    A sender that was restarted publishes a whole version first.
    """

    topic: Topic
    whole_every: int = WHOLE_EVERY
    start: Mapping[str, Tensor] = field(default_factory=dict)
    """Weights that every receiver has, bit for bit: whole versions are sent as what differs from
    them. Empty: receivers have none."""
    sent_bytes: int = 0
    version: int = -1
    """Number of the last one."""
    digest: str = ""
    """SHA-256 of the last one."""
    _start_digest: str = ""
    _last: dict[str, Tensor] = field(default_factory=dict)
    _sent: int = 0
    """Versions that this sender has published."""
    _began: int = field(default_factory=time.time_ns)
    """Distinguishes its versions from those of an earlier sender with the same numbers."""

    def __post_init__(self) -> None:
        if self.whole_every < 1:
            raise ConfigError(
                "a receiver needs whole versions", given=f"whole_every = {self.whole_every}",
                expected="1 or more",
            )  # fmt: skip
        self._start_digest = digest_of(self.start) if self.start else ""

    def send(self, weights: Mapping[str, Tensor], *, version: int | None = None) -> int:
        """Publish a version; return the bytes that it took. It is durable then.

        Args:
            weights: As they are sampled with, e.g. of :func:`sampling_weights`; MUST not change.
            version: Its number, e.g. the step; None: the next one.

        Raises:
            ConfigError: the number is not greater than the last one.
        """
        number = self.version + 1 if version is None else version
        if number <= self.version:
            raise ConfigError("versions grow", given=number, expected=f"more than {self.version}")
        whole = self._sent % self.whole_every == 0
        digest = digest_of(weights)
        value: dict[str, Any]
        if whole and not self.start:
            value = _whole(weights, version=number, digest=digest)
        else:
            old, base = (self.start, self._start_digest) if whole else (self._last, self.digest)
            patch = make_patch(old, weights, version=number, base=base, digest=digest)
            value = {_PATCH: np.frombuffer(patch, dtype=np.uint8)}
            if whole:
                value[_FROM_START] = np.ones(1, dtype=np.uint8)
        nbytes = sum(int(array.nbytes) for array in value.values())
        self.topic.publish(value, key=f"{number}-{self._began:x}", timeout_s=SEND_S)
        self._last, self.version, self.digest = dict(weights), number, digest
        self._sent += 1
        self.sent_bytes += nbytes
        return nbytes


@dataclass(slots=True)
class WeightReceiver:
    """Follows the versions of a topic; for one thread at a time.

    `weights` is the newest version that is complete; empty: none has arrived yet.
    """

    topic: Topic
    reader: str
    start: dict[str, Tensor] = field(default_factory=dict)
    """Weights that the sender's `start` has, too."""
    weights: dict[str, Tensor] = field(default_factory=dict)
    version: int = -1
    digest: str = ""
    skipped: int = 0
    """Patches that did not fit what this receiver has."""
    received_bytes: int = 0
    _subscription: Any = None
    _start_digest: str = ""

    def __post_init__(self) -> None:
        self._start_digest = digest_of(self.start) if self.start else ""
        # A name of its own per process: a restarted one has no weights, and reads from the oldest.
        name = f"{self.reader}.{time.time_ns():x}"
        self._subscription = self.topic.subscribe(name, start="oldest")

    def receive(self, *, wait_s: float = 0.0) -> bool:
        """Take over everything that was published; return whether there is another version.

        Waits up to `wait_s` for it. Its number is lower if the sender went back to a saved state.

        Raises:
            WireError: a version is damaged, or its sender started from other weights.
        """
        deadline, before = time.monotonic() + wait_s, (self.version, self.digest)
        while True:
            left_s = max(0.0, deadline - time.monotonic())
            entries = self._subscription.read(_READ_MOST, wait_s=left_s)
            if entries:
                self._take([entry.value for entry in entries])
                self._subscription.ack(entries[-1])
                if len(entries) == _READ_MOST:
                    continue
            other = (self.version, self.digest) != before
            if other or time.monotonic() >= deadline:
                return other
            threading.Event().wait(min(_PAUSE_S, left_s) if not entries else 0.0)

    def _take(self, values: list[Any]) -> None:
        for value in values:
            self.received_bytes += sum(int(array.nbytes) for array in value.values())
            if _PATCH in value:
                self._patch(value[_PATCH].tobytes(), whole=_FROM_START in value)
            else:
                self._whole(value)

    def _patch(self, patch: bytes, *, whole: bool) -> None:
        about = about_patch(patch)
        if whole:
            if about.base != self._start_digest:
                raise WireError(
                    "the trainer started from other weights", given=about.base[:12],
                    expected=self._start_digest[:12] or "none: this receiver was given no start",
                    remedy="the same model, libraries and seed on every machine",
                )  # fmt: skip
            self.weights = apply_patch(self.start, patch, base=self._start_digest)
            self.version, self.digest = about.version, about.digest
            return
        if about.version <= self.version:
            return  # of a sender that was restarted: known already
        if not self.weights or about.base != self.digest:
            self.skipped += 1
            return
        self.weights = apply_patch(self.weights, patch, base=self.digest)
        self.version, self.digest = about.version, about.digest

    def _whole(self, value: Mapping[str, Any]) -> None:
        weights, version, digest = _read_whole(value)
        self.weights, self.version, self.digest = weights, version, digest


def _whole(weights: Mapping[str, Tensor], *, version: int, digest: str) -> dict[str, Any]:
    """Return a whole version as arrays: bit patterns by name, and a head."""
    header = {
        "version": version, "digest": digest,
        "tensors": {
            name: [str(tensor.dtype).removeprefix("torch."), list(tensor.shape)]
            for name, tensor in weights.items()
        },
    }  # fmt: skip
    head = np.frombuffer(json.dumps(header).encode(), dtype=np.uint8)
    return {f"w.{name}": bits_of(tensor) for name, tensor in weights.items()} | {_HEAD: head}


def _read_whole(value: Mapping[str, Any]) -> tuple[dict[str, Tensor], int, str]:
    """Return weights, version and digest; raises WireError if they are not the sender's."""
    try:
        header = json.loads(bytes(value[_HEAD]))
        weights = {}
        for name, (kind, shape) in header["tensors"].items():
            bits = np.array(value[f"w.{name}"])
            signed = bits.view(f"i{bits.itemsize}") if bits.itemsize > 1 else bits
            weights[name] = torch.from_numpy(signed).view(getattr(torch, kind)).reshape(shape)
        version, digest = int(header["version"]), str(header["digest"])
    except (KeyError, ValueError, TypeError, AttributeError, RuntimeError) as error:
        raise WireError("a version of the weights is damaged", given=str(error)[:200]) from error
    if digest_of(weights) != digest:
        raise WireError("a version of the weights is damaged", given="another digest")
    return weights, version, digest
