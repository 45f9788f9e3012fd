"""Errors met before anything is trained: one message each, and a status that is not 0."""

from __future__ import annotations

import socket

import pytest

from tests.e2e.conftest import Atoll, ticket_of, until

pytestmark = pytest.mark.e2e


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("train.stepz=3", ["unknown key in [train]", "did you mean 'steps'"]),
        ("strategy.outer='dilocco'", ["unknown outer strategy", "did you mean 'diloco'"]),
        ("strategy.preset='dppp'", ["unknown preset", "ddp"]),
        ("strategy.evry=3", ["unknown key", "did you mean 'every'"]),
        ("strategy.codec='int9'", ["unknown codec", "did you mean 'int8'"]),
        ("model.name='gtp'", ["unknown model", "did you mean 'gpt'"]),
        ("model.widht=8", ["unknown option of model 'gpt'", "did you mean 'width'"]),
        ("job.route='relais'", ["unknown route", "did you mean 'relay'"]),
        ("job.nodes=0", ["nodes in [job] is too small"]),
    ],
)
@pytest.mark.every(4)
def test_wrong_name_is_refused_before_anything_starts(
    atoll: Atoll, setting: str, words: list[str]
) -> None:
    done = atoll.run_here("run", str(atoll.job()), "--local", "2", "--set", setting)
    assert done.code == 2, done.both
    for word in words:
        assert word in done.err, done.err
    assert not atoll.runs.exists()


@pytest.mark.long("tests/data/test_corpora.py::test_unknown_corpus_names_the_nearest")
def test_unknown_corpus_is_refused_with_the_known_ones(atoll: Atoll) -> None:
    done = atoll.run_here("run", str(atoll.job()), "--local", "1", "--set", "data.corpus='stdlip'")
    assert done.code == 2, done.both
    assert "unknown corpus" in done.err
    assert "did you mean 'stdlib'" in done.err


def test_hub_that_does_not_answer_is_named(atoll: Atoll) -> None:
    ticket = "atoll://127.0.0.1:9/" + "x" * 32
    for words in (["join", ticket, "--name", "n"], ["status", "--hub", ticket]):
        done = atoll.run_here(*words)
        assert done.code == 1
        assert "127.0.0.1" in done.err
        assert "what to do" in done.err


def test_command_without_a_hub_says_how_to_get_one(atoll: Atoll) -> None:
    done = atoll.run_here("status")
    assert done.code == 2
    assert "atoll hub" in done.err


def test_wrong_ticket_and_used_up_ticket_are_refused(atoll: Atoll) -> None:
    hub = atoll.hub("--ticket-uses", "1")
    ticket = ticket_of(hub)
    wrong = atoll.run_here("join", ticket.rpartition("/")[0] + "/" + "x" * 32, "--name", "n")
    assert wrong.code == 1
    assert "ticket is unknown" in wrong.err
    atoll.join(ticket, name="first")
    with hub.client() as client:
        until(lambda: client.nodes())
    late = atoll.join(ticket, name="second").wait()
    assert late.code == 1
    assert "used up" in late.err
    assert "what to do" in late.err


def test_port_that_is_taken_is_named(atoll: Atoll) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        done = atoll.run("hub", "--host", "127.0.0.1", "--port", str(port))
    assert done.code == 1
    assert str(port) in done.err
    assert "--port" in done.err


def test_job_that_does_not_exist_is_said(atoll: Atoll) -> None:
    atoll.hub()
    for words in (["status", "no-such"], ["logs", "no-such"], ["stop", "no-such"]):
        done = atoll.run_here(*words)
        assert done.code == 1, done.both
        assert "no such job" in done.err
