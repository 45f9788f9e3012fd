"""What the loss and the return of a machine cost: `python -m bench.recovery [--quick]`.

Three members train the same 25 MB float32 model in the same loop and agree every so many steps
with the same DiLoCo, once under torchft (its lighthouse, managers and DiLoCo on Gloo, with its
default time limits and with short ones), once as an Atoll job. On each side members are killed
with `kill -9` between two rounds and in the middle of one, come back, and one is stopped and goes
on. The last line of stdout is JSON; `torchft` holds the same figures of the other side.

    stall_over_normal_s     how much longer the round after a kill between two rounds took
    stall_within_round_s    the same when it died in the middle of a round, at three moments
    frozen_stall_s          the same for a member that was stopped (SIGSTOP), not ended
    thawed_back_s           from its SIGCONT until it took part in a committed round again
    joiner_imports_s        from the start of a process to the end of its imports
    joiner_useful_s         from there to its first gradient from the common state
    joiner_counted_s        from there to the first committed round with such a step in it
    join_stall_s            how much longer a round took in which the joiner came in
    wasted_steps            steps that a joiner did before it had the common state
    identical               after every round all members had the same parameters
    checkpoint_block_ratio  from `bench.checkpoint`: blocked time per copy of the state in memory
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from bench.kit.report import emit
from bench.recovery.atoll_side import AtollSide
from bench.recovery.scenario import play
from bench.recovery.torchft_side import SETTINGS, TorchftSide, torchft_is_here

ROOT = Path(__file__).resolve().parents[2]
STEP_S = 0.1
"""Length of a step; the model itself takes about a third of it."""

CHECKPOINT_TIMEOUT_S = 600.0


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Play the scenario on every side; return the JSON object."""
    quick = bool(arguments.quick)
    effort = {"kills": 1 if quick else 3, "within": 0 if quick else 3, "freezes": 1 if quick else 2}
    every = 10 if quick else 20
    found: dict[str, Any] = {}
    for name, timeouts in SETTINGS.items():
        if not torchft_is_here():
            sys.stderr.write("torchft is not installed: pip install -e '.[bench]'\n")
            break
        if arguments.without_torchft:
            break
        with tempfile.TemporaryDirectory() as folder:
            with TorchftSide(Path(folder), timeouts, step_s=STEP_S, every=every) as torchft:
                found[name] = play(torchft, **effort).to_dict()
            sys.stderr.write(f"torchft, {name}: {json.dumps(found[name])}\n")
    with tempfile.TemporaryDirectory() as folder:
        with AtollSide(Path(folder), route=arguments.route, step_s=STEP_S, every=every) as side:
            ours = play(side, **effort).to_dict()
            if "trouble" in ours:
                for event in side.events():
                    sys.stderr.write(f"{event['time']:.2f} {event['kind']}: {event['text']}\n")
        sys.stderr.write(f"atoll: {json.dumps(ours)}\n")
    return {
        **ours,
        "route": arguments.route,
        "steps_per_round": every,
        "checkpoint_block_ratio": None if arguments.without_checkpoint else checkpoint_ratio(),
        "torchft": found or None,
    }


def checkpoint_ratio() -> float | None:
    """Return what `bench.checkpoint --quick` measures in a process of its own."""
    command = [sys.executable, "-m", "bench.checkpoint", "--quick"]
    done = subprocess.run(
        command, cwd=ROOT, stdout=subprocess.PIPE, text=True, timeout=CHECKPOINT_TIMEOUT_S,
        check=False,
    )  # fmt: skip
    if done.returncode != 0:
        return None
    return float(json.loads(done.stdout.splitlines()[-1])["checkpoint_block_ratio"])


def rows(result: dict[str, Any]) -> list[dict[str, Any]]:
    """Return a table with a row per figure and a column per side."""
    sides = {f"torchft {name}": found for name, found in (result["torchft"] or {}).items()}
    names = [name for name, value in result.items() if isinstance(value, int | float)]
    return [
        {"figure": name, "atoll": result[name]}
        | {side: found.get(name, "") for side, found in sides.items()}
        for name in names
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="every fault once, shorter rounds")
    parser.add_argument("--route", default="auto", help="auto, direct or relay")
    parser.add_argument("--without-torchft", action="store_true", help="leave its side out")
    parser.add_argument("--without-checkpoint", action="store_true", help="leave that ratio out")
    arguments = parser.parse_args()
    result = measure(arguments)
    emit(result, rows(result))


if __name__ == "__main__":
    main()
