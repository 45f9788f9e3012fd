"""What every queue promises; each backend inherits this suite and says how to open one."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from atoll.clock import VirtualClock
from atoll.errors import HubError
from atoll.hub.queues.backend import MAX_CLAIM_BYTES
from atoll.hub.queues.queues import QueueDepth, Queues
from atoll.wire.messages import QueueEntry
from tests.contracts.queue_base import BOUND_S, LEASE_S, MAX_ATTEMPTS, OPTIONS, QueueBase
from tests.tiers import examples


class QueueContract(QueueBase):
    """What holds for every queue, whatever its options."""

    def test_items_come_in_the_order_in_which_they_were_put(self) -> None:
        async def test(queue: Queues) -> None:
            for key in "abc":
                await queue.put("q", key=key, payload=key.encode())
            items = await queue.claim("q", lease_s=LEASE_S, limit=10)
            assert [(i.key, i.payload, i.attempt) for i in items] == [
                ("a", b"a", 1),
                ("b", b"b", 1),
                ("c", b"c", 1),
            ]

        self.with_queue(test)

    def test_the_same_key_is_stored_once_even_after_it_is_done(self) -> None:
        async def test(queue: Queues) -> None:
            first = await queue.put("q", key="a", payload=b"1")
            again = await queue.put("q", key="a", payload=b"2")
            assert (again.seq, again.duplicate, first.duplicate) == (first.seq, True, False)
            (item,) = await queue.claim("q", lease_s=LEASE_S, limit=10)
            assert item.payload == b"1"
            await queue.ack("q", lease=item.lease)
            assert (await queue.put("q", key="a", payload=b"3")).duplicate
            assert await queue.claim("q", lease_s=LEASE_S) == []

        self.with_queue(test)

    def test_queues_do_not_mix(self) -> None:
        async def test(queue: Queues) -> None:
            await queue.put("q", key="a", payload=b"")
            await queue.put("r", key="a", payload=b"")
            (item,) = await queue.claim("r", lease_s=LEASE_S, limit=10)
            with pytest.raises(HubError, match="not held"):
                await queue.ack("q", lease=item.lease)
            assert await queue.depths() == {"q": QueueDepth(ready=1), "r": QueueDepth(leased=1)}

        self.with_queue(test)

    def test_leased_item_is_not_delivered_again_before_its_end(self) -> None:
        async def test(queue: Queues) -> None:
            await queue.put("q", key="a", payload=b"")
            (first,) = await queue.claim("q", lease_s=LEASE_S)
            self.clock.advance(LEASE_S - 0.1)
            assert await queue.claim("q", lease_s=LEASE_S) == []
            self.clock.advance(0.2)
            (second,) = await queue.claim("q", lease_s=LEASE_S)
            assert (second.key, second.attempt) == ("a", 2)
            with pytest.raises(HubError, match="not held"):
                await queue.ack("q", lease=first.lease)
            await queue.ack("q", lease=second.lease)

        self.with_queue(test)

    def test_an_extended_lease_ends_later(self) -> None:
        async def test(queue: Queues) -> None:
            await queue.put("q", key="a", payload=b"")
            (item,) = await queue.claim("q", lease_s=LEASE_S)
            self.clock.advance(LEASE_S - 1)
            await queue.extend("q", lease=item.lease, lease_s=LEASE_S)
            self.clock.advance(LEASE_S - 1)
            assert await queue.expire() == 0
            self.clock.advance(2)
            assert await queue.expire() == 1
            with pytest.raises(HubError, match="not held"):
                await queue.extend("q", lease=item.lease, lease_s=LEASE_S)

        self.with_queue(test)

    def test_late_ack_counts_if_the_item_was_not_redelivered(self) -> None:
        async def test(queue: Queues) -> None:
            await queue.put("q", key="a", payload=b"")
            (item,) = await queue.claim("q", lease_s=LEASE_S)
            self.clock.advance(LEASE_S + 1)
            await queue.expire()
            await queue.ack("q", lease=item.lease)
            assert await queue.claim("q", lease_s=LEASE_S) == []

        self.with_queue(test)

    def test_acks_and_releases_sent_again_change_nothing(self) -> None:
        async def test(queue: Queues) -> None:
            for key in "ab":
                await queue.put("q", key=key, payload=b"")
            a, b = await queue.claim("q", lease_s=LEASE_S, limit=2)
            for _ in range(2):
                await queue.ack("q", lease=a.lease)
                await queue.release("q", lease=b.lease)
            await queue.release("q", lease=a.lease)
            assert await queue.depths() == {"q": QueueDepth(ready=1)}

        self.with_queue(test)

    def test_a_claim_asked_again_gets_the_same_leases(self) -> None:
        async def test(queue: Queues) -> None:
            for key in "abc":
                await queue.put("q", key=key, payload=b"")
            first = await queue.claim("q", lease_s=LEASE_S, limit=2, request="n/1")
            assert await queue.claim("q", lease_s=LEASE_S, limit=2, request="n/1") == first
            other = await queue.claim("q", lease_s=LEASE_S, limit=2, request="n/2")
            assert [item.key for item in other] == ["c"]

        self.with_queue(test)

    def test_an_item_given_back_too_often_becomes_a_dead_letter(self) -> None:
        async def test(queue: Queues) -> None:
            await queue.put("q", key="bad", payload=b"x")
            await queue.put("q", key="good", payload=b"y")
            for attempt in range(1, MAX_ATTEMPTS + 1):
                (item,) = await queue.claim("q", lease_s=LEASE_S)
                assert (item.key, item.attempt) == ("bad", attempt)
                await queue.release("q", lease=item.lease, reason=f"no {attempt}")
            (item,) = await queue.claim("q", lease_s=LEASE_S)
            assert item.key == "good"
            (dead,) = await queue.dead_letters("q")
            assert (dead.key, dead.payload, dead.attempts, dead.reason) == ("bad", b"x", 3, "no 3")
            assert (await queue.depths())["q"] == QueueDepth(leased=1, dead=1)

        self.with_queue(test)

    def test_leases_that_end_kill_a_poisonous_item_too(self) -> None:
        async def test(queue: Queues) -> None:
            await queue.put("q", key="bad", payload=b"")
            for _ in range(MAX_ATTEMPTS):
                assert len(await queue.claim("q", lease_s=LEASE_S)) == 1
                self.clock.advance(LEASE_S + 1)
            assert await queue.claim("q", lease_s=LEASE_S) == []
            assert [letter.reason for letter in await queue.dead_letters("q")] == [
                "the lease ended"
            ]

        self.with_queue(test)

    def test_a_waiting_claim_is_woken_by_a_put(self) -> None:
        async def test(queue: Queues) -> None:
            waiting = asyncio.ensure_future(queue.claim("q", lease_s=LEASE_S, wait_s=BOUND_S))
            await asyncio.sleep(0)
            await queue.put("q", key="a", payload=b"")
            assert [item.key for item in await waiting] == ["a"]

        self.with_queue(test)

    def test_each_of_many_waiting_claims_gets_one_item(self) -> None:
        async def test(queue: Queues) -> None:
            waiting = [
                asyncio.ensure_future(queue.claim("q", lease_s=LEASE_S, wait_s=BOUND_S))
                for _ in range(20)
            ]
            await asyncio.sleep(0)
            await asyncio.gather(*(queue.put("q", key=str(n), payload=b"") for n in range(20)))
            got = [item.key for items in await asyncio.gather(*waiting) for item in items]
            assert sorted(got, key=int) == [str(n) for n in range(20)]

        self.with_queue(test)

    def test_waiting_claim_wakes_on_release_or_expired_lease(self) -> None:
        async def test(queue: Queues) -> None:
            await queue.put("q", key="a", payload=b"")
            (item,) = await queue.claim("q", lease_s=LEASE_S)
            waiting = asyncio.ensure_future(queue.claim("q", lease_s=LEASE_S, wait_s=BOUND_S))
            await asyncio.sleep(0)
            await queue.release("q", lease=item.lease)
            assert [i.attempt for i in await waiting] == [2]
            waiting = asyncio.ensure_future(queue.claim("q", lease_s=LEASE_S, wait_s=BOUND_S))
            await asyncio.sleep(0)
            self.clock.advance(LEASE_S + 1)
            await queue.expire()
            assert [i.attempt for i in await waiting] == [3]

        self.with_queue(test)

    def test_a_cancelled_wait_swallows_no_item(self) -> None:
        async def test(queue: Queues) -> None:
            first, second = (
                asyncio.ensure_future(queue.claim("q", lease_s=LEASE_S, wait_s=BOUND_S))
                for _ in range(2)
            )
            while not await _waits(queue, 2):
                await asyncio.sleep(0.001)
            first.cancel()
            await queue.put("q", key="a", payload=b"")
            assert [item.key for item in await second] == ["a"]
            with pytest.raises(asyncio.CancelledError):
                await first

        self.with_queue(test)

    def test_an_empty_wait_ends_in_time(self) -> None:
        async def test(queue: Queues) -> None:
            assert await queue.claim("q", lease_s=LEASE_S, wait_s=0.01) == []

        self.with_queue(test)

    def test_an_answer_is_bounded_in_bytes_but_never_empty_for_it(self) -> None:
        async def test(queue: Queues) -> None:
            for key in "abc":
                await queue.put("q", key=key, payload=bytes(MAX_CLAIM_BYTES * 2 // 3))
            for _ in range(3):
                assert len(await queue.claim("q", lease_s=LEASE_S, limit=10)) == 1

        self.with_queue(test)

    def test_bad_leases_and_names_are_refused(self) -> None:
        async def test(queue: Queues) -> None:
            for lease in ("", "7", "1.x", "999999999999999999999.x", "²"):
                with pytest.raises(HubError, match="not held"):
                    await queue.ack("q", lease=lease)
            for lease_s in (0.0, -1.0, float("nan"), float("inf")):
                with pytest.raises(HubError, match="duration of a lease"):
                    await queue.claim("q", lease_s=lease_s)
            with pytest.raises(HubError, match="key cannot be used"):
                await queue.put("q", key="", payload=b"")
            with pytest.raises(HubError, match="queue cannot be used"):
                await queue.put("q" * 201, key="a", payload=b"")

        self.with_queue(test)

    def test_no_order_of_calls_loses_doubles_or_revives_an_item(self) -> None:
        suite, folder = self, self.folder
        number = iter(range(1_000_000))

        class Machine(_QueueMachine):
            def __init__(self) -> None:
                suite.folder = folder / f"m{next(number)}"
                suite.clock = VirtualClock()
                super().__init__(suite)

        run_state_machine_as_test(
            Machine,
            settings=settings(
                max_examples=examples(20),
                stateful_step_count=30,
                deadline=None,
                derandomize=True,
                suppress_health_check=list(HealthCheck),
            ),
        )


async def _waits(queue: Queues, number: int) -> bool:
    """Return whether that many claims stand in line; looks inside, only to be deterministic."""
    line: Any = getattr(queue, "wait_list")._lines.get("q", ())  # noqa: B009
    return len(line) == number


class _QueueMachine(RuleBasedStateMachine):
    """A model of one queue beside the real one."""

    def __init__(self, suite: QueueContract) -> None:
        super().__init__()
        self.suite = suite
        self.runner = asyncio.Runner()
        self.stack = contextlib.AsyncExitStack()
        self.queue: Queues = self.runner.run(self.stack.enter_async_context(suite.open()))
        self.runner.run(self.queue.declare("q", OPTIONS))
        self.put: dict[str, int] = {}
        self.done: set[str] = set()
        self.held: dict[str, tuple[str, float, int]] = {}

    @rule(key=st.sampled_from("abcdef"))
    def puts(self, key: str) -> None:
        answer = self.runner.run(self.queue.put("q", key=key, payload=key.encode()))
        assert answer.duplicate == (key in self.put)
        assert self.put.setdefault(key, answer.seq) == answer.seq

    @rule(limit=st.integers(1, 3))
    def claims(self, limit: int) -> None:
        items = self.runner.run(self.queue.claim("q", lease_s=LEASE_S, limit=limit))
        now = self.suite.clock.wall()
        assert [i.seq for i in items] == sorted(i.seq for i in items)
        for item in items:
            assert item.key not in self.done
            _, until, attempt = self.held.get(item.key, ("", 0.0, 0))
            assert until <= now, "two hold it at the same time"
            assert item.attempt == attempt + 1 <= MAX_ATTEMPTS
            self.held[item.key] = (item.lease, now + LEASE_S, item.attempt)

    @rule(key=st.sampled_from("abcdef"))
    def acks(self, key: str) -> None:
        if key in self.held:
            self.runner.run(self.queue.ack("q", lease=self.held[key][0]))
            self.done.add(key)

    @rule(key=st.sampled_from("abcdef"))
    def releases(self, key: str) -> None:
        if key in self.held:
            lease, _, attempt = self.held[key]
            self.runner.run(self.queue.release("q", lease=lease))
            self.held[key] = (lease, 0.0, attempt)

    @rule(keys=st.lists(st.sampled_from("abcdef"), min_size=1, max_size=4))
    def puts_many(self, keys: list[str]) -> None:
        entries = [QueueEntry(key, key.encode()) for key in keys]
        answer = self.runner.run(self.queue.put_many("q", entries))
        known = [place for place, key in enumerate(keys) if key in self.put or key in keys[:place]]
        assert answer.duplicates == known
        for key, seq in zip(keys, answer.seqs, strict=True):
            assert self.put.setdefault(key, seq) == seq

    def dead(self) -> set[str]:
        """Return the keys of dead letters; what is overdue is taken back by this."""
        self.runner.run(self.queue.expire())
        now = self.suite.clock.wall()
        return {
            key
            for key, (_, until, attempt) in self.held.items()
            if attempt == MAX_ATTEMPTS and until <= now and key not in self.done
        }

    @rule()
    def dead_letters_are_put_back(self) -> None:
        dead = self.dead()
        assert self.runner.run(self.queue.requeue("q")) == len(dead)
        for key in dead:
            self.held[key] = (self.held[key][0], 0.0, 0)

    @rule()
    def dead_letters_are_discarded(self) -> None:
        dead = self.dead()
        letters = self.runner.run(self.queue.dead_letters("q"))
        assert {letter.key for letter in letters} == dead
        assert self.runner.run(self.queue.discard("q")) == len(dead)
        self.done |= dead

    @rule(seconds=st.sampled_from([1.0, LEASE_S]))
    def time_passes(self, seconds: float) -> None:
        self.suite.clock.advance(seconds)
        self.runner.run(self.queue.expire())

    @rule()
    def reopens(self) -> None:
        if not self.suite.durable or self.a_last_attempt_is_held():
            return
        self.runner.run(self.stack.aclose())
        self.queue = self.runner.run(self.stack.enter_async_context(self.suite.open()))

    def a_last_attempt_is_held(self) -> bool:
        """Return whether an item may die at a time that only the hub knew before it stopped."""
        now = self.suite.clock.wall()
        held = {key: of for key, of in self.held.items() if key not in self.done}
        last = any(until > now and n == MAX_ATTEMPTS for _, until, n in held.values())
        return last and not self.suite.capabilities.remembers_claims

    @invariant()
    def nothing_is_lost(self) -> None:
        depth = self.runner.run(self.queue.depths()).get("q", QueueDepth())
        assert depth.ready + depth.leased + depth.dead == len(self.put) - len(self.done)

    def teardown(self) -> None:
        self.runner.run(self.stack.aclose())
        self.runner.close()
