"""What the first rank of an island keeps, in bytes per parameter: as predicted, and no more."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.profiler import ProfilerActivity, profile

from atoll.checkpoint import Extras, OuterState, collect
from atoll.checkpoint.format.disk_image import DiskImage
from atoll.checkpoint.format.part import Part
from atoll.config import JobSpec, parse_spec
from atoll.group.single import SingleGroup
from atoll.island.command_broadcaster import CommandBroadcaster
from atoll.island.world import build_mesh
from atoll.plan.memory import plan_memory
from atoll.strategies.inner.gather_scatter import local_of
from atoll.strategies.inner.sharded_optimizer import AT_ONCE
from atoll.strategies.vectors.flat import iter_tensors
from atoll.task import RemoteState
from atoll.train.build import build
from atoll.train.island.island_trainer import TrainerIsland
from tests.island.pool import Ranks
from tests.island.reference import CPU

JOB = """
[model]
name = "llama"
layers = 3
width = 128
heads = 4
context = 8
vocab_size = 2048
[data]
corpus = "files:{text}"
[train]
batch = 2
steps = 40
[strategy]
outer = "{outer}"
codec = "{codec}"
inner = "{inner}"
every = 2
shared_steps = 0
[island]
ranks = 2
memory = "{memory}"
cuts = {cuts}
"""
DILOCO = {"outer": "diloco", "codec": "int8", "inner": "fsdp", "memory": "ram", "cuts": "[]"}


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file with a little text."""
    path = tmp_path_factory.mktemp("text") / "a.txt"
    path.write_text("All work and no play. " * 400, encoding="utf-8")
    return path


def spec_of(text: Path, **words: str) -> JobSpec:
    return parse_spec(JOB.format(text=text, **(DILOCO | words)))


class Member:
    """The first rank of an island that trains alone, after a round and a step."""

    def __init__(self, spec: JobSpec, island: TrainerIsland, folder: Path) -> None:
        built = build(spec, member="w0", slot=0, num_slots=1)
        self.task, self.outer, self.model = built.task, built.outer, built.model
        island.settle(built, folder=folder)
        self.outer.setup(self.task, group=SingleGroup(), codec=built.codec)
        inner = island.inner()
        batch = next(iter(built.held_out(batch=spec.train.batch)))
        for _ in range(3):
            inner.step(self.task, batch, self.outer)
        del inner, batch


def _led(spec: JobSpec, folder: Path, use: Any) -> Any:
    """Return what `use` finds on each rank: of the first one's member, or of None."""
    broadcaster = CommandBroadcaster(rank=dist.get_rank(), ranks=dist.get_world_size())
    island = TrainerIsland(spec, broadcaster, mesh=build_mesh(spec.mesh, device=CPU), device=CPU)
    if not broadcaster.leads:
        broadcaster.serve()
        return use(None)
    try:
        return use(Member(spec, island, folder))
    finally:
        broadcaster.end()


def _nbytes(tensors: Any) -> int:
    """Return the bytes behind tensors, what several share once."""
    storages = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())


def _alive() -> int:
    """Return the bytes of all tensors of this process."""
    gc.collect()
    found = [o for o in gc.get_objects() if isinstance(o, Tensor)]
    return _nbytes(local_of(t) if isinstance(t, DTensor) else t for t in found if not t.is_meta)


def _held(spec: JobSpec, folder: Path) -> Any:
    def use(member: Member | None) -> Any:
        if member is None:
            return _alive(), 0, 0
        own = {t.untyped_storage()._cdata for t in member.model.parameters()}
        outer = [t for t in iter_tensors([member.outer]) if t.untyped_storage()._cdata not in own]
        return _alive(), _nbytes(member.model.parameters()), _nbytes(outer)

    return _led(spec, folder, use)


@pytest.mark.parametrize("inner", ["fsdp", "pipeline"])
def test_rank_0_holds_its_share_the_host_model_and_outer_state(
    ranks: Ranks, text: Path, tmp_path: Path, inner: str
) -> None:
    # Without cuts a pipeline measures its units: a busy machine may cut elsewhere than planned.
    spec = spec_of(text, inner=inner, cuts="[3]" if inner == "pipeline" else "[]")
    plan = plan_memory(spec)
    found = ranks.run(2, _held, spec, tmp_path)
    first = plan.ranks[0]
    shares = [rank.parameters + rank.optimizer + rank.buffers for rank in plan.ranks]
    (whole, picture, outer), (other, _, _) = found
    assert picture == pytest.approx(first.host_model, rel=0.05)
    assert outer == pytest.approx(first.outer, rel=0.05)
    assert whole == pytest.approx(shares[0] + first.leading, rel=0.05)
    assert other == pytest.approx(shares[1], rel=0.05)
    per_parameter = (whole - shares[0]) / plan.elements
    assert per_parameter == pytest.approx(4 + 8, rel=0.05), "host model, base and momentum"


