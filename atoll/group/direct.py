"""The direct route: members dial each other and torch.distributed (Gloo) moves the tensors.

fp32 is one all-reduce of the weighted values. Any other codec goes in two steps: every member
sends each other member its encoded chunk (all-to-all), sums its own chunk in fp32 in member order
and encodes the mean; then all gather the encoded means. Either way every member ends up with the
same bytes.

Gloo has habits that this module holds off: its timeouts are half an hour unless set, a blocked
wait cannot be aborted, and it listens on whatever the hostname resolves to.
"""

from __future__ import annotations

import logging
import math
import socket
import struct
import threading
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed
from torch import Tensor

from atoll.clock import RealClock
from atoll.codec.codec import Codec, Packet
from atoll.errors import DeadlineExceeded, GroupError, PeerLost
from atoll.group.partition import partition
from atoll.group.reach import join_host_port, split_host_port
from atoll.reducer.mean import Share, is_finite, mean_of, result_digest
from atoll.wire.messages import RoundPlan

log = logging.getLogger(__name__)

dist: Any = torch.distributed
"""Without types: torch's stubs leave out most of what is used here."""

_HEAD = struct.Struct("!d")
"""What travels before every chunk: the sender's weight; NaN when its values are not usable."""

CONNECT_TIMEOUT = timedelta(seconds=20)
"""Longest wait for the store of the first member."""

ALIGNMENT = 1024
"""Elements that chunks are multiples of when a codec does not say its block."""


@dataclass(frozen=True, slots=True)
class Exchanged:
    """What came out of one exchange, equal on every member."""

    vector: Tensor
    contributors: tuple[str, ...]
    weight: float
    digest: str
    sent_bytes: int
    received_bytes: int


class DirectRoute:
    """This member's store, and the process group of the present members."""

    def __init__(self, *, address: str, job: str, me: str) -> None:
        """Open a store on a free port of `address`.

        Args:
            address: Own numeric address, as other members dial it.
            job: Names the keys in the store.
            me: Own member id.
        """
        self._address, self._job, self._me = address, job, me
        self._server = _serve(address)
        self.dial = join_host_port(address, self._server.port)
        self._lock = threading.Lock()
        self._serial = 0
        self._key: tuple[str, tuple[str, ...]] | None = None
        self._group: Any | None = None

    def begin(self) -> int:
        """Return the number of a new exchange; whatever was under way before is given up.

        Called where the order of exchanges is certain: before a thread is started for it.
        """
        with self._lock:
            self._serial += 1
            return self._serial

    def exchange(
        self,
        plan: RoundPlan,
        vector: Tensor,
        *,
        serial: int,
        codec: Codec,
        weight: float,
        key: str,
    ) -> Exchanged:
        """Return the weighted mean over the members of the plan.

        Args:
            plan: Who takes part.
            vector: Own values, float32, shape (n,).
            serial: What :meth:`begin` returned.
            codec: How values are encoded on the wire.
            weight: Weight of the own values.
            key: Names the codec's residual state.

        Raises:
            PeerLost: a member's connection broke.
            DeadlineExceeded: it took longer than `plan.timeout_s`.
            GroupError: nothing was left to average.
        """
        deadline = RealClock().monotonic() + plan.timeout_s
        with self._lock:
            known = self._key == _key_of(plan)
        try:
            return self._attempt(plan, serial, vector, codec, weight, key)
        except GroupError:
            self._forget(serial)  # lets the others fail at once instead of waiting for this member
            raise
        except RuntimeError as error:
            self._forget(serial)
            if RealClock().monotonic() >= deadline:
                raise DeadlineExceeded(
                    "the members' exchange took too long", given=f"{plan.timeout_s:.1f} s"
                ) from error
            if not known:
                raise PeerLost("a member's connection broke", given=_first_line(error)) from error
            # A member may have been restarted since the last round: it waits in a fresh group.
            log.info("the last round's connections are gone (%s); connecting anew", error)
        return self.exchange(plan, vector, serial=serial, codec=codec, weight=weight, key=key)

    def _attempt(
        self, plan: RoundPlan, serial: int, vector: Tensor, codec: Codec, weight: float, key: str
    ) -> Exchanged:
        group = self._connect(plan, serial)
        wires = _Wires(group, plan, plan.members.index(self._me), plan.timeout_s)
        usable = _survives(vector, codec.base)
        if codec.base.spec == "fp32" and codec.base is codec:
            return _all_reduce(wires, vector, weight=weight, usable=usable)
        return _all_to_all(wires, vector, codec=codec, weight=weight, usable=usable, key=key)

    def _connect(self, plan: RoundPlan, serial: int) -> Any:
        """Return the process group of the plan's members; the last one if they are the same."""
        with self._lock:
            self._check(serial)
            if self._group is not None and self._key == _key_of(plan):
                self._group._set_default_timeout(timedelta(seconds=plan.timeout_s))
                return self._group
        self._forget(serial)
        group = self._new_group(plan)
        with self._lock:
            self._check(serial)
            self._group, self._key = group, _key_of(plan)
        return group

    def _new_group(self, plan: RoundPlan) -> Any:
        """Connect to all members of the plan."""
        timeout = timedelta(seconds=plan.timeout_s)
        host, port = split_host_port(plan.store)
        # A client of its own: one that waits for a lost member blocks whoever shares it.
        client = dist.TCPStore(host, port, None, False, min(timeout, CONNECT_TIMEOUT), False)
        store = dist.PrefixStore(f"{self._job}/{plan.epoch}", client)
        store.set_timeout(timeout)
        options = dist.ProcessGroupGloo._Options()
        options._timeout = timeout
        options._threads = 2
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=self._address)]
        return dist.ProcessGroupGloo(
            store, plan.members.index(self._me), len(plan.members), options
        )

    def drop(self) -> None:
        """Give up what is under way and forget the process group; the next exchange connects."""
        self._forget(self.begin())

    def _forget(self, serial: int) -> None:
        """Forget the process group on behalf of one exchange, unless that was given up."""
        with self._lock:
            self._check(serial)
            group, self._group, self._key = self._group, None, None
        if group is not None:
            # Its destructor waits for operations under way; nobody else should.
            threading.Thread(target=lambda held: held.clear(), args=([group],), daemon=True).start()

    def _check(self, serial: int) -> None:
        """Refuse an exchange that was given up; a later one may be under way. Lock held."""
        if serial != self._serial:
            raise PeerLost("this exchange was given up", expected="another attempt is under way")

    def close(self) -> None:
        """Drop the group. A process that lost a peer should leave with `os._exit` after this."""
        self.drop()


