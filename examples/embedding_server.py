"""Parameter servers beside DDP workers: a table of embeddings that no worker holds.

Alone:                          python examples/embedding_server.py
On this machine, four members:  atoll run examples/embedding_server.py --local 4
Workers of two ranks each:      atoll run examples/embedding_server.py --local 4 --ranks 2
Workers up to 3 steps apart:    atoll run examples/embedding_server.py --local 4 -- --staleness 3

The first members are servers, each with the rows of the table that its hash gives it; the others
are workers. A worker asks the servers for the rows that its batch needs, computes, and sends the
rows' gradients back; servers step with Adagrad. What workers share besides, a small net, is rows of
the same table that every batch needs. The ranks of a worker compute on parts of its batch, with
torch's DDP; the first one asks for all.

Questions are items of a queue per server, answers entries of a topic per worker. A server says that
gradients are done only when a state that contains them is saved, so when it dies, the next one has
that state and gets the others again. A worker that dies asks where it was. The task: how much a
person likes a film, from the ratings of 200 people and 100 films.
"""

from __future__ import annotations

import argparse
import contextlib
import secrets
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import atoll
from atoll.errors import HubError
from atoll.queues import Item, Topic

dist: Any = torch.distributed
PEOPLE, FILMS, WIDTH = 200, 100, 8
BATCH = 64
READ, WRITE, HELLO, DONE = range(4)
LEASE_S = 20.0
"""How long a server's items are kept from its successor when it dies."""
SAVE_S = 2.0
AWAY_S = 30.0
"""Nobody waits for a worker that was silent for so long."""


def make_net() -> nn.Module:
    net = nn.Sequential(nn.Linear(2 * WIDTH, 16), nn.Tanh(), nn.Linear(16, 1))
    random = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.copy_(0.3 * torch.randn(parameter.shape, generator=random))
    return net


def as_rows(tensors: list[Tensor]) -> Tensor:
    """Return numbers of any shape as rows of the table; the last one is filled up with zeros."""
    flat = torch.cat([tensor.detach().flatten() for tensor in tensors])
    return nn.functional.pad(flat, (0, -len(flat) % WIDTH)).view(-1, WIDTH)


def first_table() -> Tensor:
    """Return all rows before training: people, films, and the net."""
    random = torch.Generator().manual_seed(7)
    rows = 0.3 * torch.randn(PEOPLE + FILMS, WIDTH, generator=random)
    return torch.cat([rows, as_rows(list(make_net().parameters()))])


def batch_of(worker: int, clock: int) -> tuple[Tensor, Tensor]:
    """Return people and films, (BATCH, 2) row numbers, and how they like them, (BATCH, 1)."""
    easy = torch.randn(PEOPLE + FILMS, generator=torch.Generator().manual_seed(1))
    random = torch.Generator().manual_seed(1_000 * worker + clock % 150 + 2)
    people = torch.randint(PEOPLE, (BATCH,), generator=random)
    films = PEOPLE + torch.randint(FILMS, (BATCH,), generator=random)
    likes = (easy[people] + easy[films]).tanh()  # some like much, some films are liked by many
    return torch.stack([people, films], dim=1), likes[:, None]


def server_of(rows: Tensor, servers: int) -> Tensor:
    """Return which server has each row."""
    return (rows * 2_654_435_761 % 2**32 >> 16) % servers


# ---------------------------------------------------------------------------------- servers