def _most_allocated(do: Any) -> int:
    """Return by how much the memory of torch's allocator grew at most while something was done."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        do()
    alive = most = 0
    sizes: dict[int, int] = {}
    tree: Any = profiled.profiler
    todo = list(tree.kineto_results.experimental_event_tree())
    events = []
    while todo:
        event = todo.pop()
        todo += event.children
        if event.name == "[memory]":
            events.append((event.start_time_ns, event.extra_fields))
    for _, memory in sorted(events, key=lambda found: found[0]):
        size = int(memory.alloc_size)
        if size > 0:
            sizes[memory.ptr] = size
            alive += size
        else:
            alive -= sizes.pop(memory.ptr, 0)  # what was there before does not count
        most = max(most, alive)
    return most


def _saved(spec: JobSpec, folder: Path) -> Any:
    def use(member: Member | None) -> Any:
        if member is None:
            return None
        parts: list[Part] = []

        def save() -> None:
            member.task.pull()
            outer = OuterState(member.outer.state_dict(), base="0" * 32)
            parts.extend(collect(member.task, outer, Extras()))
            DiskImage(folder).write(parts)

        most = _most_allocated(save)
        whole = member.task.optimizer.state_dict()
        found = [tensor for part in parts for tensor in part.tensors.values()]
        far = [tensor for tensor in found if isinstance(tensor, RemoteState)]
        large = [p for p in member.model.parameters() if p.numel() > AT_ONCE]
        assert len(far) == 2 * len(large), "both moments of every large parameter"
        (path,) = folder.glob(".image-*")
        places, data, exact = 0, path.read_bytes(), True
        for number, state in whole["state"].items():
            for key in ("exp_avg", "exp_avg_sq"):
                exact &= state[key].numpy().tobytes() in data
                places += number >= 0
        return most, max(p.nbytes for p in member.model.parameters()), exact, places

    return _led(spec, folder, use)


def test_a_checkpoint_takes_a_tensor_at_a_time(ranks: Ranks, text: Path, tmp_path: Path) -> None:
    spec = spec_of(text)
    most, largest, exact, places = ranks.run(2, _saved, spec, tmp_path)[0]
    first = plan_memory(spec).ranks[0]
    assert exact, "the file has the very moments"
    assert places > 20
    assert largest <= most <= 1.1 * largest, "one that is put together, not all of them"
    assert most <= first.checkpoint < first.optimizer


def _on_disk(spec: JobSpec, folder: Path) -> Any:
    def use(member: Member | None) -> Any:
        if member is None:
            return None
        member.task.pull()
        numbers = {name: tensor.clone() for name, tensor in member.model.state_dict().items()}
        outer = {name: tensor.clone() for name, tensor in member.outer.state_dict().items()}
        held = [*member.model.parameters(), *iter_tensors([member.outer])]
        mapped = sum(
            t.untyped_storage().nbytes()
            for t in {t.untyped_storage()._cdata: t for t in held}.values()
            if t.untyped_storage().filename is not None
        )
        return numbers, outer, mapped, [path.name for path in folder.iterdir()]

    return _led(spec, folder, use)


def test_on_disk_the_numbers_are_the_same_to_the_bit(
    ranks: Ranks, text: Path, tmp_path: Path
) -> None:
    found = {}
    for memory in ("ram", "disk"):
        folder = tmp_path / memory
        folder.mkdir()
        found[memory] = ranks.run(2, _on_disk, spec_of(text, memory=memory), folder)[0]
    for here, there in zip(found["ram"][:2], found["disk"][:2], strict=True):
        assert here.keys() == there.keys()
        assert all(torch.equal(here[name], there[name]) for name in here)
    model = plan_memory(spec_of(text)).model_bytes
    assert found["ram"][2] == 0
    assert found["disk"][2] == pytest.approx(3 * model, rel=0.05), "host model, base and momentum"
    assert found["disk"][3] == [], "nothing is left behind"


def _refused(spec: JobSpec, folder: Path) -> str:
    try:
        return str(_led(spec, folder, lambda _: ""))
    except Exception as error:
        return str(error)


def test_strategies_that_send_in_every_step_are_refused_on_disk(
    ranks: Ranks, text: Path, tmp_path: Path
) -> None:
    told = ranks.run(2, _refused, spec_of(text, outer="eager", memory="disk"), tmp_path)[0]
    assert "vectors have to be in memory" in told
    assert 'memory = "ram"' in told or "memory = 'ram'" in told
