"""What determines the bits of a step: members that report the same text compute the same."""

from __future__ import annotations

import hashlib
import platform

import torch


def arithmetic(data_digest: str) -> str:
    """Return processor type, library versions, threads and the digest of the data, as one text."""
    kind = torch.backends.cpu.get_cpu_capability()
    parts = (
        f"torch {torch.__version__}", platform.machine(), kind,
        f"{torch.get_num_threads()} threads", f"data {data_digest[:12]}",
    )  # fmt: skip
    return ", ".join(parts)


def seed_step(seed: int, *, round_: int, slot: int, step: int) -> None:
    """Seed the random numbers of one step (dropout), so that no member can choose them.

    Args:
        seed: Of the job.
        round_: Number of the round.
        slot: Data slot of the member.
        step: Steps of the period that are done.
    """
    text = f"step {seed} {round_} {slot} {step}".encode()
    torch.manual_seed(int.from_bytes(hashlib.blake2b(text, digest_size=7).digest(), "little"))
