from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from atoll.codec.base import Packet
from atoll.codec.sparse.cosine import Pieces, cosines
from atoll.errors import ConfigError
from atoll.group.base import Group, PeerMessage
from atoll.group.in_process.groups import MemoryGroups
from atoll.group.single import SingleGroup
from atoll.methods.every_step import DeMo
from atoll.strategies.outer.demo import DeMoOuter, Spectrum
from atoll.strategies.vectors.exact_math import uniform
from atoll.strategies.vectors.flat import Flat
from tests.contracts.strategy_suite import Reference, StrategySuite, sgd, squared_error, start_run

LR, DECAY = 0.02, 0.1
"""Of the suite's AdamW, whose own rule has no part in it."""


class TestDeMo(StrategySuite):
    name = "demo"
    options = DeMo(decay=0.9, topk=2)
    codec = "bf16"
    coarse = "bf16"
    wires = ("fp32", "bf16", "sign")

    def reference(self, members: int, steps: int) -> Tensor:
        """The paper's algorithm in double precision, tensor by tensor."""
        those, topk = Reference.make(members, sgd), self.options.topk
        shapes = [parameter.shape for parameter in those.models[0].parameters()]
        theta = those.vectors()[0]
        momenta = [[torch.zeros(s, dtype=torch.float64) for s in shapes] for _ in range(members)]
        for _ in range(steps):
            gradients = [own_gradients(those, member) for member in range(members)]
            signs: list[Tensor] = []
            for index, shape in enumerate(shapes):
                sent = torch.zeros(shape.numel(), dtype=torch.float64)
                senders = torch.zeros_like(sent)
                for member in range(members):
                    delta = 0.9 * momenta[member][index] + LR * gradients[member][index]
                    chosen = largest(transform(delta), topk)
                    momenta[member][index] = delta - back(chosen, shape)
                    sent, senders = sent + chosen, senders + (chosen != 0)
                signs.append(back(sent / senders.clamp(min=1), shape).sign().flatten())
            theta = (1 - LR * DECAY) * theta - LR * torch.cat(signs)
            those.assign(theta)
        return theta

    def test_one_member_equals_plain_training_bit_for_bit(self) -> None:
        """The method is the optimizer, for one member too: the reference stands in for torch."""
        for group in (SingleGroup(), MemoryGroups(1)[0]):
            run = start_run(self.options, group, 0)
            run.train(self.steps)
            expected = self.reference(1, self.steps)
            assert (run.vector().double() - expected).abs().max() < self.tolerance


def own_gradients(those: Reference, member: int) -> list[Tensor]:
    model = those.models[member]
    those.optimizers[member].zero_grad()
    squared_error(model, next(those.streams[member]))[0].backward()  # type: ignore[no-untyped-call]
    return [p.grad.double() for p in model.parameters() if p.grad is not None]


def waves(shape: torch.Size) -> tuple[Tensor, Tensor]:
    return cosines(shape[0] if len(shape) > 1 else 1), cosines(shape[-1])


def transform(x: Tensor) -> Tensor:
    left, right = waves(x.shape)
    return (left @ x.view(left.shape[0], -1) @ right.T).flatten()


def back(z: Tensor, shape: torch.Size) -> Tensor:
    left, right = waves(shape)
    return (left.T @ z.view(left.shape[0], -1) @ right).view(shape)


def largest(z: Tensor, count: int) -> Tensor:
    kept = torch.zeros_like(z)
    chosen = z.abs().topk(min(count, len(z))).indices
    kept[chosen] = z[chosen]
    return kept


def test_full_topk_without_momentum_is_sign_sgd() -> None:
    run = start_run(DeMo(decay=0.0, topk=10_000), SingleGroup(), 0, optimizer=sgd)
    theta, those = run.vector().double(), Reference.make(1, sgd)
    for _ in range(5):
        gradient = torch.cat([g.flatten() for g in own_gradients(those, 0)])
        run.train(1)
        theta = theta - 0.05 * gradient.sign()
        those.assign(theta)
    assert (run.vector().double() - theta).abs().max() < 1e-6