@dataclass
class Shard:
    """The rows of one server, and how far each worker has come. Pure: no queues, no clock."""

    mine: Tensor
    """Numbers of its rows, ascending."""
    values: Tensor
    workers: int
    staleness: int
    lr: float
    squares: Tensor = field(init=False)
    """Adagrad's sums."""
    applied: list[int] = field(init=False)
    """Steps of each worker that are in the values."""
    done: set[int] = field(default_factory=set)
    waiting: dict[tuple[int, int], tuple[Tensor, Tensor]] = field(default_factory=dict)
    """(Worker, its step) -> rows and gradients that were not applied yet."""

    def __post_init__(self) -> None:
        self.squares = torch.zeros_like(self.values)
        self.applied = [0] * self.workers

    def slowest(self, away: set[int]) -> int:
        """Return the step of the slowest worker that is waited for."""
        there = [n for w, n in enumerate(self.applied) if w not in away | self.done]
        return min(there, default=max(self.applied))

    def write(self, worker: int, clock: int, rows: Tensor, gradients: Tensor) -> None:
        """Take the gradients of a step; one that is in the values already is left out."""
        if clock >= self.applied[worker]:
            self.waiting[worker, clock] = (rows, gradients)

    def apply(self, away: set[int]) -> None:
        """Step with what is there: all workers' gradients at once, or each one's as they come."""
        while True:
            now = self.slowest(away)
            turn = [w for w in range(self.workers) if (w, self.applied[w]) in self.waiting]
            if self.staleness == 0:
                turn = [w for w in turn if self.applied[w] == now]
                there = set(range(self.workers)) - away - self.done
                if not there <= set(turn):
                    return
            if not turn:
                return
            total = torch.zeros_like(self.values)
            for worker in turn:
                rows, gradients = self.waiting.pop((worker, self.applied[worker]))
                total.index_add_(0, torch.searchsorted(self.mine, rows), gradients / self.workers)
                self.applied[worker] += 1
            self.squares.addcmul_(total, total)
            self.values.addcdiv_(total, self.squares.sqrt() + 1e-10, value=-self.lr)

    def read(self, rows: Tensor) -> Tensor:
        return self.values[torch.searchsorted(self.mine, rows)]


@contextlib.contextmanager
def late_is_fine() -> Iterator[None]:
    """Go on if leases have ended: this computer slept, and the items are delivered once more.

    Gradients that are in the values are then left out, and a second answer is not read.
    """
    try:
        yield
    except HubError as error:
        print(f"a server was late: {error}", flush=True)


class Server:
    """Answers what workers ask of one shard."""

    def __init__(self, run: atoll.Run, number: int, shard: Shard) -> None:
        self.run, self.number, self.shard = run, number, shard
        self.asks = run.queue(f"asks-{number}", max_items=10_000, max_attempts=1_000)
        self.saved = run.topic(f"saved-{number}", max_items=2)
        self.answers: dict[int, Topic] = {}
        self.reads: list[tuple[Item, int, int, int, Tensor]] = []
        self.held: list[Item] = []
        """Gradients that no saved state contains."""
        self.heard = [time.monotonic() + AWAY_S] * shard.workers
        self.saved_at = time.monotonic()
        newest = self.saved.subscribe(secrets.token_hex(4), start="oldest").newest()
        if newest is not None:
            state = newest.value
            shard.values, shard.squares = state["values"].clone(), state["squares"].clone()
            shard.applied = state["applied"].tolist()
            shard.done = {w for w in range(shard.workers) if bool(state["done"][w])}

    def serve(self) -> None:
        while not self.run.stopping and len(self.shard.done) < self.shard.workers:
            for item in self.asks.claim(64, lease_s=LEASE_S, wait_s=0.5):
                self.take(item)
            now = time.monotonic()
            away = {w for w, at in enumerate(self.heard) if now > at + AWAY_S}
            self.shard.apply(away)
            self.answer(away)
            if now > self.saved_at + SAVE_S:
                self.save()
        self.save()

    def take(self, item: Item) -> None:
        asked = item.value
        kind, worker, clock, number = asked["about"].tolist()
        self.heard[worker] = time.monotonic()
        if kind in (READ, HELLO):
            self.reads.append((item, worker, clock, number, asked["rows"]))
            return
        if kind == WRITE:
            self.shard.write(worker, clock, asked["rows"], asked["gradients"])
        else:
            self.shard.done.add(worker)
        self.held.append(item)

    def answer(self, away: set[int]) -> None:
        """Answer those who are not too far ahead of the slowest; the others wait."""
        bound = self.shard.slowest(away) + self.shard.staleness
        ready = [read for read in self.reads if read[2] <= bound]
        self.reads = [read for read in self.reads if read[2] > bound]
        for _, worker, _, number, rows in ready:
            self.tell(worker, number, self.shard.read(rows))
        if ready:
            with late_is_fine():
                self.asks.ack([read[0] for read in ready])

    def tell(self, worker: int, number: int, values: Tensor) -> None:
        if worker not in self.answers:
            self.answers[worker] = self.run.topic(f"answers-{worker}", max_items=100)
        about = torch.tensor([self.number, number, self.shard.applied[worker]])
        version = torch.tensor(sum(self.shard.applied))
        self.answers[worker].publish_later({"about": about, "version": version, "values": values})

    def save(self) -> None:
        """Keep the state at the hub; then gradients that are in it are done, others are kept on."""
        shard = self.shard
        done = torch.tensor([w in shard.done for w in range(shard.workers)])
        self.saved.publish(
            {
                "values": shard.values, "squares": shard.squares, "done": done,
                "applied": torch.tensor(shard.applied),
            }
        )  # fmt: skip
        keep = set(shard.waiting)
        places = [tuple(item.value["about"].tolist()[1:3]) for item in self.held]
        finished = [i for i, at in zip(self.held, places, strict=True) if at not in keep]
        self.held = [i for i, at in zip(self.held, places, strict=True) if at in keep]
        if finished:
            with late_is_fine():
                self.asks.ack(finished)
        if waiting := [*self.held, *(read[0] for read in self.reads)]:
            with late_is_fine():
                self.asks.extend(waiting, lease_s=LEASE_S)
        self.saved_at = time.monotonic()


