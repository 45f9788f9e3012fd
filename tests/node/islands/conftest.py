"""Waits of the product that a busy machine must not end; no test here is about their length.

Those of supervisors are set in their own processes, which a launcher of this process starts.
"""

from __future__ import annotations

import sys

import pytest

from atoll.net import member_tls
from atoll.node.islands import rank_supervisor, rendezvous_client, supervisor_link
from atoll.node.launchers import process
from tests.patience import PATIENCE_S

WORKER = """
import runpy
from atoll.node.islands import follower, local_ranks, rank_supervisor
follower.HOME_S = rank_supervisor.HOME_S = local_ranks.GONE_S = {patience_s}
rank_supervisor.SETTLE_S = {settle_s}
runpy.run_module("atoll.node.worker", run_name="__main__", alter_sys=True)
"""


def _set_worker(monkeypatch: pytest.MonkeyPatch, *, settle_s: float) -> None:
    code = WORKER.format(patience_s=PATIENCE_S, settle_s=settle_s)
    monkeypatch.setattr(process, "argv", lambda order: [sys.executable, "-P", "-c", code])


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let handshakes, silent connections and last lines take their time."""
    monkeypatch.setattr(member_tls, "HANDSHAKE_S", PATIENCE_S)
    monkeypatch.setattr(supervisor_link, "DEAD_AFTER_S", PATIENCE_S)
    monkeypatch.setattr(rendezvous_client, "DIAL_S", PATIENCE_S)
    monkeypatch.setattr(process, "LAST_LINES_S", PATIENCE_S)
    _set_worker(monkeypatch, settle_s=rank_supervisor.SETTLE_S)


@pytest.fixture
def all_ranks_end(monkeypatch: pytest.MonkeyPatch, patience: None) -> None:
    """Let the rank that is the cause end long after those that only noticed it.

    Not for tests in which a rank lives on: their supervisors would wait for it.
    """
    _set_worker(monkeypatch, settle_s=PATIENCE_S)
