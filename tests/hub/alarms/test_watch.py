"""A real hub looks at real sessions: alarms over REST, events, silence, and a restart."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from atoll import __version__
from atoll.errors import HubError, StorageFull
from atoll.hub.alarms.engine import Alarm, Changes, Finding, Rule
from atoll.hub.alarms.facts import Facts
from atoll.hub.alarms.watch import AlarmIntervals
from atoll.hub.app import HubOptions
from atoll.hub.server import HubServer
from atoll.wire.messages import Beat, MemberStats, NodeInfo
from tests.hub.membership import Running
from tests.hub.peer import Peer, node
from tests.hub.rounds.test_timeline import meet
from tests.patience import PATIENCE_S

WAIT_S = PATIENCE_S


def serve(folder: Path) -> HubServer:
    """Return a hub that looks more often than in real life, and believes at once."""
    alarm_intervals = AlarmIntervals(every_s=0.1, nodes_every=1, patience=0.02)
    return HubServer(
        HubOptions(
            data=folder / "data",
            jobs=folder / "jobs",
            reducers=False,
            reconnect_grace_s=0.3,
            alarm_intervals=alarm_intervals,
        )
    )


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[HubServer]:
    with serve(tmp_path) as server:
        yield server


def ask(hub: HubServer, path: str, **body: Any) -> Any:
    with httpx.Client(
        base_url=hub.url,
        headers={"authorization": f"Bearer {hub.operator_token}"},
        timeout=PATIENCE_S,
    ) as client:
        answer = client.post(path, json=body) if body else client.get(path)
        answer.raise_for_status()
        return answer.json()


def wait_for(condition: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + WAIT_S
    while not (found := condition()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return found


def alarm(hub: HubServer, kind: str, *, ended: bool = False) -> dict[str, Any]:
    """Wait for an alarm of a kind that is open, or has ended."""

    def look() -> dict[str, Any] | None:
        rows = ask(hub, "/api/alarms?all=1")
        return next(
            (r for r in rows if r["kind"] == kind and (r["ended"] is not None) == ended), None
        )

    found: dict[str, Any] = wait_for(look)
    return found


def beat(peer: Peer, *, skew_s: float, **stats: float) -> None:
    peer.tell(Beat(stats, time.time() + skew_s))


def test_wrong_clock_is_named_told_as_events_silenced_and_ends(hub: HubServer) -> None:
    with node(hub, "lap1") as peer:
        began = time.monotonic()
        beat(peer, skew_s=900.0)
        row = alarm(hub, "clock-skew")
        late_s = time.monotonic() - began  # the hub cannot tell it from a clock that is less ahead
        assert (row["node"], row["severity"]) == ("lap1", "critical")
        assert 900.0 - late_s - 1.0 < row["value"] < 901.0
        assert set(row) == {
            "id", "kind", "severity", "job", "node", "member", "cause", "remedy", "since",
            "ended", "value", "silenced",
        }  # fmt: skip
        silenced = ask(hub, f"/api/alarms/{row['id']}/silence", silenced=True)
        assert silenced["silenced"]
        (shown,) = [r for r in ask(hub, "/api/alarms") if r["kind"] == "clock-skew"]
        assert shown["silenced"]
        assert hub.hub is not None
        assert hub.hub.stores.alarms.open()[0]["id"] >= row["id"]
    ended = alarm(hub, "clock-skew", ended=True)
    assert ended["id"] == row["id"]
    texts = {e["kind"]: e["text"] for e in ask(hub, "/api/events")["events"]}
    assert texts["alarm"]
    assert any(
        e["kind"] == "alarm-ended" and "clock of lap1" in e["text"]
        for e in ask(hub, "/api/events")["events"]
    )


def test_silencing_what_is_not_there_says_so(hub: HubServer) -> None:
    with pytest.raises(httpx.HTTPStatusError, match="404"):
        ask(hub, "/api/alarms/999/silence", silenced=True)


def test_member_that_contributes_zeros_is_named_with_its_machine(hub: HubServer) -> None:
    group = Running(hub)
    for round_ in range(4):
        meet(group, round_, [MemberStats({}, 1.0, 2.0), MemberStats({}, 0.0, 2.0)])
    row = alarm(hub, "zero-contribution")
    assert (row["job"], row["member"]) == (group.job, "w1")
    assert row["node"] == group.agent.session
    group.close()


def test_machine_that_vanishes_is_told_until_it_is_back(
    hub: HubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("atoll.hub.alarms.machine_rules.LOST_S", 0.1)
    assert hub.hub is not None
    redeemed = hub.hub.stores.auth.redeem(hub.ticket.rpartition("/")[2], name="lap9")
    name, token = hub.call(redeemed)
    info = NodeInfo("box", "Linux", "3.11", __version__)
    Peer(hub, name, token=token, info=info).cut()
    assert alarm(hub, "node-lost")["node"] == name
    with Peer(hub, name, token=token, incarnation="i2", info=info):
        assert alarm(hub, "node-lost", ended=True)["node"] == name
        assert [r["kind"] for r in ask(hub, "/api/alarms?all=1")] == ["node-lost"]


def test_open_alarms_outlive_the_hub(tmp_path: Path) -> None:
    with serve(tmp_path) as first, node(first, "lap1"):
        before = alarm(first, "version-mismatch")
    with serve(tmp_path) as second:
        rows = ask(second, "/api/alarms?all=1")
        assert [r["id"] for r in rows if r["kind"] == "version-mismatch"] == [before["id"]]


def test_rule_that_fails_blinds_no_other(hub: HubServer) -> None:
    def broken(facts: Facts) -> list[Finding]:
        raise RuntimeError("a bug")

    assert hub.hub is not None
    wrong = Rule(kind="loss-flat", find=broken, holds_s=0, gone_s=0)
    hub.hub.watch._rules.insert(0, wrong)
    with node(hub, "lap1"):
        assert alarm(hub, "version-mismatch")["node"] == "lap1"


def test_queues_that_cannot_be_read_blind_no_other_rule(
    hub: HubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def away() -> Any:
        raise HubError("the server of the queues is away")

    assert hub.hub is not None
    monkeypatch.setattr(hub.hub.stores.queue, "rows", away)
    with node(hub, "lap1"):
        assert alarm(hub, "version-mismatch")["node"] == "lap1"


def test_many_machines_that_are_wrong_at_once_are_all_told(hub: HubServer) -> None:
    names = {f"old{number}" for number in range(12)}
    peers = [node(hub, name) for name in names]

    def named(rows: list[dict[str, Any]]) -> list[str]:  # a busy machine may raise others too
        return [row["node"] for row in rows if row["kind"] == "version-mismatch"]

    wait_for(lambda: set(named(ask(hub, "/api/alarms"))) == names)
    assert len(named(ask(hub, "/api/alarms?all=1"))) == len(names)
    texts = [e["text"] for e in ask(hub, "/api/events")["events"] if e["kind"] == "alarm"]
    for name in names:
        assert sum(f"{name} " in text for text in texts) == 1, (name, sorted(texts))
    for peer in peers:
        peer.close()


def test_alarm_of_a_full_disk_is_told_when_there_is_room(
    hub: HubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert hub.hub is not None
    alarms = hub.hub.stores.alarms
    keep, refused = alarms.keep, 0

    async def full(changes: Changes) -> Changes:
        nonlocal refused
        if refused < 3:
            refused += 1
            raise StorageFull("no space is left")
        return await keep(changes)

    monkeypatch.setattr(alarms, "keep", full)
    with node(hub, "lap1") as peer:
        beat(peer, skew_s=90.0)
        assert alarm(hub, "clock-skew")["node"] == "lap1"
        assert refused == 3


def test_silence_and_an_update_at_once_are_both_kept(
    hub: HubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert hub.hub is not None
    alarms, database = hub.hub.stores.alarms, hub.hub.stores.database
    write = database.write
    finding = Finding(kind="straggler", cause="before", remedy="r")

    async def at_once(*, first: str) -> list[dict[str, Any]]:
        begun = asyncio.Event()

        async def slowly(work: Callable[..., Any]) -> Any:
            done = await write(work)
            if not begun.is_set():
                begun.set()
                await asyncio.sleep(0.1)
            return done

        (kept,) = (await alarms.keep(Changes([Alarm(0, finding, 1.0, 1.0)]))).opened
        worse = replace(kept, finding=replace(finding, cause="worse"))
        monkeypatch.setattr(database, "write", slowly)
        ways = {"keep": alarms.keep(Changes(updated=[worse])),
                "silence": alarms.silence(kept.id, silenced=True)}  # fmt: skip
        running = asyncio.ensure_future(ways.pop(first))
        await begun.wait()
        await asyncio.gather(running, *ways.values())
        monkeypatch.setattr(database, "write", write)
        return [row for row in alarms.open() if row["kind"] == finding.kind]

    for first in ("keep", "silence"):
        (row,) = hub.call(at_once(first=first))
        assert (row["cause"], row["silenced"]) == ("worse", True)
