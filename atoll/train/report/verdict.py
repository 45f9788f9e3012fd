"""The sentence with which a report opens: what the run came to."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from atoll import units

ENDS = {"done": "", "failed": "The run failed. ", "stopped": "The run was stopped. "}


def verdict(summary: Mapping[str, Any]) -> str:
    """Return one or two sentences: how it ended, what was trained, how well, in what time."""
    if not summary:
        return "The run left no summary: it ended before its first measurement."
    end = ENDS.get(str(summary.get("state") or "done"), "The run had not ended yet. ")
    reason = str(summary.get("reason") or "").rstrip(".")
    if end and reason:
        end = f"{end.rstrip('. ')}: {reason}. "
    said = _policies(summary) if summary.get("rl") else _training(summary)
    return f"{end}{said}{_replicas(summary)}"


def _machines(summary: Mapping[str, Any]) -> str:
    count = int(summary.get("nodes") or 1)
    return "One machine" if count == 1 else f"{count} machines"


def _training(summary: Mapping[str, Any]) -> str:
    steps, spent = int(summary.get("steps") or 0), summary.get("wall_s")
    said = f"{_machines(summary)} took {steps:,} steps" if steps else f"{_machines(summary)} worked"
    said += f" in {units.duration(spent)}" if spent else ""
    first, final = summary.get("loss_first"), summary.get("loss_final")
    unit = f" {summary.get('loss_unit', '')}".rstrip()
    if first is not None and final is not None:
        if final == first:
            said += f"; the held-out loss stayed at {final:.3f}{unit}"
        else:
            verb = "fell" if final < first else "rose"
            said += f"; the held-out loss {verb} from {first:.3f} to {final:.3f}{unit}"
    elif final is not None:
        said += f"; the held-out loss is {final:.3f}{unit}"
    if summary.get("accuracy") is not None:
        said += f", and {summary['accuracy']:.1%} of the held-out images are right"
    sent, less = summary.get("bytes_sent_per_node"), summary.get("reduction")
    if sent and int(summary.get("nodes") or 1) > 1:
        said += f". Each sent {units.size(sent)}"
        said += f", {less:,.0f} times less than data parallel training" if less else ""
    return said + "."


def _policies(summary: Mapping[str, Any]) -> str:
    policies = summary["rl"]["policies"]
    first = [p["return_first"] for p in policies]
    last = [p["return_last"] for p in policies]
    rose = sum(a is not None and b is not None and b > a for a, b in zip(first, last, strict=True))
    count = "One policy" if len(policies) == 1 else f"{len(policies)} policies"
    spent = summary.get("wall_s")
    said = f"{count} learned from {summary['rl']['env_steps']:,} steps"
    said += f" in {units.duration(spent)}" if spent else ""
    if len(policies) == 1:
        return said + ("; its return rose." if rose else "; its return did not rise.")
    return f"{said}; the return of {rose} of them rose."


def _replicas(summary: Mapping[str, Any]) -> str:
    separate = (summary.get("strategy") or {}).get("outer") == "alone"
    if summary.get("replicas_identical") is False and not separate:
        return " The members' models differ, which they should not."
    return ""
