"""The list of what an installation consists of is complete, and agrees with what is installed."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


def sbom(*extras: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "deploy/sbom.py", *extras], cwd=ROOT, capture_output=True, text=True,
        check=True,
    )  # fmt: skip
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_it_lists_what_is_installed_and_needed() -> None:
    found = sbom()
    assert (found["bomFormat"], found["specVersion"]) == ("CycloneDX", "1.5")
    assert found["metadata"]["component"]["name"] == "atoll"
    listed = {one["name"].lower(): one["version"] for one in found["components"]}
    for name in ("cryptography", "msgspec", "starlette", "h11", "cffi"):
        assert listed[name] == version(name)
    assert "torch" not in listed
    refs = [one["bom-ref"] for one in found["components"]]
    assert len(refs) == len(set(refs))
    graph = {one["ref"]: one["dependsOn"] for one in found["dependencies"]}
    assert {*refs, found["metadata"]["component"]["bom-ref"]} == graph.keys()
    assert {ref for needed in graph.values() for ref in needed} <= graph.keys()


def test_extras_bring_their_distributions() -> None:
    names = {one["name"].lower() for one in sbom("train")["components"]}
    assert {"torch", "numpy", "safetensors"} <= names
