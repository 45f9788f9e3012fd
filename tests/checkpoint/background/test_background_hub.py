"""Saving to a hub in the background: dead hubs, lost parts, killed writers, exactly one part."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from atoll.checkpoint import BackgroundSaver, HubStore, HubTarget, Saved
from atoll.errors import CheckpointCorrupt, HubError, HubUnreachable
from atoll.hub.app import HubOptions
from atoll.hub.quotas.disk import folder_bytes
from atoll.hub.quotas.limits import Quotas
from atoll.hub.server import HubServer
from atoll.net.line_use import LineUse
from atoll.net.proxies import hub_address
from atoll.wire.manifest import MANIFEST_NAME, checkpoint_folder
from atoll.wire.messages import CheckpointPart, Launch
from tests.checkpoint.savers import NAMES, WAIT_S, Events, killing, save
from tests.hub.membership import launches, registered
from tests.hub.peer import Peer, member, node, submit
from tests.patience import PROMPT_S


class Site:
    """A hub that can be stopped and started again, and a running job of one member."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.server: HubServer | None = None
        self.port = 0
        self.announced: list[CheckpointPart] = []
        self.troubles: list[HubError | CheckpointCorrupt] = []
        self._lock = threading.Lock()
        self.start()
        assert self.server is not None
        self.port = hub_address(self.server.url).port
        self.url: str = self.server.url
        self.agent: Peer = node(self.server, "box", slots=1)
        self.job: str = submit(self.server, nodes=1)
        self.launch: Launch = launches(self.agent, 1)["w0"]
        self.member: Peer = member(self.server, self.launch)
        registered(self.member)

    def start(self) -> None:
        options = HubOptions(
            data=self.folder / "data", jobs=self.folder / "runs", reducers=False, port=self.port
        )
        server = HubServer(options)
        server.__enter__()
        self.server = server  # not before it answers: somebody may be asking at this moment

    def stop(self) -> None:
        server, self.server = self.server, None
        if server is not None:
            server.__exit__(None, None, None)

    def publish(self, part: CheckpointPart) -> bool:
        """Announce a part as the member's session does."""
        with self._lock:
            if self.troubles:
                raise self.troubles.pop(0)
            if self.server is None or self.server.hub is None:
                raise HubUnreachable("no hub")
            for one in self.server.hub.rounds.runtimes.of(self.job):
                one.machine.committed_round = part.round
            done = self.server.call(self.server.hub.checkpoints.deliver(self.job, "w0", part))
            self.announced.append(part)
            return done

    def saver(
        self,
        events: Events | None = None,
        *,
        command: list[str] | None = None,
        retry_s: float = 30.0,
        moment: Callable[[str], None] = lambda name: None,
        line: str = "",
    ) -> BackgroundSaver:
        target = HubTarget(
            url=self.url, token=self.launch.token, job=self.job, retry_s=retry_s, line=line
        )
        extra = {"command": command} if command else {}
        return BackgroundSaver(
            target, scratch=self.folder / "scratch", publish=self.publish, on_event=events,
            moment=moment, **extra,
        )  # fmt: skip

    def published(self) -> int:
        """Return the newest round at the hub after reading every part of it."""
        scratch = self.folder / "reading"
        store = HubStore.reading(self.url, self.launch.token, self.job, scratch=scratch)
        round_ = store.latest()
        if round_ >= 0:
            for part in store.get(round_, names=NAMES).values():
                for tensor in part.tensors.values():
                    assert set(tensor.tolist()) == {float(round_)}
        store.close()
        return round_

    def place(self, round_: int) -> Path:
        return self.folder / "runs" / self.job / checkpoint_folder(round_)

    def close(self) -> None:
        self.member.close()
        self.agent.close()
        self.stop()


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    opened = Site(tmp_path)
    yield opened
    opened.close()


def test_checkpoint_and_parts_are_announced_once(site: Site) -> None:
    events = Events()
    saver = site.saver(events)
    for round_ in (1, 2):
        assert isinstance(save(saver, round_, elements=300_000, score=1.5), Saved)
        assert saver.wait(WAIT_S)
        assert site.published() == round_
    assert saver.close(WAIT_S)
    assert [part.name for part in site.announced] == ["w0.safetensors", "shared.safetensors"] * 2
    assert events.all == []


def test_an_upload_gives_way_to_an_exchange(site: Site) -> None:
    line = LineUse(site.folder / "line")
    saver = site.saver(line=str(site.folder / "line"))
    with line.exchange():
        assert isinstance(save(saver, 1, elements=300_000), Saved)
        assert not saver.wait(1.0)
        assert site.announced == []
    assert saver.close(WAIT_S)
    assert site.published() == 1
    line.close()


