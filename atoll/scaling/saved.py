"""A fitted law as a file, which other commands read: `scaling.json`."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

from atoll.errors import ConfigError
from atoll.scaling.fit import Fit, HeldOut
from atoll.scaling.laws import laws_of
from atoll.scaling.points import Point

NAME = "scaling.json"
VERSION = 1


def to_dict(fit: Fit) -> dict[str, Any]:
    """Return everything of a fit as plain values; `from_dict` turns it back."""
    held_out = fit.held_out
    return {
        "version": VERSION,
        "law": {
            "variables": list(fit.law.variables),
            "shape": fit.law.shape,
            "equation": f"L = {fit.law.equation}",
        },
        "constants": fit.constants(),
        "intervals_90": {name: list(fit.interval(name)) for name in fit.theta},
        "left_out_error": fit.score,
        "held_out": {
            **dataclasses.asdict(held_out),
            "mean_error": held_out.mean_error,
            "worst_error": held_out.worst_error,
        }
        if held_out
        else None,
        "held_out_note": fit.held_out_note,
        "ranges": {name: list(ends) for name, ends in fit.ranges.items()},
        "counted": fit.counted,
        "notes": list(fit.notes),
        "tried": list(fit.others),
        "points": [dataclasses.asdict(point) for point in fit.points],
        "theta": fit.theta,
        "residuals": fit.residuals,
        "samples": fit.samples,
    }


def from_dict(found: dict[str, Any]) -> Fit:
    """Return the fit of `to_dict`.

    Raises:
        ConfigError: something is missing or of another version.
    """
    try:
        if found["version"] != VERSION:
            raise ValueError(f"version {found['version']}")
        law = next(
            law for law in laws_of(found["law"]["variables"]) if law.shape == found["law"]["shape"]
        )
        held_out = found["held_out"]
        if held_out is not None:
            fields = {field.name for field in dataclasses.fields(HeldOut)}
            held_out = HeldOut(
                **{key: value for key, value in held_out.items() if key in fields - {"runs"}},
                runs=tuple(held_out["runs"]),
            )
        theta = {name: float(found["theta"][name]) for name in (*law.constants, *law.exponents)}
        if not all(math.isfinite(value) for value in theta.values()):
            raise ValueError("constants that are not finite")
        return Fit(
            law=law, theta=theta,
            samples={name: [float(x) for x in found["samples"][name]] for name in theta},
            residuals=[float(x) for x in found["residuals"]],
            points=tuple(Point(**point) for point in found["points"]),
            score=float(found["left_out_error"]), others=tuple(found["tried"]), held_out=held_out,
            held_out_note=str(found["held_out_note"]), counted=str(found["counted"]),
            notes=tuple(found["notes"]),
        )  # fmt: skip
    except (KeyError, TypeError, ValueError, StopIteration) as error:
        raise ConfigError(
            "this is no fitted law", given=repr(error)[:200],
            expected=f"a {NAME} of `atoll scaling fit`", remedy="fit the runs again",
        ) from error  # fmt: skip


def write_fit(path: Path, fit: Fit) -> Path:
    """Write a fit; folders are made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(to_dict(fit), indent=1) + "\n", encoding="utf-8", newline="\n")
    return path


def read_fit(path: Path) -> Fit:
    """Return a fit that was written.

    Raises:
        ConfigError: the file cannot be read or holds no fit.
    """
    try:
        found = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError("a fitted law cannot be read", given=f"{path} ({error})") from error
    if not isinstance(found, dict):
        raise ConfigError("this is no fitted law", given=str(path))
    return from_dict(found)
