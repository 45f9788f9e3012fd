"""Tickets and tokens: what lets whom in, and what does not."""

from __future__ import annotations

import asyncio
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from atoll.clock import VirtualClock
from atoll.errors import AuthError, ConfigError
from atoll.hub.db.database import Database
from atoll.hub.security import auth as auth_module
from atoll.hub.security.auth import FAILURE_WINDOW_S, MAX_FAILURES, Auth, Identity
from atoll.hub.security.queue_rights import may_use_queue


@pytest.fixture
def clock() -> VirtualClock:
    return VirtualClock()


@pytest.fixture
def database(tmp_path: Path) -> Iterator[Database]:
    opened = Database(tmp_path / "hub.sqlite", schemas=[auth_module.SCHEMA])
    yield opened
    opened.close()


@pytest.fixture
def auth(database: Database, clock: VirtualClock) -> Auth:
    return Auth(database, clock=clock)


def test_a_ticket_becomes_a_node_token_that_survives_a_restart(
    auth: Auth, database: Database, clock: VirtualClock
) -> None:
    async def work() -> None:
        ticket = await auth.create_ticket()
        node, token = await auth.redeem(ticket, name="kitchen-1")
        assert auth.authenticate(token) == Identity("node", "kitchen-1") == Identity("node", node)
        assert Auth(database, clock=clock).authenticate(token).name == "kitchen-1"

    asyncio.run(work())


def test_a_second_machine_of_the_same_name_gets_its_own(auth: Auth) -> None:
    async def work() -> None:
        ticket = await auth.create_ticket()
        first, one = await auth.redeem(ticket, name="n" * 63)
        second, two = await auth.redeem(ticket, name="n" * 63)
        assert first != second
        assert len(second) <= 63
        assert (auth.authenticate(one).name, auth.authenticate(two).name) == (first, second)

    asyncio.run(work())


def test_wrong_used_up_and_expired_tickets_say_what_to_do(auth: Auth, clock: VirtualClock) -> None:
    async def work() -> None:
        with pytest.raises(AuthError, match=r"unknown to the hub.*fresh one"):
            await auth.redeem("wrong", name="a")
        once = await auth.create_ticket(uses=1)
        await auth.redeem(once, name="a")
        with pytest.raises(AuthError, match="used up"):
            await auth.redeem(once, name="b")
        short = await auth.create_ticket(valid_s=60)
        clock.advance(61)
        with pytest.raises(AuthError, match="expired"):
            await auth.redeem(short, name="c")

    asyncio.run(work())


def test_a_bad_node_name_uses_no_ticket_up(auth: Auth) -> None:
    async def work() -> None:
        once = await auth.create_ticket(uses=1)
        with pytest.raises(ConfigError, match="node name"):
            await auth.redeem(once, name="../x")
        await auth.redeem(once, name="x")

    asyncio.run(work())


def test_only_one_of_two_machines_gets_the_last_use(auth: Auth) -> None:
    async def work() -> None:
        once = await auth.create_ticket(uses=1)
        outcomes = await asyncio.gather(
            *(auth.redeem(once, name=name) for name in "ab"), return_exceptions=True
        )
        assert sum(isinstance(outcome, AuthError) for outcome in outcomes) == 1

    asyncio.run(work())


def test_guessing_is_throttled_by_address_in_bounded_memory(
    auth: Auth, clock: VirtualClock
) -> None:
    async def work() -> None:
        ticket = await auth.create_ticket()
        _, token = await auth.redeem(ticket, name="good", source="1.1.1.1")
        for _ in range(MAX_FAILURES):
            with pytest.raises(AuthError, match="not valid at this hub"):
                auth.authenticate("guess", source="1.1.1.1")
        with pytest.raises(AuthError, match="too many wrong"):
            auth.authenticate("guess", source="1.1.1.1")
        with pytest.raises(AuthError, match="too many wrong"):
            await auth.redeem("guess", name="x", source="1.1.1.1")
        await auth.redeem(ticket, name="w", source="1.1.1.1")
        assert auth.authenticate(token, source="1.1.1.1").name == "good"
        await auth.redeem(ticket, name="x", source="2.2.2.2")
        clock.advance(FAILURE_WINDOW_S + 1)
        await auth.redeem(ticket, name="y", source="1.1.1.1")
        for number in range(3000):
            with pytest.raises(AuthError):
                auth.authenticate("guess", source=f"10.0.{number}")
        assert len(auth._failures) <= 1024

    asyncio.run(work())