# ---------------------------------------------------------------------------------- workers


class Table:
    """The whole table, as a worker's first rank sees it."""

    def __init__(self, run: atoll.Run, *, worker: int, servers: int) -> None:
        self.worker, self.servers = worker, servers
        options = {"max_items": 10_000, "max_attempts": 1_000}
        self.asks = [run.queue(f"asks-{server}", **options) for server in range(servers)]
        answers = run.topic(f"answers-{worker}", max_items=100)
        self.answers = answers.subscribe(f"{run.member} {secrets.token_hex(4)}", start="new")
        self.number = secrets.randbits(40)
        self.version = 0
        """Steps of all workers in the oldest of the last answers."""

    def read(self, rows: Tensor, clock: int) -> Tensor:
        """Return rows of the table; waits while this worker is too far ahead of the others."""
        at, values = server_of(rows, self.servers), torch.empty(len(rows), WIDTH)
        parts = [rows[at == server] for server in range(self.servers)]
        for server, (_, found) in self._ask(READ, clock, parts).items():
            values[at == server] = found
        return values

    def write(self, rows: Tensor, gradients: Tensor, clock: int) -> None:
        """Send gradients of rows; returns when they are durable."""
        at = server_of(rows, self.servers)
        sent = []
        for server, asks in enumerate(self.asks):
            about = torch.tensor([WRITE, self.worker, clock, 0])
            part = {
                "about": about,
                "rows": rows[at == server],
                "gradients": gradients[at == server],
            }
            sent.append(asks.put_later(part))
        for put in sent:
            put.result(60.0)

    def clock(self) -> int:
        """Return which step this worker does next: it may have died in the middle."""
        told = self._ask(HELLO, -1, [torch.empty(0, dtype=torch.int64)] * self.servers)
        return min(applied for applied, _ in told.values())

    def finish(self) -> None:
        """Tell the servers that this worker is done."""
        for asks in self.asks:
            asks.put({"about": torch.tensor([DONE, self.worker, -1, 0])})

    def _ask(self, kind: int, clock: int, parts: list[Tensor]) -> dict[int, tuple[int, Tensor]]:
        self.number += 1
        for asks, rows in zip(self.asks, parts, strict=True):
            about = torch.tensor([kind, self.worker, clock, self.number])
            asks.put_later({"about": about, "rows": rows})
        found: dict[int, tuple[int, Tensor]] = {}
        versions = []
        while len(found) < self.servers:
            for entry in self.answers.read(self.servers, wait_s=5.0):
                server, number, applied = entry.value["about"].tolist()
                if number == self.number:
                    found[server] = (applied, entry.value["values"])
                    versions.append(int(entry.value["version"]))
        self.version = min(versions)
        return found


