"""Processes that have an accelerator: torch's own if there is one, else the pretended one."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.patience import PATIENCE_S

VARIABLE = "PRETENDED_ACCELERATOR"
ROOT = Path(__file__).resolve().parents[2]

Results = dict[str, tuple[str, str]]
"""Name of a test -> how it ended, and what is to be said of it; `*`: the output of all."""


def is_real() -> bool:
    """Return whether the tests of this process run on an accelerator that torch finds by itself."""
    if VARIABLE not in os.environ:
        return False
    import torch

    return torch.accelerator.is_available()


PRETENDED_ONLY = pytest.mark.skipif(
    is_real(), reason="only the pretended accelerator does that: hide the real one to run this test"
)
"""Of tests about what an accelerator lacks, or in which order it is used."""


def run(path: Path, node_ids: list[str]) -> Results:
    """Run tests of one file in a process that has the accelerator."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        ended = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist",
             f"--junit-xml={report}", *node_ids],
            cwd=ROOT, env={**os.environ, VARIABLE: "1"}, text=True, timeout=4 * PATIENCE_S,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False,
        )  # fmt: skip
        found: Results = {"*": ("output", ended.stdout)}
        if report.exists():
            for case in ElementTree.parse(report).iter("testcase"):
                found[case.attrib["name"]] = _ended(case)
    return found


def _ended(case: ElementTree.Element) -> tuple[str, str]:
    for kind, outcome in (("failure", "failed"), ("error", "failed"), ("skipped", "skipped")):
        told = case.find(kind)
        if told is not None:
            return outcome, told.text or told.attrib.get("message", "")
    return "passed", ""


def environment(folder: Path, *, devices: int = 1) -> dict[str, str]:
    """Return variables with which any process that loads torch gets the accelerator.

    It comes as a plug-in of torch, as real ones do: by an entry point of a distribution.

    Args:
        folder: An empty folder for the distribution's description.
        devices: How many accelerators the machine has.
    """
    description = folder / "pretended_accelerator-1.0.dist-info"
    description.mkdir(parents=True, exist_ok=True)
    (description / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: pretended-accelerator\nVersion: 1.0\n"
    )
    (description / "entry_points.txt").write_text(
        "[torch.backends]\npretended = tests.accelerator.registration:register\n"
    )
    places = [str(folder), str(ROOT), os.environ.get("PYTHONPATH", "")]
    return {
        "PYTHONPATH": os.pathsep.join(place for place in places if place),
        "PRETENDED_DEVICES": str(devices),
    }
