"""What a member does at the end of its work while the hub's disk is full."""

from __future__ import annotations

import pytest

from atoll.errors import HubUnreachable, StorageFull
from atoll.group.connect import ROOM_POLL_S, when_there_is_room
from atoll.wire.job_messages import FOUND_ROOM, WAITS_FOR_ROOM


def test_trained_model_waits_for_room_and_is_stored() -> None:
    said: list[tuple[str, str]] = []
    slept: list[float] = []
    tries = iter([StorageFull("no room"), StorageFull("no room"), None])

    def put() -> None:
        error = next(tries)
        if error is not None:
            raise error

    when_there_is_room(put, tell=lambda *event: said.append(event), sleep=slept.append)
    assert slept == [ROOM_POLL_S] * 2
    waits = (WAITS_FOR_ROOM, "waits for room on the hub's disk: free some space there")
    # Reported at every try: a hub that was restarted meanwhile would not know it otherwise.
    assert said == [waits, waits, (FOUND_ROOM, "is stored: there is room again")]


def test_file_that_finds_room_at_once_is_not_told() -> None:
    said: list[tuple[str, str]] = []
    when_there_is_room(lambda: None, tell=lambda *event: said.append(event))
    assert said == []


def test_other_errors_of_an_upload_are_raised() -> None:
    def put() -> None:
        raise HubUnreachable("no hub answers")

    with pytest.raises(HubUnreachable):
        when_there_is_room(put, tell=print)
