from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.errors import ConfigError
from atoll.ids import new_token
from atoll.net.endpoint import Ticket, parse_ticket


@pytest.mark.parametrize("host", ["192.168.1.20", "hub", "my-hub.example.org", "fe80::1"])
def test_a_ticket_comes_back_as_it_was_printed(host: str) -> None:
    ticket = Ticket(host, 8000, new_token())
    assert parse_ticket(f"  {ticket}\n") == ticket


@pytest.mark.parametrize("mark", ["", "tls", "0123456789" * 4])
@pytest.mark.parametrize("prefix", ["", "/atoll", "/a/b"])
def test_a_ticket_carries_prefix_and_fingerprint(prefix: str, mark: str) -> None:
    ticket = Ticket("hub", 7700, new_token(), prefix=prefix, mark=mark)
    assert parse_ticket(str(ticket)) == ticket
    assert ticket.url == f"http{'s' if mark else ''}://hub:7700{prefix}"
    assert ticket.fingerprint == ("" if mark == "tls" else mark)


def test_an_error_about_a_ticket_does_not_show_its_secret() -> None:
    with pytest.raises(ConfigError) as refused:
        parse_ticket("atoll://hub:8000/SECRETSECRETSECRET~zz")
    assert "SECRETSECRET" not in str(refused.value)


def test_a_ticket_knows_the_url_of_its_hub() -> None:
    assert parse_ticket("atoll://hub:8000/abc").url == "http://hub:8000"
    assert parse_ticket("atoll://[::1]:8000/abc").url == "http://[::1]:8000"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "hub:8000",
        "http://hub:8000/abc",
        "atoll://hub/abc",
        "atoll://hub:8000",
        "atoll://hub:8000/",
        "atoll://hub:0/abc",
        "atoll://hub:70000/abc",
        "atoll://:8000/abc",
        "atoll://hub:8000/a b",
        "atoll://hub:8000/abc~",
        "atoll://hub:8000/abc~0123",
        "atoll://hub:8000//abc",
        "atoll://hub:8000/../abc~nonsense",
        "atoll://user@hub:8000/abc",
    ],
)
def test_a_malformed_ticket_is_refused_with_the_right_form(text: str) -> None:
    with pytest.raises(ConfigError, match="atoll://HOST:PORT/SECRET"):
        parse_ticket(text)


@given(st.text(max_size=40))
def test_no_text_makes_the_parser_fail_in_another_way(text: str) -> None:
    try:
        assert parse_ticket("atoll://" + text).port > 0
    except ConfigError as error:
        assert error.exit_code == 2  # noqa: PT017
