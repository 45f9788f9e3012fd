"""The example of parameter servers: equal to one process, bounded, and nothing is lost."""

from __future__ import annotations

import functools
import json
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from atoll.config import MeshShape
from atoll.group.single import SingleGroup
from atoll.run import Run
from atoll.run.place import Membership
from tests.e2e.conftest import Atoll, until
from tests.integrations.examples import EXAMPLES, load
from tests.island.conftest import ranks
from tests.island.pool import Ranks
from tests.island.script.kit import enter
from tests.patience import PATIENCE_S

__all__ = ["ranks"]


@pytest.fixture(scope="module")
def example() -> Any:
    return load("embedding_server")


def one_process(example: Any, *, workers: int, steps: int) -> tuple[Tensor, list[float]]:
    """Train table and net in one place, on all workers' batches; return all rows and losses."""
    table = nn.Parameter(example.first_table()[: example.PEOPLE + example.FILMS])
    net, losses = example.make_net(), []
    optimizer = torch.optim.Adagrad([table, *net.parameters()], lr=0.1, eps=1e-10)
    for step in range(steps):
        batches = [example.batch_of(worker, step) for worker in range(workers)]
        ids, likes = (torch.cat(parts) for parts in zip(*batches, strict=True))
        loss = nn.functional.mse_loss(net(table[ids].flatten(1)), likes)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(loss.item())
    return torch.cat([table.detach(), example.as_rows(list(net.parameters()))]), losses


def table_in(folder: Path, *, servers: int) -> Tensor:
    """Return the rows that servers have left behind, in the table's order."""
    parts = [load_file(folder / f"rows-{server}.safetensors") for server in range(servers)]
    rows = torch.cat([part["rows"] for part in parts])
    assert torch.equal(rows.sort().values, torch.arange(len(rows)))
    return torch.cat([part["values"] for part in parts])[rows.argsort()]


