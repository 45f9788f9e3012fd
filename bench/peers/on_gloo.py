"""DiLoCo as one writes it by hand: pseudo-gradients, one `all_reduce` of Gloo, an outer step.

`python -m bench.peers.on_gloo FOLDER SLOT ADDRESS PORT`: where the first member keeps the store.
"""

from __future__ import annotations

import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from bench.peers.member import Member, OuterNesterov

PATIENCE = timedelta(seconds=120)


def main(words: list[str]) -> None:
    """Train to the end; a lost member ends all others."""
    folder, slot, address, port = words
    member = Member(Path(folder), int(slot))
    setting = member.setting
    dist.init_process_group(
        "gloo", init_method=f"tcp://{address}:{port}", rank=int(slot), world_size=setting.members,
        timeout=PATIENCE,
    )  # fmt: skip
    parameters = list(member.model.parameters())
    outer = OuterNesterov(parameters, lr=setting.outer_lr, momentum=setting.outer_momentum)
    steps = 0

    def step() -> None:
        nonlocal steps
        member.optimizer.step()
        steps += 1
        if steps % setting.every == 0:
            sent = torch.cat([delta.flatten() for delta in outer.deltas()])
            dist.all_reduce(sent)
            means = torch.split(sent / setting.members, [each.numel() for each in parameters])
            outer.apply([m.view_as(each) for m, each in zip(means, parameters, strict=True)])

    dist.barrier()
    member.wait_for_all()
    member.train(step)
    member.end()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1:])