def work(run: atoll.Run, *, worker: int, servers: int, steps: int) -> list[float]:
    """Train on every rank of a worker; return this rank's losses."""
    net = make_net()
    module = net
    if run.ranks > 1:
        module = DistributedDataParallel(net, process_group=run.mesh.get_group("shard"))
    table = Table(run, worker=worker, servers=servers) if run.rank == 0 else None
    clock = shared(run, torch.tensor(table.clock() if table else 0))
    dense = torch.arange(PEOPLE + FILMS, len(first_table()))
    losses = []
    for step in range(int(clock), steps):
        ids, likes = batch_of(worker, step)
        needed, places = torch.unique(ids, return_inverse=True)
        rows = torch.cat([needed, dense])
        values = table.read(rows, step) if table else torch.empty(len(rows), WIDTH)
        values = shared(run, values)
        own = slice(run.rank, None, run.ranks)
        embedded = values[: len(needed)].clone().requires_grad_()
        nn.utils.vector_to_parameters(values[len(needed) :].flatten(), net.parameters())
        net.zero_grad()
        loss = nn.functional.mse_loss(module(embedded[places[own]].flatten(1)), likes[own])
        loss.backward()  # type: ignore[no-untyped-call]
        gradient = embedded.grad if embedded.grad is not None else torch.zeros_like(embedded)
        if run.ranks > 1:
            dist.all_reduce(gradient)
            gradient /= run.ranks
        if table:
            own_net = as_rows([p.grad for p in net.parameters() if p.grad is not None])
            table.write(rows, torch.cat([gradient, own_net]), step)
            run.log(version=float(table.version))
        run.log(loss=loss, tokens=len(likes[own]))
        run.stepped()
        losses.append(loss.item())
        if run.stopping:
            return losses
    if table:
        table.finish()
    return losses


def shared(run: atoll.Run, tensor: Tensor) -> Tensor:
    """Return the first rank's tensor on every rank."""
    if run.ranks > 1:
        dist.broadcast(tensor, src=0)
    return tensor


# ------------------------------------------------------------------------------------- roles


def start_server(run: atoll.Run, number: int, *, servers: int, **options: Any) -> Server:
    """Return a server with its rows as they are before training; `options` are those of Shard."""
    table = first_table()
    mine = torch.nonzero(server_of(torch.arange(len(table)), servers) == number)[:, 0]
    return Server(run, number, Shard(mine, table[mine].clone(), **options))


def keep(run: atoll.Run, server: Server) -> None:
    """Serve to the end, then bring the rows to the hub."""
    server.serve()
    name = f"rows-{server.number}.safetensors"
    save_file({"rows": server.shard.mine, "values": server.shard.values}, run.directory / name)
    run.publish(run.directory / name, name)


def take_part(
    run: atoll.Run, *, steps: int, servers: int, staleness: int = 0, lr: float = 0.1
) -> list[float]:
    """Be a server or a worker, or alone both; return the losses of a worker."""
    run.track(make_net())
    _ = run.mesh if run.ranks > 1 else None  # the ranks meet
    alone = run.num_slots == 1
    workers = 1 if alone else run.num_slots - servers
    options: dict[str, Any] = {
        "servers": servers, "workers": workers, "staleness": staleness, "lr": lr,
    }  # fmt: skip
    if not alone and run.slot < servers:
        if run.rank == 0:
            keep(run, start_server(run, run.slot, **options))
        return []
    beside = [start_server(run, n, **options) for n in range(servers) if alone and run.rank == 0]
    threads = [threading.Thread(target=keep, args=(run, s), daemon=True) for s in beside]
    for thread in threads:
        thread.start()
    worker = 0 if alone else run.slot - servers
    losses = work(run, worker=worker, servers=servers, steps=steps)
    for thread in threads:
        thread.join()
    return losses


def main() -> None:
    parser = argparse.ArgumentParser(description="Train embeddings that servers hold.")
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--servers", type=int, default=2)
    parser.add_argument("--staleness", type=int, default=0, help="steps that workers may be apart")
    words = parser.parse_args()
    with atoll.join() as run:
        losses = take_part(run, steps=words.steps, servers=words.servers, staleness=words.staleness)
        if losses and run.rank == 0:
            first, last = losses[:10], losses[-10:]
            told = f"loss {sum(first) / len(first):.3f} -> {sum(last) / len(last):.3f}"
            print(f"{run.member}: {told}", flush=True)


if __name__ == "__main__":
    main()
