"""Ten thousand members for a day, with a quorum beside plain rounds.

The mixture of examples/fleet_many.toml (half of the machines in laboratories of five, four in ten
at home and lent ten hours a day, one in ten a spot machine), repeated; a hub with a line of
10 Gbit/s; 500 steps between rounds; 1 MB sent by a member in a round, as a sparse codec makes of
25 M parameters.

Failures are published rates. Laboratory: 0.05 a day; the pre-training of Llama 3 had 419 unexpected
interruptions on 2,048 machines in 54 days, 0.004 a day (https://arxiv.org/abs/2407.21783, section
3.3.4), on better machines. Home: 0.5 a day, and owners' hours. Spot: 4 a day; Bamboo measured 0.3
to 13 % of the machines an hour on three clouds (https://arxiv.org/abs/2204.12013), and 4 a day are
17 % an hour.

goodput      share of the machines' lent time that ended in committed steps, with the quorum
plain        the same with rounds that wait for all
simulated_h  hours of virtual time; wall_s, cpu_s, rss_gb: what that took here, each run by itself
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from atoll.fleet.reading import read_fleet
from atoll.simulate.record import Outcome
from atoll.simulate.setting import HOUR_S, Setting, scaled

FLEET = Path(__file__).resolve().parents[2] / "examples" / "fleet_many.toml"
HUB_MBPS = 10_000.0
JITTER = 0.02
"""Deviation of a period of 500 steps: that of a step, if they do not depend on each other, is 22
times as large."""


def setting_of(*, members: int, hours: float, quorum: float, every: int) -> Setting:
    """Return one simulation."""
    fleet = read_fleet(FLEET)
    hub = dataclasses.replace(fleet.hub, up_mbps=HUB_MBPS, down_mbps=HUB_MBPS)
    return Setting(
        fleet=scaled(dataclasses.replace(fleet, hub=hub), members), every=every,
        exchange_bytes=1e6, state_bytes=20e6, duration_s=hours * HOUR_S, quorum=quorum,
        jitter=JITTER,
    )  # fmt: skip


def row_of(outcome: Outcome, quorum: float) -> dict[str, Any]:
    """Return one line of the table."""
    measured = outcome.measured
    return {
        "quorum": quorum, "goodput": round(outcome.goodput, 4),
        **{name: round(share, 4) for name, share in outcome.shares.items() if name != "useful"},
        "rounds": outcome.rounds_committed, "aborted": outcome.rounds_aborted,
        "round_s": round(outcome.round_s, 1), "hub_core": round(outcome.hub_share, 3),
        "hub_out": round(outcome.hub_up_share, 3), "wall_s": round(measured["wall_s"], 1),
        "cpu_s": round(measured["processor_s"], 1), "rss_gb": round(measured["rss_gb"], 3),
    }  # fmt: skip


def say(quorum: float) -> Callable[[float], None]:
    """Return what writes the share of a simulation that is over."""

    def progress(share: float) -> None:
        sys.stderr.write(f"\rquorum {quorum:g}: {share:.0%} ")
        sys.stderr.write("\n" if share >= 1 else "")
        sys.stderr.flush()

    return progress
