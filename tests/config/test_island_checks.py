"""What an island may send in the clear, and what is said about it."""

from __future__ import annotations

import pytest

from atoll.config import parse_spec
from atoll.config.island_checks import check_encryption, not_encrypted
from atoll.errors import ConfigError

ISLAND = '[strategy]\ninner = "fsdp"\n[island]\nranks = 2\nmachines = 2\n'


def test_ranks_cross_a_network_only_if_the_owner_says_so() -> None:
    with pytest.raises(ConfigError, match=r"cannot be encrypted.*NCCL.*Gloo"):
        check_encryption(parse_spec(ISLAND))
    spec = parse_spec(ISLAND + 'encryption = "off"')
    check_encryption(spec)
    assert "ranks of an island" in not_encrypted(spec)
    check_encryption(parse_spec(ISLAND.replace("machines = 2", "")))


def test_members_encrypt_unless_the_job_says_otherwise() -> None:
    assert not_encrypted(parse_spec("")) == ""
    assert "members send each other" in not_encrypted(parse_spec('[job]\nencryption = "off"'))
    with pytest.raises(ConfigError, match="encryption"):
        parse_spec('[job]\nencryption = "maybe"')
