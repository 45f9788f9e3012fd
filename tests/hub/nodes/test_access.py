from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest
from websockets.exceptions import ConnectionClosed

from atoll.errors import AtollError, ConfigError
from atoll.hub.security.node_certificates import NodeCertificates
from atoll.wire.messages import Drain
from tests.hub.peer import Peer
from tests.patience import PATIENCE_S
from tests.security.conftest import joined, operator, serving


def test_a_revocation_that_fails_half_ends_sessions_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    revoke, failed = NodeCertificates.revoke, list[str]()

    async def fails_once(certificates: NodeCertificates, node: str) -> bool:
        if not failed:
            failed.append(node)
            raise sqlite3.OperationalError("disk I/O error")
        return await revoke(certificates, node)

    monkeypatch.setattr(NodeCertificates, "revoke", fails_once)
    with serving(tmp_path / "hub", tls="on") as hub:
        joined(hub, tmp_path / "home", name="box")
        with operator(hub) as client:
            with pytest.raises(AtollError, match="failed"):
                client.revoke_node("box")
            client.revoke_node("box")
            with pytest.raises(ConfigError):
                client.revoke_node("box")


def test_sessions_end_though_certificates_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fails(certificates: NodeCertificates, node: str) -> bool:
        raise sqlite3.OperationalError("disk I/O error")

    monkeypatch.setattr(NodeCertificates, "revoke", fails)
    with serving(tmp_path) as hub:
        me = joined(hub, tmp_path / "home", name="box")
        with Peer(hub, "box", token=me.token) as peer, operator(hub) as client:
            with pytest.raises(AtollError):
                client.revoke_node("box")
            with pytest.raises(ConnectionClosed):
                peer.notice(Drain, timeout_s=PATIENCE_S)
