"""Queues of lines: dropped once shipped, also if the hub was away when the process ended."""

from __future__ import annotations

from atoll.node.agent.log_shipping import LogShipper
from atoll.wire.messages import Acked, LogLines
from tests.net.scripted import Peer, ScriptedHub, run
from tests.node.launchers.ordering import until

JOB = "job-1"


async def shipped(peer: Peer) -> LogLines:
    """Take the next lines and answer that they are durable."""
    pending, message = await peer.expect(LogLines)
    await peer.answer(pending, Acked(message.seq + len(message.lines) - 1))
    return message


def test_a_queue_is_dropped_when_the_hub_is_back() -> None:
    async def scenario() -> None:
        link, peer = await ScriptedHub().linked()
        shipper = LogShipper(link)
        shipper.open((JOB, "w0"))("the last line")
        await shipper.end((JOB, "w0"), timeout_s=0.0)
        assert len(shipper) == 1
        await shipped(peer)
        await until(lambda: len(shipper) == 0)
        await shipper.close(timeout_s=0.0)
        await link.close()

    run(scenario())


def test_a_newer_process_keeps_the_queue_of_an_ended_one() -> None:
    async def scenario() -> None:
        link, peer = await ScriptedHub().linked()
        shipper = LogShipper(link)
        shipper.open((JOB, "w0"))("the last line")
        await shipper.end((JOB, "w0"), timeout_s=0.0)
        add = shipper.open((JOB, "w0"))
        await shipped(peer)
        add("of the newer one")
        assert (await shipped(peer)).seq == 2
        assert len(shipper) == 1
        await shipper.close(timeout_s=0.0)
        await link.close()

    run(scenario())


def test_nothing_is_kept_of_members_that_have_ended() -> None:
    async def scenario() -> None:
        link, peer = await ScriptedHub().linked()
        shipper, ends = LogShipper(link), dict[str, int]()
        for member in ("w0", "w1", "w0", "w2", "w1"):
            shipper.open((JOB, member))("line")
            message = await shipped(peer)
            assert message.seq > ends.get(member, 0)
            ends[member] = message.seq + len(message.lines) - 1
            await shipper.end((JOB, member), timeout_s=5.0)
        kept = [value for value in vars(shipper).values() if isinstance(value, dict | set)]
        assert not any(kept)
        await link.close()

    run(scenario())
