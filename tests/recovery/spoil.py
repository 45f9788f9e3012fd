"""Ways in which a donor's answers can be wrong, or late."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import msgspec

from atoll.recovery.http_server import Answerer
from atoll.wire.recovery_messages import (
    CHUNK,
    MANIFEST,
    OFFER,
    OK,
    StateAnswer,
    StateAsk,
    StateManifest,
    decode_state_manifest,
    encode_state_manifest,
)
from tests.patience import PATIENCE_S

Spoil = Callable[[Answerer], Answerer]


def chunks(change: Callable[[bytearray], bytes | bytearray]) -> Spoil:
    """Change the bytes of every chunk."""

    def spoil(answer: Answerer) -> Answerer:
        def wrong(ask: StateAsk) -> tuple[StateAnswer, memoryview]:
            given, body = answer(ask)
            if ask.kind == CHUNK and given.status == OK:
                body = memoryview(change(bytearray(body)))
            return given, body

        return wrong

    return spoil


def manifests(**changes: Any) -> Spoil:
    """Change fields of both manifests; the offer agrees with them."""

    def changed(body: memoryview) -> StateManifest:
        return msgspec.structs.replace(decode_state_manifest(body), **changes)

    def spoil(answer: Answerer) -> Answerer:
        def wrong(ask: StateAsk) -> tuple[StateAnswer, memoryview]:
            given, body = answer(ask)
            if given.status != OK or ask.kind == CHUNK:
                return given, body
            if ask.kind == MANIFEST:
                return given, memoryview(encode_state_manifest(changed(body)))
            images = []
            for image in given.images:
                _, body = answer(StateAsk(0, MANIFEST, ask.round, image.name, 0, 16))
                new = changed(body)
                size = len(encode_state_manifest(new))
                images.append(
                    msgspec.structs.replace(
                        image, nbytes=new.nbytes, root=new.root, manifest_bytes=size
                    )
                )
            return msgspec.structs.replace(given, images=images), memoryview(b"")

        return wrong

    return spoil


def answers(**changes: Any) -> Spoil:
    """Change fields of every good answer to an offer."""

    def spoil(answer: Answerer) -> Answerer:
        def wrong(ask: StateAsk) -> tuple[StateAnswer, memoryview]:
            given, body = answer(ask)
            if ask.kind == OFFER and given.status == OK:
                given = msgspec.structs.replace(given, **changes)
            return given, body

        return wrong

    return spoil


def together(number: int) -> Spoil:
    """Give no chunk before all of `number` donors have been asked for one."""
    barrier = threading.Barrier(number)

    def spoil(answer: Answerer) -> Answerer:
        passed = threading.Event()

        def late(ask: StateAsk) -> tuple[StateAnswer, memoryview]:
            if ask.kind == CHUNK and not passed.is_set():
                passed.set()
                barrier.wait(PATIENCE_S)
            return answer(ask)

        return late

    return spoil


def at_once(number: int) -> Spoil:
    """Answer nothing before all of `number` donors have been asked."""
    barrier = threading.Barrier(number)

    def spoil(answer: Answerer) -> Answerer:
        passed = threading.Event()

        def late(ask: StateAsk) -> tuple[StateAnswer, memoryview]:
            if not passed.is_set():
                passed.set()
                barrier.wait(PATIENCE_S)
            return answer(ask)

        return late

    return spoil


def slow(seconds: float) -> Spoil:
    """Take a while for every chunk."""
    never = threading.Event()

    def spoil(answer: Answerer) -> Answerer:
        def late(ask: StateAsk) -> tuple[StateAnswer, memoryview]:
            if ask.kind == CHUNK:
                never.wait(seconds)
            return answer(ask)

        return late

    return spoil


def after(happened: Callable[[], object], *, timeout_s: float = PATIENCE_S) -> Spoil:
    """Give no chunk before something has happened."""
    never = threading.Event()

    def spoil(answer: Answerer) -> Answerer:
        def late(ask: StateAsk) -> tuple[StateAnswer, memoryview]:
            until = time.monotonic() + timeout_s
            while ask.kind == CHUNK and not happened() and time.monotonic() < until:
                never.wait(0.01)
            return answer(ask)

        return late

    return spoil
