"""One replica group of torchft's DiLoCo on Gloo, through its documented interface.

`python -m bench.recovery.with_torchft FOLDER MEMBER LIGHTHOUSE STEP_S EVERY TIMEOUT_S`; a timeout
of 0 leaves torchft's own defaults.
"""

from __future__ import annotations

import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from bench.recovery.training import (
    OUTER_LR,
    OUTER_MOMENTUM,
    Notes,
    load_lazy_parts,
    make_model,
    train,
)


def main(words: list[str]) -> None:
    """Be one group of one process until killed."""
    folder, member, lighthouse, step_s, every, timeout_s = words
    notes = Notes(Path(folder), member)
    from torchft import Manager, ProcessGroupGloo
    from torchft.local_sgd import DiLoCo

    load_lazy_parts()
    notes.add("imports")
    number = int(member[1:])
    model, optimizer = make_model(number + 1)

    def load(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        notes.add("recovered")

    def save() -> dict[str, Any]:
        return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}

    limit = timedelta(seconds=float(timeout_s))
    limits = {"timeout": limit, "connect_timeout": limit} if limit else {}
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    group = ProcessGroupGloo(timeout=limit) if limit else ProcessGroupGloo()
    manager = Manager(
        pg=group,
        load_state_dict=load,
        state_dict=save,
        min_replica_size=1,
        use_async_quorum=False,
        replica_id=f"bench_{number}",
        store_addr="localhost",
        store_port=store.port,
        rank=0,
        world_size=1,
        lighthouse_addr=lighthouse,
        hostname="localhost",
        **limits,
    )
    outer = torch.optim.SGD(model.parameters(), lr=OUTER_LR, momentum=OUTER_MOMENTUM, nesterov=True)
    with DiLoCo(manager, [model], optimizer, outer, sync_every=int(every)):
        notes.add("ready", round=manager.current_step())
        train(
            model,
            optimizer,
            notes=notes,
            step_s=float(step_s),
            committed=manager.current_step,
            members=manager.num_participants,
            stopping=lambda: False,
            seed=number,
        )


if __name__ == "__main__":
    main(sys.argv[1:])