def _key_of(plan: RoundPlan) -> tuple[str, tuple[str, ...]]:
    """Return what makes two plans share a process group."""
    return plan.store, tuple(plan.members)


def _serve(address: str) -> Any:
    """Return a store that listens on a free port of one address only."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.bind((address, 0))
    listener.listen(128)
    port = listener.getsockname()[1]
    return dist.TCPStore(
        address, port, None, True, timedelta(seconds=20), False,
        master_listen_fd=listener.detach(),
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Wires:
    """The process group with this attempt's bounds."""

    group: Any
    plan: RoundPlan
    rank: int
    timeout_s: float

    def wait(self, start: Callable[[], Any]) -> None:
        """Run one collective to its end, at most `timeout_s`."""
        start().wait(timedelta(seconds=self.timeout_s))


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0][:200]


def _survives(vector: Tensor, codec: Codec) -> bool:
    """Return whether the values are finite and still so after encoding (fp16 overflows)."""
    if not is_finite(vector):
        return False
    if vector.numel() == 0:
        return True
    extremes = torch.stack(torch.aminmax(vector))
    return is_finite(codec.decode(codec.encode(extremes, key="extremes")))


def _split(weights: list[float], members: list[str]) -> tuple[tuple[str, ...], float]:
    """Return who contributed and their total weight; unusable members have weight NaN."""
    contributors = tuple(
        m for m, weight in zip(members, weights, strict=True) if not math.isnan(weight)
    )
    total = math.fsum(weight for weight in weights if not math.isnan(weight))
    if not total > 0:
        raise GroupError(
            "there is nothing to average",
            given=f"{len(contributors)} of {len(members)} members with weight {total}",
            expected="at least one finite contribution with a weight above 0",
        )
    return contributors, total


def _all_reduce(wires: _Wires, vector: Tensor, *, weight: float, usable: bool) -> Exchanged:
    """One fp32 all-reduce; each member's weight and usability travel in elements of their own.

    Gloo adds the members of each segment in ring order on one of them and hands the sum round, so
    all hold the same bits, though not always those of a sum in member order.
    """
    n, size = len(wires.plan.members), vector.numel()
    wire = torch.zeros(size + 2 * n)
    if usable:
        torch.mul(vector, weight, out=wire[:size])
        wire[size + 2 * wires.rank] = weight
        wire[size + 2 * wires.rank + 1] = 1.0
    wires.wait(lambda: wires.group.allreduce([wire]))
    table = wire[size:].view(n, 2).tolist()
    weights = [weight if present else math.nan for weight, present in table]
    contributors, total = _split(weights, wires.plan.members)
    mean = wire[:size].div_(total)
    if not is_finite(mean):
        raise GroupError(
            "the sum of the members' values is larger than fp32 can hold",
            remedy="lower the learning rate, or switch clipping on",
        )
    moved = round(2 * (n - 1) / n * wire.numel() * wire.element_size())
    digest = result_digest(_bytes_of(mean), contributors)
    return Exchanged(mean, contributors, total, digest, moved, moved)


