"""A user's script on two islands: a rank dies, the job stops, and nothing is left over."""

from __future__ import annotations

import pytest

from tests.e2e.conftest import Atoll, lines_until, ticket_of, until
from tests.e2e.test_islands import START_S, contributors, kill_and_await_return, ranks
from tests.patience import PATIENCE_S

pytestmark = pytest.mark.e2e

SCRIPT = """
import itertools
import time
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
import atoll

with atoll.join() as run:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(8, 9), nn.Tanh(), nn.Linear(9, 3))
    for layer in model[::2]:
        fully_shard(layer, mesh=run.mesh["shard"])
    inner = torch.optim.AdamW(model.parameters(), 1e-2)
    optimizer = run.wrap(model, inner, outer=atoll.DiLoCo(every=20), codec="int8")
    for number in itertools.count():
        if run.stopping:
            break
        time.sleep(0.01)  # the test waits for others, which need the processor
        random = torch.Generator().manual_seed(1000 * run.slot + 2 * number + run.rank)
        x = torch.randn(16, 8, generator=random)
        loss = nn.functional.mse_loss(model(x), x[:, :3].sin())
        optimizer.zero_grad()
        loss.backward()
        run.log(loss=loss, tokens=len(x))
        optimizer.step()
    run.save(model)
    print(f"rank {run.rank} of {run.ranks} ends at a step that {run.step > 0}", flush=True)
"""


@pytest.mark.long(
    "tests/island/script/test_script.py::test_an_island_takes_over_the_state_of_a_process"
)
def test_script_whose_rank_is_killed_takes_the_common_state_over(atoll: Atoll) -> None:
    script = atoll.folder / "train.py"
    script.write_text(SCRIPT)
    hub = atoll.hub()
    for name in ("first", "second"):
        atoll.join(ticket_of(hub), name=name)
    with hub.client() as client:
        until(lambda: len(client.nodes()) == 2)
        running = atoll.start("run", str(script), "--nodes", "2", "--ranks", "2")
        until(lambda: client.jobs() and ranks(atoll, "w1").keys() == {0, 1}, timeout_s=START_S)
        job = client.jobs()[0]["job"]
        until(lambda: ["w0", "w1"] in contributors(client, job, since=0), timeout_s=START_S)
        kill_and_await_return(atoll, client, job, rank=1)
        client.stop(job, grace_s=PATIENCE_S)
        until(lambda: client.job(job)["state"] == "stopped")
        first, second = (member["result"] for member in client.job(job)["members"])
        for rank in (0, 1):
            lines_until(client, job, f"rank {rank} of 2 ends at a step that True", count=2)
    assert first["digest"] == second["digest"] != ""
    assert first["parameters"] == second["parameters"] == 8 * 9 + 9 + 9 * 3 + 3
    running.wait()
    assert (atoll.job_folder() / "model.safetensors").exists()
