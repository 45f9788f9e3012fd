"""Copies between main memory and a device, overlapped with computation where it can do that."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from atoll.devices.choose import CPU

STREAMS = ("cuda", "xpu")
"""Kinds of device that copy beside the computation: from page-locked memory, in a stream."""


def copies_beside(device: torch.device) -> bool:
    """Return whether a device copies from and to main memory while it computes."""
    return device.type in STREAMS


def placed(values: Any, device: torch.device) -> Any:
    """Return values with every tensor on a device: in tuples, lists, mappings; else unchanged.

    The copy may still run when this returns: only work of this device's current stream may use
    it. Tensors that are there already are not copied.
    """
    if isinstance(values, Tensor):
        return _placed(values, device)
    if isinstance(values, PackedSequence):  # torch wants its batch sizes in main memory
        data, *orders = (
            placed(part, device)
            for part in (values.data, values.sorted_indices, values.unsorted_indices)
        )
        return PackedSequence(data, values.batch_sizes, *orders)
    if isinstance(values, Mapping):
        parts = {key: placed(value, device) for key, value in values.items()}
        if isinstance(values, defaultdict):
            return type(values)(values.default_factory, parts)
        return parts if type(values) is dict else type(values)(parts)  # type: ignore[call-arg]
    if isinstance(values, tuple | list):
        found = [placed(value, device) for value in values]
        named = isinstance(values, tuple) and hasattr(values, "_fields")
        return type(values)(*found) if named else type(values)(found)
    return values


def _placed(tensor: Tensor, device: torch.device) -> Tensor:
    if tensor.device == device:
        return tensor
    if tensor.device.type == CPU and copies_beside(device):
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


STAGE_BYTES = 32 << 20
"""Page-locked memory of one of the two stages between main memory and a device."""


@torch.no_grad()
def copy_tensors(to: Sequence[Tensor], of: Sequence[Tensor]) -> None:
    """Copy tensors into tensors of the same shapes, also between main memory and a device.

    A device that can do so copies from and to two page-locked stages, beside the copies between
    those and the rest of main memory: this takes as long as the slower of the two, and no more
    than twice `STAGE_BYTES` of such memory. Copies to a device may still run when this returns:
    only work of its current stream may use them.

    One thread on an H200 reads 605 MB so in 96 ms, two in 62; CUDA's driver alone does it in 37,
    while the caller waits (`python -m bench.accelerator --only copies`). But beside training, as
    snapshots and donors copy, a run of the benchmark with the driver's copies did not end.
    """
    pairs = list(zip(to, of, strict=True))
    far = [a if b.device.type == CPU else b for a, b in pairs if a.device != b.device]
    if far and copies_beside(far[0].device):
        # Other threads than the trainer's copy, too: their current device may be another.
        with torch.get_device_module(far[0].device).device(far[0].device):
            _staged(pairs, far[0].device)
    elif far:
        for one, other in pairs:
            one.copy_(other)
    elif pairs:
        torch._foreach_copy_(list(to), list(of))


def page_locked(nbytes: int) -> Tensor:
    """Return bytes of main memory from and to which a device copies by itself."""
    return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)


def _staged(pairs: Sequence[tuple[Tensor, Tensor]], device: torch.device) -> None:
    module = torch.get_device_module(device)
    stages = [page_locked(STAGE_BYTES) for _ in range(2)]
    events = [module.Event(), module.Event()]
    waiting: list[Group] = [[], []]
    """By stage: what is to be copied from it into main memory when the device is ready."""
    for number, group in enumerate(staged_groups(pairs, STAGE_BYTES)):
        place = number % 2
        events[place].synchronize()  # the stage's last copies
        _finish(waiting[place])
        waiting[place] = []
        start = 0
        for to, of in group:
            own = to if of.device.type == CPU else of
            end = start + own.nbytes
            stage = stages[place][start:end].view(own.dtype).view(own.shape)
            start = -(-end // ALIGNED) * ALIGNED
            if own is to:
                to.copy_(stage.copy_(of), non_blocking=True)
            else:
                stage.copy_(of, non_blocking=True)
                waiting[place].append((to, stage))
        events[place].record()
    for place, event in enumerate(events):
        if waiting[place]:  # torch keeps a page-locked stage that a device still reads
            event.synchronize()
            _finish(waiting[place])


class Snapshot:
    """A copy of tensors as they are now, on their way to main memory; making it blocks no thread.

    They are copied on their device, in the order of its work, and from there by `copy_to`, which
    another thread than the trainer's calls: only that thread waits.
    """

    @torch.no_grad()
    def __init__(self, tensors: Sequence[Tensor]) -> None:
        """Begin to copy tensors of one device; needs as much of its memory until it is dropped."""
        self._device = tensors[0].device
        self._copies = [torch.empty_like(tensor) for tensor in tensors]
        torch._foreach_copy_(self._copies, list(tensors))
        self._ready: Any = None
        """On a device with streams, the moment after these copies."""
        if copies_beside(self._device):
            module = torch.get_device_module(self._device)
            self._ready = module.current_stream(self._device).record_event()

    def copy_to(self, to: Sequence[Tensor]) -> None:
        """Copy into tensors of the same shapes in main memory; blocks, in any thread.

        A device with streams copies beside its other work.
        """
        if self._ready is None:
            copy_tensors(to, self._copies)
            return
        module = torch.get_device_module(self._device)
        stream = module.Stream(self._device)
        with module.device(self._device), module.stream(stream):
            stream.wait_event(self._ready)
            copy_tensors(to, self._copies)


Group = list[tuple[Tensor, Tensor]]
ALIGNED = 64
"""Bytes to which the parts of a stage are aligned."""


def staged_groups(pairs: Sequence[tuple[Tensor, Tensor]], most_bytes: int) -> Iterator[Group]:
    """Yield pairs in groups that fit a stage; large tensors are cut along their first dimension."""
    group: Group = []
    size = 0
    for pair in _cut(pairs, most_bytes):
        need = -(-max(part.nbytes for part in pair) // ALIGNED) * ALIGNED
        if group and size + need > most_bytes:
            yield group
            group, size = [], 0
        group.append(pair)
        size += need
    if group:
        yield group


def _cut(pairs: Sequence[tuple[Tensor, Tensor]], most_bytes: int) -> Iterator[Any]:
    for to, of in pairs:
        nbytes = max(to.nbytes, of.nbytes) + ALIGNED
        if nbytes <= most_bytes:
            yield to, of
        elif to.dim() and to.shape[0] > 1:
            rows = max(1, to.shape[0] * most_bytes // (2 * nbytes))
            parts = zip(torch.split(to, rows), torch.split(of, rows), strict=True)
            yield from _cut(list(parts), most_bytes)
        else:
            yield from _cut([(to[0], of[0])], most_bytes)


def _finish(waiting: Group) -> None:
    for to, stage in waiting:
        to.copy_(stage)


class Ahead:
    """A batch that is copied to a device while the device computes on another.

    A device without streams gets it when it is taken.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        beside = copies_beside(device)
        self._module: Any = torch.get_device_module(device)
        self._stream: Any = self._module.Stream(device) if beside else None
        self._batch: Any = None

    def start(self, batch: Any) -> None:
        """Begin to copy a batch; from any thread."""
        if self._stream is None:
            self._batch = batch
            return
        with self._module.stream(self._stream):
            self._batch = placed(batch, self.device)

    def take(self) -> Any:
        """Return the batch that `start` got, on the device, ready for the current stream."""
        batch, self._batch = self._batch, None
        if self._stream is None:
            return placed(batch, self.device)
        current = self._module.current_stream(self.device)
        current.wait_stream(self._stream)
        _record(batch, current)
        return batch


def _record(values: Any, stream: Any) -> None:
    """Keep the memory of tensors until a stream's work on them is done."""
    if isinstance(values, Tensor):
        if values.device.type != CPU:
            values.record_stream(stream)
    elif isinstance(values, Mapping):
        _record(list(values.values()), stream)
    elif isinstance(values, tuple | list):
        for value in values:
            _record(value, stream)
