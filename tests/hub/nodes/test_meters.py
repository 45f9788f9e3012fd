"""Figures of sessions in the ledger of quotas, whatever a process reports."""

from __future__ import annotations

from pathlib import Path

import msgspec

from atoll.hub.quotas.ledger import Use
from atoll.hub.server import HubServer
from atoll.wire.messages import Beat
from tests.hub.membership import Running, options


def test_absurd_figures_of_a_reducer_are_left_out(tmp_path: Path) -> None:
    with HubServer(options(tmp_path)) as hub:
        group = Running(hub)
        stats = {"refused": 1e300, "refused/w0": 2.0, "held_bytes/w0": 1e300}
        group.reducer.request(Beat(stats))
        assert hub.hub is not None
        uses: list[Use] = hub.call(hub.hub.stores.ledger.uses())
        group.close()
    refused = {use.holder.member: use.refused for use in uses if use.refused}
    assert refused == {"w0": 2}
    msgspec.json.encode([use.used for use in uses])
