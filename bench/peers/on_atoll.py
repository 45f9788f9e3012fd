"""A script of an Atoll job: the same loop through `run.wrap`; FOLDER SYSTEM as arguments."""

from __future__ import annotations

import sys
from pathlib import Path

import atoll
from bench.peers.member import Member
from bench.peers.setting import Setting

FP32, INT8, STREAMING = "atoll fp32", "atoll int8", "atoll streaming"
CODECS = {FP32: "fp32", INT8: "feedback(int8)", STREAMING: "feedback(e3m0)"}
"""That of streaming is the one which the preset `streaming-diloco` brings."""


def outer_of(system: str, setting: Setting) -> object:
    """Return the method: DiLoCo with the same outer step as the others', or the streaming preset.

    The preset is for slow links; all that the setting does not name is left to it.
    """
    if system == STREAMING:
        return atoll.Streaming(every=setting.every)
    return atoll.DiLoCo(
        every=setting.every, outer_lr=setting.outer_lr, outer_momentum=setting.outer_momentum
    )


def main(words: list[str]) -> None:
    """Train to the end."""
    folder, system = words
    with atoll.join() as run:
        member = Member(Path(folder), run.slot)
        optimizer = run.wrap(
            member.model, member.optimizer, outer=outer_of(system, member.setting),
            steps=member.setting.steps, codec=CODECS[system],
        )  # fmt: skip
        member.wait_for_all()
        member.train(optimizer.step, done=lambda: run.step, tokens=run.log)
        run.finish()
        member.end()


if __name__ == "__main__":
    main(sys.argv[1:])
