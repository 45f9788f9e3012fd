"""What Atoll does on this machine's accelerator: `python -m bench.accelerator [--quick]`.

    device    the device that jobs get, as `atoll doctor` names it, and how it was measured
    training  the built-in trainer against a bare PyTorch loop, for models of several sizes
    copies    batches copied beside the computation; a round's copies from and to main memory
    job       a job without a word about devices on a hub and a node: log, use of the device, loss
    mixed     one member on the accelerator and one on the processor; each is killed and comes back
    island    an island's step with one rank on the device's own backend, and what two ranks get

Every part runs in a process of its own; a part that fails says why, the others still run. The last
line of stdout is JSON: the parts' results by name. Without an accelerator the parts run on the
processor and show nothing but that they run.
"""

from __future__ import annotations

import argparse
import faulthandler
import importlib
import json
import os
import subprocess
import sys
import time
from typing import Any

from bench.kit.report import emit

PARTS = {"device": 60, "training": 240, "copies": 120, "job": 120, "mixed": 240, "island": 180}
"""Name of a part, a module beside this one -> seconds that it may take."""

LARGE_PAGES = {"THP_MEM_ALLOC_ENABLE": "1"}
"""As processes of jobs get it."""


def run(part: str, *, quick: bool) -> dict[str, Any]:
    """Run a part in a process of its own; return its result, or `error`."""
    command = [sys.executable, "-m", "bench.accelerator", "--part", part, *["--quick"] * quick]
    environment = {**os.environ, **LARGE_PAGES}
    began = time.monotonic()
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=PARTS[part], env=environment
        )
        found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    except subprocess.TimeoutExpired as error:
        found = {"error": f"not done after {PARTS[part]} s", "stderr": str(error.stderr)[-2000:]}
    except (IndexError, ValueError):
        found = {"error": f"exit status {done.returncode}", "stderr": done.stderr[-2000:]}
    return {**found, "took_s": round(time.monotonic() - began, 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer and shorter measurements")
    parser.add_argument("--only", default="", help="names of parts, separated by commas")
    parser.add_argument("--part", default="", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.part:
        faulthandler.dump_traceback_later(PARTS[arguments.part] - 5, exit=True)
        module = importlib.import_module(f"bench.accelerator.{arguments.part}")
        sys.stdout.write(json.dumps(module.measure(quick=arguments.quick)) + "\n")
        return
    wanted = [name for name in arguments.only.split(",") if name] or list(PARTS)
    found: dict[str, Any] = {}
    for part in wanted:
        sys.stderr.write(f"{part} ...\n")
        found[part] = run(part, quick=arguments.quick)
        sys.stderr.write(json.dumps(found[part]) + "\n")
        sys.stderr.flush()
    emit(found, [{"part": name, "seconds": part["took_s"], "error": part.get("error", "")}
                 for name, part in found.items()])  # fmt: skip


if __name__ == "__main__":
    main()