def test_name_of_a_revoked_machine_goes_to_no_other(auth: Auth) -> None:
    async def work() -> None:
        ticket = await auth.create_ticket()
        await auth.redeem(ticket, name="lap3")
        await auth.revoke_node("lap3")
        name, _ = await auth.redeem(ticket, name="lap3")
        assert name.startswith("lap3-")

    asyncio.run(work())


def test_job_tokens_open_their_job_until_it_is_over(auth: Auth) -> None:
    async def work() -> None:
        one, two = await auth.issue_job_token("j1"), await auth.issue_job_token("j1")
        other = await auth.issue_job_token("j2")
        assert auth.authenticate(one) == auth.authenticate(two) == Identity("job", "j1")
        await auth.revoke_job("j1")
        for token in (one, two):
            with pytest.raises(AuthError):
                auth.authenticate(token)
        assert auth.authenticate(other).name == "j2"

    asyncio.run(work())


def test_secrets_are_kept_for_their_owner_only_and_stay_the_same(
    auth: Auth, database: Database, clock: VirtualClock, tmp_path: Path
) -> None:
    async def work() -> None:
        secrets = await auth.open_secrets(tmp_path)
        assert auth.authenticate(secrets.operator_token) == Identity("operator", "operator")
        again = Auth(database, clock=clock)
        assert await again.open_secrets(tmp_path) == secrets
        assert (await again.redeem(secrets.ticket, name="n"))[0] == "n"
        mode = stat.S_IMODE((tmp_path / "secrets.json").stat().st_mode)
        assert mode == 0o600
        for secret in (secrets.operator_token, secrets.ticket):
            assert secret.encode() not in (tmp_path / "hub.sqlite").read_bytes()
            assert secret.encode() not in (tmp_path / "hub.sqlite-wal").read_bytes()

    asyncio.run(work())


@pytest.mark.parametrize(
    ("identity", "session", "allowed"),
    [
        (Identity("node", "n1"), "n1", True),
        (Identity("node", "n1"), "n2", False),
        (Identity("node", "n1"), "j1/w0", False),
        (Identity("job", "j1"), "j1/w0", True),
        (Identity("job", "j1"), "j1/reducer", True),
        (Identity("job", "j1"), "j2/w0", False),
        (Identity("job", "j1"), "j1", False),
        (Identity("job", "j1"), "j1/", False),
        (Identity("operator", "operator"), "j1/w0", True),
    ],
)
def test_who_may_speak_under_which_address(
    auth: Auth, identity: Identity, session: str, allowed: bool
) -> None:
    assert auth.may_open_session(identity, session) is allowed


@pytest.mark.parametrize(
    ("identity", "queue", "allowed"),
    [
        (Identity("node", "n1"), "node/n1", True),
        (Identity("node", "n1"), "node/n10", False),
        (Identity("job", "j1"), "j1/rollouts", True),
        (Identity("job", "j1"), "j10/rollouts", False),
        (Identity("operator", "operator"), "anything", True),
        (Identity("program", "p"), "pool/work", True),
        (Identity("program", "p", queues=("pool/ada",)), "pool/ada", True),
        (Identity("program", "p", queues=("pool/ada",)), "pool/ada/work", True),
        (Identity("program", "p", queues=("pool/ada",)), "pool/adam", False),
        (Identity("program", "p", queues=("pool/ada",)), "pool/work", False),
        (Identity("program", "p", queues=("node",)), "node/n1", False),
    ],
)
def test_who_may_use_which_queue(identity: Identity, queue: str, allowed: bool) -> None:
    assert may_use_queue(identity, queue) is allowed
