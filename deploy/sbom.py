"""Write what an installation consists of as a CycloneDX 1.5 document: `python deploy/sbom.py`.

It lists the installed distributions that `atoll` needs, with those of the extras that are named:
`python deploy/sbom.py train store > sbom.json`. Nothing is looked up: what is not installed is not
listed.
"""

from __future__ import annotations

import datetime
import json
import sys
import uuid
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = "atoll"


def needed(found: Distribution, extras: frozenset[str]) -> dict[str, frozenset[str]]:
    """Return the distributions that one needs on this system, with the extras wanted of each."""
    wanted: dict[str, frozenset[str]] = {}
    for text in found.requires or ():
        one = Requirement(text)
        environments = [{"extra": extra} for extra in ("", *extras)]
        if one.marker is None or any(map(one.marker.evaluate, environments)):
            name = canonicalize_name(one.name)
            wanted[name] = wanted.get(name, frozenset()) | one.extras
    return wanted


def closure(extras: frozenset[str]) -> tuple[dict[str, Distribution], dict[str, set[str]]]:
    """Return every installed distribution that is needed, and which ones each of them needs."""
    found: dict[str, Distribution] = {}
    edges: dict[str, set[str]] = {}
    done: dict[str, frozenset[str]] = {}
    todo = {ROOT: extras}
    while todo:
        name, own = todo.popitem()
        if name in done and own <= done[name]:
            continue
        done[name] = done.get(name, frozenset()) | own
        try:
            found[name] = distribution(name)
        except PackageNotFoundError:
            continue
        for other, more in needed(found[name], done[name]).items():
            edges.setdefault(name, set()).add(other)
            todo[other] = todo.get(other, frozenset()) | more
    return found, edges


def component(name: str, found: Distribution) -> dict[str, Any]:
    """Return one component."""
    told = found.metadata
    license_ = told.get("License-Expression") or told.get("License") or ""
    entry: dict[str, Any] = {
        "type": "application" if name == ROOT else "library",
        "bom-ref": f"pkg:pypi/{name}@{found.version}",
        "name": told["Name"],
        "version": found.version,
        "purl": f"pkg:pypi/{name}@{found.version}",
    }
    if license_ and len(license_) < 100:
        entry["licenses"] = [{"license": {"name": license_}}]
    return entry


def document(extras: frozenset[str]) -> dict[str, Any]:
    """Return the whole document."""
    found, edges = closure(extras)
    components = {name: component(name, one) for name, one in sorted(found.items())}
    refs = {name: entry["bom-ref"] for name, entry in components.items()}
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.5",
        "serialNumber": f"urn:uuid:{uuid.uuid4()}",
        "version": 1,
        "metadata": {
            "timestamp": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "component": components.pop(ROOT),
        },
        "components": list(components.values()),
        "dependencies": [
            {
                "ref": ref,
                "dependsOn": sorted(refs[o] for o in edges.get(name, ()) if o in refs),
            }
            for name, ref in refs.items()
        ],
    }


if __name__ == "__main__":
    sys.stdout.write(json.dumps(document(frozenset(sys.argv[1:])), indent=1) + "\n")
