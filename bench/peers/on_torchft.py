"""One replica group of torchft's DiLoCo on Gloo, by its documented interface and with its defaults.

`python -m bench.peers.on_torchft FOLDER SLOT ADDRESS LIGHTHOUSE`. All members begin with the same
weights, which `init_sync=False` says, so nothing is copied at the start.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from bench.peers.member import Member


def main(words: list[str]) -> None:
    """Train to the end."""
    folder, slot, address, lighthouse = words
    from torchft import Manager, ProcessGroupGloo
    from torchft.local_sgd import DiLoCo

    member = Member(Path(folder), int(slot))
    model, inner, setting = member.model, member.optimizer, member.setting

    def load(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        inner.load_state_dict(state["optimizer"])

    def save() -> dict[str, Any]:
        return {"model": model.state_dict(), "optimizer": inner.state_dict()}

    store = TCPStore(address, 0, is_master=True, wait_for_workers=False)
    manager = Manager(
        pg=ProcessGroupGloo(),
        load_state_dict=load,
        state_dict=save,
        min_replica_size=1,
        use_async_quorum=False,
        init_sync=False,
        replica_id=f"peers_{slot}",
        store_addr=address,
        store_port=store.port,
        rank=0,
        world_size=1,
        lighthouse_addr=lighthouse,
        hostname=address,
    )
    outer = torch.optim.SGD(
        model.parameters(), setting.outer_lr, momentum=setting.outer_momentum, nesterov=True
    )
    with DiLoCo(manager, [model], inner, outer, sync_every=setting.every):
        member.wait_for_all()
        member.train(inner.step)
    member.end()
    manager.shutdown(wait=False)


if __name__ == "__main__":
    main(sys.argv[1:])