def test_a_coefficient_is_the_mean_over_those_that_sent_it() -> None:
    """Two members send another coefficient each: neither is halved."""
    groups = MemoryGroups(2)
    shape = torch.Size([8])
    sent = {0: (1, 3.0), 1: (4, -2.0)}

    def body(group: Group) -> Tensor:
        model = nn.Linear(8, 1, bias=False)
        run = start_run(DeMo(decay=0.0, topk=1), group, 0, optimizer=sgd, model=model)
        index, value = sent[int(group.me[1:])]
        z = torch.zeros(8, dtype=torch.float64)
        z[index] = value
        run.task.parameters()[0].grad = back(z, shape).float().view(1, 8)
        before = run.vector()
        run.outer.gradients(run.task)
        return before - run.vector()

    together = torch.zeros(8, dtype=torch.float64)
    for index, value in sent.values():
        together[index] = value
    expected = 0.05 * back(together, shape).sign()
    for moved in groups.together(body):
        assert (moved.double() - expected).abs().max() < 1e-6


def test_chosen_coefficients_keep_the_most_energy() -> None:
    spectrum = Spectrum([(64, 64)], side=64, topk=32)
    x = uniform(4096, seed=3)
    positions, values = spectrum.choose(x)
    whole = Pieces.of((64, 64)).coefficients(x, cosines(64).float(), cosines(64).float())[0]
    assert torch.equal(whole[positions], values)
    rest = whole.clone()
    rest[positions] = 0.0
    assert rest.abs().max() <= values.abs().min()


def test_what_was_sent_leaves_the_momentum_and_nothing_else() -> None:
    """Momentum plus everything sent is the momentum of SGD, whatever the codec rounds away."""

    def body(group: Group) -> tuple[Tensor, Tensor]:
        run = start_run(DeMo(decay=0.5, topk=3), group, 0, optimizer=sgd, codec="int8")
        outer = run.outer
        assert isinstance(outer, DeMoOuter)
        expected = torch.zeros(26, dtype=torch.float64)
        for step in range(6):
            gradient = uniform(26, seed=step)
            flat = Flat(run.task.parameters())
            for parameter, part in zip(flat.tensors, flat.views(gradient), strict=True):
                parameter.grad = part.clone()
            before = outer.state_dict()["own.momentum"].double()
            outer.gradients(run.task)
            after = outer.state_dict()["own.momentum"].double()
            expected = 0.5 * before + 0.05 * gradient.double() - after
            sent = outer._spectrum.values(outer._kept).double()
            assert (expected - sent).abs().max() < 1e-6
            run.task.advance()
        return expected, after

    for sent, left in MemoryGroups(2).together(body):
        assert sent.any()
        assert left.any()


def test_positions_and_values_take_the_bytes_of_the_paper() -> None:
    """32 coefficients of 2 + 2 bytes for each piece of 64 x 64: 1/32 byte per parameter."""
    model = nn.Linear(128, 256, bias=False)
    run = start_run(DeMo(), MemoryGroups(1)[0], 0, codec="bf16", model=model)
    found = run.outer.traffic(128 * 256, 2, steps=1)
    assert found.relay_sent_bytes == 128 + 128 * 256 // 32


class Garbler:
    """A member whose packets have positions outside of their pieces."""

    def __init__(self, group: Group) -> None:
        self._group = group

    def __getattr__(self, name: str) -> Any:
        return getattr(self._group, name)

    def all_to_all(self, messages: list[PeerMessage], *, weight: float = 1.0) -> Any:
        packet = messages[0].packet
        data = bytes(packet.data)[:-2] + b"\xff\xff"
        spoilt = PeerMessage(messages[0].to, Packet(data, packet.codec, packet.sizes))
        return self._group.all_to_all([spoilt], weight=weight)


def test_a_member_whose_packets_are_damaged_is_left_out_by_all() -> None:
    groups = MemoryGroups(3)

    def body(group: Group) -> tuple[Tensor, tuple[str, ...]]:
        slot = int(group.me[1:])
        used: Any = Garbler(group) if slot == 1 else group
        run = start_run(DeMo(decay=0.9, topk=2), used, slot)
        run.train(2)
        return run.vector(), run.results[-1].contributors

    results = groups.together(body)
    assert [names for _, names in results] == [("w0", "w2")] * 3
    assert all(torch.equal(vector, results[0][0]) for vector, _ in results)


@pytest.mark.parametrize("codec", ["feedback(bf16)", "topk:0.5"])
def test_codecs_that_remember_or_leave_out_are_refused(codec: str) -> None:
    with pytest.raises(ConfigError, match="DeMo cannot use codec"):
        start_run(DeMo(), MemoryGroups(1)[0], 0, codec=codec)


@pytest.mark.parametrize(
    "options", [DeMo(decay=1.0), DeMo(topk=0), DeMo(side=0), DeMo(side=300), DeMo(weight="x")]
)
def test_options_out_of_range_are_refused(options: DeMo) -> None:
    with pytest.raises(ConfigError):
        options.build()
