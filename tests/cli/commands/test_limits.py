"""`atoll limits` against a real hub, and tickets that set limits."""

from __future__ import annotations

import json
from pathlib import Path

from atoll.hub.quotas.limits import Quotas
from tests.security.conftest import operator, serving, web
from tests.security.test_commands import command, operators_home

SPEC = '[job]\nname = "toy"\nnodes = 1\n'


def test_limits_are_shown_and_tickets_set_them(tmp_path: Path) -> None:
    with serving(tmp_path / "hub", tls="on", quotas=Quotas(job_disk=50_000)) as hub:
        with operator(hub) as client:
            job = client.submit(SPEC)
        with web(hub, hub.operator_token) as sender:
            url = f"/api/jobs/{job}/files/a.bin"
            assert sender.put(url, content=b"x" * 60_000).status_code == 429
        olga = operators_home(hub, tmp_path / "olga")
        shown = command(olga, "limits")
        assert f"job {job}" in shown
        assert "50.0 kB" in shown
        assert "once, last" in shown
        found = json.loads(command(olga, "limits", "--json", "--all"))
        assert found["limits"]["job_disk"] == 50_000
        assert found["uses"][0]["reached"]
        command(olga, "ticket", "new", "--quota", "disk=10MB", "--name", "guest")
        assert "disk=10000000" in command(olga, "ticket", "list")
        command(olga, "ticket", "new", "--name", "for lab [/3]")
        assert "for lab [/3]" in command(olga, "ticket", "list")
        wrong = command(olga, "ticket", "new", "--quota", "dusk=10MB", status=2)
        assert "did you mean 'disk'" in wrong