def test_writer_killed_during_an_upload_loses_nothing(site: Site) -> None:
    seen = []
    for point in range(40):
        mark = site.folder / f"mark{point}"
        saver = site.saver(command=killing(mark, point))
        save(saver, point + 1, elements=100_000)
        assert saver.close(WAIT_S)
        assert site.published() == point + 1
        if not mark.exists():
            break
        seen.append(mark.read_text())
    assert seen == [
        "w0.safetensors hashed", "w0.safetensors uploaded", "shared.safetensors hashed",
        "shared.safetensors uploaded", "written",
    ]  # fmt: skip


def test_hub_gets_the_checkpoint_when_it_is_back(site: Site) -> None:
    saver = site.saver()
    site.stop()
    began = time.monotonic()
    assert isinstance(save(saver, 1), Saved)
    assert time.monotonic() - began < PROMPT_S
    assert not saver.wait(0.3)
    site.start()
    assert saver.close(WAIT_S)
    assert site.published() == 1


def test_announcement_waits_for_a_dead_hub(site: Site) -> None:
    def moment(name: str) -> None:
        if name == "w0.safetensors delivered" and not died.is_set():
            died.set()
            site.stop()
            threading.Timer(0.3, site.start).start()

    died = threading.Event()
    saver = site.saver(moment=moment)
    save(saver, 1)
    assert saver.close(WAIT_S)
    assert died.is_set()
    assert site.published() == 1


def test_newer_checkpoint_replaces_one_that_waits(site: Site) -> None:
    saver = site.saver()
    site.stop()
    save(saver, 1)
    save(saver, 2, final=True)
    site.start()
    assert saver.close(WAIT_S)
    assert site.published() == 2
    assert {part.round for part in site.announced} <= {1, 2}


def test_hub_that_stays_dead_is_told_and_training_goes_on(site: Site) -> None:
    events = Events()
    saver = site.saver(events, retry_s=0.2)
    site.stop()
    save(saver, 1)
    assert not saver.wait(WAIT_S)
    assert "round 1 was not saved" in events.until("checkpoint-failed").text
    site.start()
    save(saver, 2)
    assert saver.close(WAIT_S)
    assert site.published() == 2


def test_announcement_is_repeated_until_the_hub_answers(site: Site) -> None:
    site.troubles = [HubUnreachable("gone"), HubUnreachable("gone")]
    saver = site.saver()
    save(saver, 1)
    assert saver.close(WAIT_S)
    assert site.published() == 1
    assert len(site.announced) == 2


def test_part_that_the_hub_lost_is_sent_again(site: Site) -> None:
    def moment(name: str) -> None:
        if name == "w0.safetensors delivered" and not lost.is_set():
            lost.set()
            (site.place(1) / "w0.safetensors").unlink()

    lost = threading.Event()
    saver = site.saver(moment=moment)
    save(saver, 1)
    assert saver.close(WAIT_S)
    assert site.published() == 1


def test_part_that_the_hub_never_finds_is_given_up_and_told(site: Site) -> None:
    events = Events()
    site.troubles = [CheckpointCorrupt("it is not what was announced")] * 9
    saver = site.saver(events)
    save(saver, 1)
    assert not saver.close(WAIT_S)
    assert "not what was announced" in events.until("checkpoint-failed").text


def test_checkpoint_above_the_quota_is_told_and_the_next_fits(site: Site) -> None:
    saver = site.saver()
    save(saver, 1, elements=20_000)
    assert saver.close(WAIT_S)
    server = site.server
    assert server is not None
    assert server.hub is not None
    ledger = server.hub.stores.ledger
    ledger.quotas = Quotas(job_disk=folder_bytes(site.place(1).parents[1]) + 30_000)
    events = Events()
    more = site.saver(events)
    save(more, 2, elements=200_000)
    assert not more.close(WAIT_S)
    text = events.until("checkpoint-failed").text
    assert f"job {site.job} has reached a limit" in text
    assert "atoll rm" in text
    assert site.published() == 1
    ledger.quotas = Quotas()
    again = site.saver()
    save(again, 2, elements=200_000)
    assert again.close(WAIT_S)
    assert site.published() == 2


def test_published_round_is_never_overwritten_with_another_state(site: Site) -> None:
    saver = site.saver()
    save(saver, 1)
    assert saver.close(WAIT_S)
    before = (site.place(1) / MANIFEST_NAME).read_bytes()
    events = Events()
    again = site.saver(events)
    save(again, 1, base="another")
    assert not again.close(WAIT_S)
    assert "published at the hub with another" in events.until("checkpoint-failed").text
    assert (site.place(1) / MANIFEST_NAME).read_bytes() == before
    assert site.published() == 1