def assert_table(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def _train(folder: str, *, steps: int) -> list[float]:
    with enter(MeshShape(shard=2), folder=Path(folder)) as run:
        found: list[float] = load("embedding_server").take_part(run, steps=steps, servers=2)
    return found


@pytest.mark.long(
    "tests/integrations/test_embedding_server.py::test_a_server_and_a_worker_that_die_lose_nothing"
)
def test_ddp_ranks_with_two_servers_equal_one_process(
    ranks: Ranks, tmp_path: Path, example: Any
) -> None:
    first, second = ranks.run(2, functools.partial(_train, str(tmp_path), steps=12))
    expected, losses = one_process(example, workers=1, steps=12)
    assert_table(table_in(tmp_path, servers=2), expected)
    means = [(a + b) / 2 for a, b in zip(first, second, strict=True)]
    torch.testing.assert_close(torch.tensor(means), torch.tensor(losses), rtol=1e-4, atol=1e-5)


def shard_of(example: Any, *, workers: int, staleness: int) -> Any:
    return example.Shard(
        torch.arange(4), torch.zeros(4, 8), workers=workers, staleness=staleness, lr=0.1
    )


def test_workers_are_never_more_than_the_bound_apart(example: Any) -> None:
    shard = shard_of(example, workers=2, staleness=2)
    rows, ones = torch.arange(4), torch.ones(4, 8)
    for clock in range(3):
        shard.write(0, clock, rows, ones)
    shard.apply(set())
    assert shard.applied == [3, 0]
    assert 2 <= shard.slowest(set()) + shard.staleness < 3  # step 2 may be read for, 3 not yet
    shard.write(1, 0, rows, ones)
    shard.apply(set())
    assert shard.slowest(set()) + shard.staleness == 3
    assert shard.slowest({1}) == 3  # one that is away does not hold the others up
    shard.done.add(1)
    assert shard.slowest(set()) == 3


def test_without_staleness_each_step_has_all_gradients(example: Any) -> None:
    shard = shard_of(example, workers=2, staleness=0)
    rows = torch.tensor([1, 3])
    shard.write(0, 0, rows, torch.full((2, 8), 3.0))
    shard.apply(set())
    assert shard.applied == [0, 0]
    assert not shard.values.any()
    shard.write(1, 0, rows[:1], torch.ones(1, 8))
    shard.write(0, 1, rows, torch.ones(2, 8))  # early: it waits for its turn
    shard.apply(set())
    assert shard.applied == [1, 1]
    assert torch.equal(shard.squares[:, 0], torch.tensor([0.0, 4.0, 0.0, 2.25]))
    before = shard.values.clone()
    shard.write(1, 0, rows[:1], torch.ones(1, 8))  # once more, from a worker that has died
    shard.apply(set())
    assert torch.equal(shard.values, before)
    shard.apply({1})  # the other is away: its gradients are not waited for
    assert shard.applied == [2, 1]


class Dead(Exception):
    """A server or worker that ends in the middle, as if it were killed."""


def test_a_server_and_a_worker_that_die_lose_nothing(
    tmp_path: Path, example: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(example, "LEASE_S", 1.0)
    monkeypatch.setattr(example, "SAVE_S", 0.05)
    run = Run(SingleGroup(), Membership(tmp_path))
    run.track(example.make_net())
    options = {"servers": 2, "workers": 1, "staleness": 0, "lr": 0.1}
    steps, failing = 30, [10, 20]

    class Failing(example.Server):  # type: ignore[misc]
        def take(self, item: Any) -> None:
            super().take(item)
            if self.number == 0 and failing and self.shard.applied[0] >= failing[0]:
                failing.pop(0)
                raise Dead

    def keep(number: int) -> None:
        monkeypatch.setattr(example, "Server", Failing)
        while True:
            try:
                example.keep(run, example.start_server(run, number, **options))
                return
            except Dead:
                continue  # another process takes its place, with nothing but what the hub has

    threads = [threading.Thread(target=keep, args=(n,), daemon=True) for n in range(2)]
    for thread in threads:
        thread.start()
    table, send = example.Table, example.Table.write

    def dying(self: Any, rows: Tensor, gradients: Tensor, clock: int) -> None:
        send(self, rows, gradients, clock)
        if clock == 14:
            monkeypatch.setattr(table, "write", send)
            raise Dead

    monkeypatch.setattr(table, "write", dying)
    with pytest.raises(Dead):
        example.work(run, worker=0, servers=2, steps=steps)
    losses = example.work(run, worker=0, servers=2, steps=steps)
    for thread in threads:
        thread.join(PATIENCE_S)
    assert len(losses) == 15  # it went on where it was
    assert not failing
    assert_table(table_in(tmp_path, servers=2), one_process(example, workers=1, steps=steps)[0])


def test_a_server_whose_leases_end_goes_on(
    tmp_path: Path, example: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A laptop that sleeps for longer than a lease."""
    monkeypatch.setattr(example, "LEASE_S", 0.01)
    monkeypatch.setattr(example, "SAVE_S", 0.0)
    save, late = example.Server.save, 0

    def slow(self: Any) -> None:
        nonlocal late
        if late < 3 and self.held:
            holds, again = {held.seq for held in self.held}, False
            while not again:  # what it holds comes again
                items = self.asks.claim(64, lease_s=0.01, wait_s=PATIENCE_S)
                assert items
                again = any(item.seq in holds for item in items)
                for item in items:
                    self.take(item)
            late += 1
            self.shard.apply(set())  # the worker may be done with these
        elif late >= 3:
            monkeypatch.setattr(example, "LEASE_S", PATIENCE_S)
        save(self)

    monkeypatch.setattr(example.Server, "save", slow)
    run = Run(SingleGroup(), Membership(tmp_path))
    found: list[float] = []

    def train() -> None:
        found.extend(example.take_part(run, steps=15, servers=2))

    thread = threading.Thread(target=train, daemon=True)
    thread.start()
    thread.join(PATIENCE_S)
    assert len(found) == 15
    assert late >= 3
    assert_table(table_in(tmp_path, servers=2), one_process(example, workers=1, steps=15)[0])


WHERE = {
    "server": ("server.number == 1", "    server.serve()\n"),
    "worker": ("worker == 1 and step == 20", "        ids, likes = batch_of(worker, step)\n"),
}
"""Where a member waits: a condition, and the line of the example after which it is looked at."""


def holding(folder: Path, when: str, line: str) -> Path:
    """Write the example with a member that waits after a line until it may go on."""
    text = (EXAMPLES / "embedding_server.py").read_text(encoding="utf-8")
    assert text.count(line) == 1
    indent = line[: len(line) - len(line.lstrip())]
    held, free = folder / "held", folder / "free"
    added = (
        f"{indent}if {when}:\n"
        f"{indent}    open({str(held)!r}, 'w').close()\n"
        f"{indent}    while not __import__('os').path.exists({str(free)!r}):\n"
        f"{indent}        time.sleep(0.02)\n"
    )
    path = folder / "held_embedding.py"
    text = text.replace("LEASE_S = 20.0", "LEASE_S = 5.0").replace(line, line + added)
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.e2e
@pytest.mark.long(
    "tests/integrations/test_embedding_server.py::test_a_server_and_a_worker_that_die_lose_nothing"
)
@pytest.mark.parametrize(
    ("place", "killed"),
    [("worker", "w1"), ("server", "w1"), ("worker", "w3")],
    ids=["server-midway", "server-after-all-workers", "worker"],
)
def test_a_job_with_a_killed_member_ends_as_one_process(
    atoll: Atoll, tmp_path: Path, example: Any, place: str, killed: str
) -> None:
    when, line = WHERE[place]
    script, steps = holding(tmp_path, when, line), 40
    running = atoll.start("run", str(script), "--local", "4", "--", "--steps", str(steps))
    until((tmp_path / "held").exists)
    if place == "server":  # the workers have come to their end
        until(lambda: _done(atoll.job_folder()) >= {"w2", "w3"})
    process = atoll.worker(killed)
    process.kill()
    (tmp_path / "free").touch()
    done = running.wait()
    assert done.code == 0, done.both
    table = table_in(atoll.job_folder(), servers=2)
    assert_table(table, one_process(example, workers=2, steps=steps)[0])
    lines = [line for line in done.out.splitlines() if ": loss " in line]
    assert len(lines) == 2


def _done(folder: Path) -> set[str]:
    """Return the members of a job that have reported their end."""
    lines = (folder / "events.jsonl").read_text(encoding="utf-8").splitlines()
    events = [json.loads(line) for line in lines]
    return {event["member"] for event in events if event["kind"] == "member-done"}
