"""What `atoll logs` prints: a job's output without the libraries' own messages, and rounds."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from atoll.ids import machine_names, spoken

LIBRARIES = (
    "absl", "accelerate", "asyncio", "atoll", "datasets", "distributed", "filelock", "fsspec",
    "gymnasium", "h5py", "httpcore", "httpx", "huggingface_hub", "jax", "lightning", "matplotlib",
    "numexpr", "peft", "pytorch_lightning", "tensorflow", "torch", "transformers", "urllib3",
    "websockets",
)  # fmt: skip
"""Packages whose own messages below WARNING are of no interest to the owner of a script."""

_RECORD = re.compile(r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} (?P<level>[A-Z]+) (?P<logger>[\w.]+) ")
"""A line of a member's log, as `logging` is set up for workers."""

_CPP = re.compile(r"^(\[rank\d+\]:)?\[[IW]\d{4} \d\d:\d\d:\d\d|^[IW]\d{4} \d\d:\d\d:\d\d")
"""A line of torch's or another library's C++ log, information or warning."""

_WARNING = re.compile(r"(site|dist)-packages[/\\].*: \w*Warning: ")
"""A Python warning about a line of an installed package; the next line quotes it."""


class Chatter:
    """Recognizes the lines of libraries in members' output; takes each member's lines in order."""

    def __init__(self) -> None:
        self._quotes: dict[str, bool] = {}
        """By member: whether a quoted line follows."""

    def is_chatter(self, line: Mapping[str, Any]) -> bool:
        """Return whether a line says nothing about the job."""
        member, text = str(line["member"]), str(line["text"])
        quoted = self._quotes.pop(member, False) and text.startswith("  ")
        if _WARNING.search(text):
            self._quotes[member] = True
            return True
        return quoted or bool(_CPP.match(text)) or _says_little(text)

    def without(self, lines: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return the lines that are not chatter."""
        return [line for line in lines if not self.is_chatter(line)]


def _says_little(text: str) -> bool:
    record = _RECORD.match(text)
    if record is None or record["level"] not in ("DEBUG", "INFO"):
        return False
    return record["logger"].partition(".")[0] in LIBRARIES


def round_line(decided: Mapping[str, Any], nodes: Mapping[str, str]) -> str:
    """Return one line about a round: its loss over the members, theirs, steps and seconds.

    Args:
        decided: What the hub wrote of it.
        nodes: The machine of each member.
    """
    number = int(decided["round"]) + 1
    if not decided["committed"]:
        why = spoken(str(decided.get("reason") or "no reason is known"), nodes)
        return f"round {number} was not committed: {why}"
    rows = [row for row in decided.get("timeline") or () if row.get("loss") is not None]
    parts = [f"round {number}"]
    if rows:
        mean = sum(float(row["loss"]) for row in rows) / len(rows)
        names = machine_names(nodes)
        own = ", ".join(
            f"{names.get(row['member'], row['member'])} {float(row['loss']):.3f}" for row in rows
        )
        parts.append(f"loss {mean:.3f}" + (f" ({own})" if len(rows) > 1 else ""))
    steps = max((int(row.get("steps") or 0) for row in decided.get("timeline") or ()), default=0)
    if steps:
        parts.append(f"{steps} step{'s' if steps > 1 else ''}")
    if spent := _seconds(decided.get("timeline") or ()):
        parts.append(f"{spent:.1f} s")
    return "  ".join(parts)


def _seconds(rows: Sequence[Mapping[str, Any]]) -> float:
    """Return how long the slowest member took, from its first step to the commit."""
    phases = ("compute_s", "wait_s", "send_s", "vote_s")
    return max((sum(float(row.get(p) or 0.0) for p in phases) for row in rows), default=0.0)
