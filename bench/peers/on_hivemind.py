"""DiLoCo over hivemind: local steps, then its decentralized averager on the pseudo-gradients.

`python -m bench.peers.on_hivemind FOLDER SLOT ADDRESS`. The outer step is the same as over plain
Gloo; the averager has its defaults, and knows how large a whole group is. The first member writes
where the others find its DHT.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from bench.peers.member import Member, OuterNesterov

PEERS = "peers.txt"
PATIENCE_S = 120.0


def initial_peers(folder: Path, slot: int) -> list[str]:
    """Return where the first member's DHT is; none for itself."""
    path = folder / PEERS
    while slot and not path.exists():
        time.sleep(0.05)
    return path.read_text(encoding="utf-8").split() if slot else []


def main(words: list[str]) -> None:
    """Train to the end."""
    folder, number, address = Path(words[0]), int(words[1]), words[2]
    import hivemind

    member = Member(folder, number)
    setting = member.setting
    dht = hivemind.DHT(
        initial_peers=initial_peers(folder, number), start=True, use_relay=False, auto_nat=False,
        nat_port_map=False, host_maddrs=[f"/ip4/{address}/tcp/0"],
    )  # fmt: skip
    if number == 0:
        half = folder / f"{PEERS}.part"
        half.write_text("\n".join(map(str, dht.get_visible_maddrs())), encoding="utf-8")
        half.rename(folder / PEERS)
    parameters = list(member.model.parameters())
    outer = OuterNesterov(parameters, lr=setting.outer_lr, momentum=setting.outer_momentum)
    averager = hivemind.averaging.DecentralizedAverager(
        outer.deltas(), dht, start=True, prefix="peers", target_group_size=setting.members
    )
    steps = 0

    def step() -> None:
        nonlocal steps
        member.optimizer.step()
        steps += 1
        if steps % setting.every == 0:
            with averager.get_tensors() as tensors:
                for tensor, delta in zip(tensors, outer.deltas(), strict=True):
                    tensor.copy_(delta)
            met = averager.step(timeout=PATIENCE_S)
            member.note("averaged", members=len(met or ()))
            with averager.get_tensors() as tensors:
                outer.apply([tensor.clone() for tensor in tensors])

    member.wait_for_all()
    member.train(step)
    member.end()
    averager.shutdown()
    dht.shutdown()
    sys.stdout.flush()
    os._exit(0)  # its background threads may outlive it


if __name__ == "__main__":
    main(sys.argv[1:])