def _bytes_of(tensor: Tensor) -> memoryview:
    """Return a contiguous tensor's memory as bytes, without a copy."""
    flat: Any = tensor.view(torch.uint8).numpy()
    return memoryview(flat)


def _all_to_all(
    wires: _Wires, vector: Tensor, *, codec: Codec, weight: float, usable: bool, key: str
) -> Exchanged:
    """Encoded chunks to their owners, fp32 sums there, encoded means to all."""
    base, members, n = codec.base, wires.plan.members, len(wires.plan.members)
    block = math.lcm(int(getattr(base, "block", 1)), ALIGNMENT)
    sizes = partition(vector.numel(), n, block=block)
    if base is not codec and usable:
        # Residuals belong to the whole vector, whoever takes part; encoding the decoded values
        # once more, block by block, changes nothing.
        vector = base.decode(codec.encode(vector, key=key))
    head = _HEAD.pack(weight if usable else math.nan)
    packets = [base.encode(part.contiguous(), key=key) for part in torch.split(vector, sizes)]
    shares, moved_out, moved_in = _scatter(wires, packets, head)
    weights = [share.weight for share in shares]
    contributors, total = _split(weights, members)
    usable_shares = [share for share in shares if not math.isnan(share.weight)]
    mean = mean_of(usable_shares, codec=base)
    if mean.left_out:
        raise next(iter(mean.left_out.values()))
    gathered = _gather(wires, mean.packet, [base.nbytes(size) for size in sizes])
    out = torch.empty(vector.numel())
    for part, size, piece in zip(gathered, sizes, torch.split(out, sizes), strict=True):
        base.decode(Packet(part, mean.packet.codec, (size,)), out=piece)
    others = sum(len(part) for part in gathered) - len(gathered[wires.rank])
    shared = len(gathered[wires.rank]) * (n - 1)
    return Exchanged(
        out, contributors, total, result_digest(gathered, contributors),
        moved_out + shared, moved_in + others,
    )  # fmt: skip


def _scatter(wires: _Wires, packets: list[Packet], head: bytes) -> tuple[list[Share], int, int]:
    """Send every member its chunk; return all members' versions of the own chunk, in order."""
    rank, members = wires.rank, wires.plan.members
    messages = [b"".join((head, p.data)) if i != rank else b"" for i, p in enumerate(packets)]
    sent_sizes = [len(message) for message in messages]
    own = len(packets[rank].data) + _HEAD.size
    received_sizes = [own if index != rank else 0 for index in range(len(members))]
    outgoing = torch.frombuffer(bytearray(b"".join(messages)), dtype=torch.uint8)
    incoming = torch.empty(sum(received_sizes), dtype=torch.uint8)
    wires.wait(lambda: wires.group.alltoall_base(incoming, outgoing, received_sizes, sent_sizes))
    shares: list[Share] = []
    for member, part in zip(members, torch.split(incoming, received_sizes), strict=True):
        packet, own_head = packets[rank], head
        if member != members[rank]:
            data = _bytes_of(part)
            own_head = bytes(data[: _HEAD.size])
            packet = Packet(data[_HEAD.size :], packet.codec, packet.sizes)
        shares.append(Share(member, packet, _HEAD.unpack(own_head)[0]))
    return shares, sum(sent_sizes), sum(received_sizes)


def _gather(wires: _Wires, packet: Packet, sizes: list[int]) -> list[memoryview]:
    """Return every member's encoded mean, in order; they travel padded to one length."""
    longest = max(sizes)
    if longest == 0:
        return [memoryview(b"") for _ in sizes]
    padded = torch.zeros(longest, dtype=torch.uint8)
    if len(packet.data):
        padded[: len(packet.data)] = torch.frombuffer(bytearray(packet.data), dtype=torch.uint8)
    gathered = torch.empty(longest * len(sizes), dtype=torch.uint8)
    wires.wait(lambda: wires.group._allgather_base(gathered, padded))
    whole = _bytes_of(gathered)
    return [whole[i * longest : i * longest + size] for i, size in enumerate(sizes)]
