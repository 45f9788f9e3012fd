"""A member that never meets the others: `python -m bench.peers.alone FOLDER SLOT`."""

from __future__ import annotations

import sys
from pathlib import Path

from bench.peers.member import Member


def main(words: list[str]) -> None:
    """Train to the end."""
    member = Member(Path(words[0]), int(words[1]))
    member.wait_for_all()
    member.train(member.optimizer.step)
    member.end()


if __name__ == "__main__":
    main(sys.argv[1:])
