"""The quick form of `make attack`: every promise holds, and what is broken would be seen."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from bench.attack import fuzz, strangers
from bench.attack.attacks import Attack, BrokenPromise, NotTried, hold
from bench.attack.decoders import targets
from bench.attack.fuzz import BEGINS, fuzz_all, run
from bench.attack.site import Site
from bench.kit.cluster import Cluster

LENGTHY = (strangers.CONNECTIONS, strangers.SLOW)
ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.e2e
@pytest.mark.timeout(900)
@pytest.mark.long("tests/bench/test_attack.py::test_strangers_get_nothing_and_decoders_stand")
def test_no_quick_attack_succeeds() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "bench.attack", "--quick"], cwd=ROOT, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    found = json.loads(done.stdout.splitlines()[-1])
    wrong = [row for row in found["rows"] if row["verdict"] in ("broken", "failed")]
    assert not wrong, done.stderr[-6000:]
    assert found["held"] > 30
    assert done.returncode == 0


@pytest.mark.e2e
def test_strangers_get_nothing_and_decoders_stand(tmp_path: Path) -> None:
    """Attacks that need a hub and no job, and some seconds of bytes for every decoder."""
    options = ("--host", "0.0.0.0", "--advertise", strangers.far_address(), "--tls", "on")
    tried = [one for one in strangers.suite if one.quick and one.promise not in LENGTHY]
    with Cluster(tmp_path / "cluster", hub_options=options) as cluster:
        cluster.start_hub()
        site = Site(cluster, tmp_path / "attacker")
        rows = [one.tried(site) for one in tried]
    assert [row.verdict for row in rows] == ["held"] * len(tried), rows
    assert len(rows) >= 6
    fuzzed = list(fuzz_all(list(targets()), seconds=2.0, engine="own"))
    assert [one.crashes for one in fuzzed] == [[]] * len(fuzzed)
    assert all(one.executions for one in fuzzed)


def test_verdicts_follow_from_how_an_attack_ends(tmp_path: Path) -> None:
    site = Site(Cluster(tmp_path / "cluster"), tmp_path / "attacker")

    def end(how: Exception | None) -> str:
        def run(_: Site) -> str:
            if how is not None:
                raise how
            return "seen"

        return Attack("name", "promise", run, quick=True).tried(site).verdict

    assert end(None) == "held"
    assert end(BrokenPromise("it gave way")) == "broken"
    assert end(NotTried("no such machine")) == "not tried"
    assert end(OSError("the attack itself failed")) == "failed"
    with pytest.raises(BrokenPromise, match="gave way"):
        hold([], "it gave way")


def test_slow_start_is_no_crash_and_a_hang_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Time counts from when a decoder is fuzzed; what never starts says nothing about it."""
    slow = f"import sys, time; time.sleep(1); print({BEGINS!r} + 'x', file=sys.stderr, flush=True)"
    assert run([sys.executable, "-c", slow], limit_s=30.0).status == 0
    hangs = f"{slow}; time.sleep(600)"
    assert run([sys.executable, "-c", hangs], limit_s=0.5).status is None
    assert BEGINS in run([sys.executable, "-c", hangs], limit_s=0.5).stderr
    for engine in ("own", "atheris"):
        monkeypatch.setattr(fuzz, "run", lambda words, *, limit_s: fuzz.Ended(None, "", ""))
        found = list(fuzz_all(["frame", "codec fp32"], seconds=1.0, engine=engine))
        assert [(one.crashes, "did not start" in one.not_fuzzed) for one in found] == [
            ([], True), ([], True)
        ]  # fmt: skip
        hung = fuzz.Ended(None, "", f"{BEGINS}frame\n")
        monkeypatch.setattr(fuzz, "run", lambda words, *, limit_s, hung=hung: hung)
        found = list(fuzz_all(["frame"], seconds=1.0, engine=engine))
        assert [one.crashes[0]["error"] for one in found] == ["it did not end"]
