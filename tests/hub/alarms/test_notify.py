"""Hooks: who is notified of which alarm, how often, and what a storm or a failure does."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from atoll.errors import ConfigError, HubError
from atoll.hub.alarms.notify import MOST_WAITING, Notifier, wanted
from atoll.hub.alarms.notify_config import Command, Email, NotifyTarget, Webhook, load_targets
from atoll.hub.alarms.notify_senders import PermanentFailure
from atoll.hub.alarms.watch import AlarmIntervals
from atoll.hub.app import HubOptions
from atoll.hub.server import HubServer
from tests.hub.alarms.notify_targets import WAIT_S, Web, alarm, run_hooks, until
from tests.hub.peer import node


def test_hooks_choose_by_severity_kind_and_job() -> None:
    assert wanted(Webhook(), alarm())
    assert not wanted(Webhook(min_severity="critical"), alarm())
    assert wanted(Webhook(min_severity="critical"), alarm(severity="critical"))
    assert not wanted(Webhook(kinds=("stale",)), alarm())
    assert wanted(Webhook(jobs=("j*",)), alarm())
    assert not wanted(Webhook(jobs=("other", "k*")), alarm())
    assert not wanted(Webhook(ends=False), alarm(ended=5.0))
    assert not wanted(Webhook(), alarm(silenced=True))


def test_a_storm_sends_few_messages_with_everything_in_them() -> None:
    sent: list[Mapping[str, Any]] = []
    took_s = 0.0

    async def note(hook: NotifyTarget, message: Mapping[str, Any]) -> None:
        sent.append(message)

    async def storm(hooks: Notifier) -> None:
        nonlocal took_s
        began = time.monotonic()
        for number in range(300):
            await hooks.tell(alarm(number))
            await asyncio.sleep(0.001)
        took_s = time.monotonic() - began
        await until(lambda: sum(len(message["alarms"]) for message in sent) == 300)

    run_hooks([Webhook(url="http://x", pause_s=0.4)], storm, note)
    assert 2 <= len(sent) <= 3 + took_s / 0.4


def test_excess_notifications_are_counted_newest_kept() -> None:
    sent: list[Mapping[str, Any]] = []

    async def note(hook: NotifyTarget, message: Mapping[str, Any]) -> None:
        sent.append(message)

    async def flood(hooks: Notifier) -> None:
        for number in range(MOST_WAITING + 5):
            await hooks.tell(alarm(number))
        await hooks.tell(alarm(MOST_WAITING + 4, ended=9.0))
        await until(lambda: sent)

    run_hooks([Webhook(url="http://x")], flood, note)
    assert sent[0]["left_out"] == 6
    assert len(sent[0]["alarms"]) == MOST_WAITING - 1, "an alarm that ended meanwhile is sent once"
    assert sent[0]["alarms"][-1]["ended"] == 9.0


def test_failing_hook_retries_then_becomes_an_event() -> None:
    tried: list[str] = []

    async def fail(hook: NotifyTarget, message: Mapping[str, Any]) -> None:
        tried.append(hook.name)
        if isinstance(hook, Webhook):
            raise HubError("no", given="status 503")

    async def work(hooks: Notifier) -> None:
        await hooks.tell(alarm())
        await until(lambda: len(tried) == 4)
        await asyncio.sleep(0.05)

    stored = run_hooks(
        [Webhook(url="http://u:p@x/secret", attempts=3), Command(argv=("b",))], work, fail
    )
    assert sorted(tried) == ["command b", "webhook x", "webhook x", "webhook x"]
    (text,) = stored.texts
    assert "webhook x: 1 alarms were not sent after 3 attempts" in text
    assert "secret" not in text


def test_what_is_refused_for_good_is_not_tried_again() -> None:
    tried: list[int] = []

    async def refuse(hook: NotifyTarget, message: Mapping[str, Any]) -> None:
        tried.append(1)
        raise PermanentFailure("status 404")

    async def work(hooks: Notifier) -> None:
        await hooks.tell(alarm())
        await until(lambda: tried)
        await asyncio.sleep(0.1)

    assert len(run_hooks([Webhook(url="http://x")], work, refuse).texts) == 1
    assert len(tried) == 1


def test_file_of_hooks_is_read_with_its_defaults(tmp_path: Path) -> None:
    path = tmp_path / "hooks.toml"
    path.write_text(
        '[[webhook]]\nurl = "https://example.org/h"\nkinds = ["stale"]\npause_s = 5\n'
        '[[command]]\nargv = ["notify-send", "atoll"]\nmin_severity = "critical"\n'
        '[[email]]\nhost = "mail"\nsender = "a@b.c"\nto = ["d@e.f"]\n'
    )
    path.chmod(0o600)
    hooks = load_targets(path)
    assert hooks == [
        Webhook(url="https://example.org/h", kinds=("stale",), pause_s=5),
        Command(argv=("notify-send", "atoll"), min_severity="critical"),
        Email(host="mail", sender="a@b.c", to=("d@e.f",)),
    ]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("nonsense", "cannot be read"),
        ("[[pigeon]]\n", "pigeon"),
        ('[[webhook]]\nurl = "ftp://x"\n', "url of a webhook"),
        ('[[webhook]]\nurl = "http://x"\nurls = []\n', "urls"),
        ('[[webhook]]\nurl = "http://x"\nkinds = "stale"\n', "wrong type"),
        ('[[webhook]]\nurl = "http://x"\nmin_severity = "loud"\n', "loud"),
        ('[[webhook]]\nurl = "http://x"\nattempts = 0\n', "attempts"),
        ("[[command]]\n", "argv"),
        ('[[email]]\nhost = "h"\n', "a sender"),
        (
            '[[email]]\nhost="h"\nsender="a"\nto=["b"]\nstarttls=false\npassword="x"\n',
            "unencrypted",
        ),
        ("webhook = 3\n", "a hook is a table"),
    ],
)
def test_file_that_is_wrong_says_what(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "hooks.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=words):
        load_targets(path)
    with pytest.raises(ConfigError, match="cannot be read"):
        load_targets(tmp_path / "missing.toml")


def test_a_hub_tells_its_hooks_of_an_alarm(tmp_path: Path, web: Web) -> None:
    """From a real machine of another version to a real web server, by a real hub."""
    path = tmp_path / "data" / "hooks.toml"
    path.parent.mkdir()
    path.write_text(f'[[webhook]]\nurl = "{web.url}"\nkinds = ["version-mismatch"]\n')
    path.chmod(0o600)
    alarm_intervals = AlarmIntervals(every_s=0.1, nodes_every=1, patience=0.02)
    options = HubOptions(
        data=tmp_path / "data",
        jobs=tmp_path / "jobs",
        reducers=False,
        alarm_intervals=alarm_intervals,
    )
    with HubServer(options) as hub, node(hub, "old-laptop"):
        deadline = time.monotonic() + WAIT_S
        while not web.came:
            assert time.monotonic() < deadline
            time.sleep(0.02)
    (sent,) = json.loads(web.came[0][1])["alarms"]
    assert (sent["kind"], sent["node"]) == ("version-mismatch", "old-laptop")
