"""What passes between stages comes out as it went in, within what its codec promises."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from atoll.codec import make_codec
from atoll.errors import ConfigError, WireError
from atoll.methods.codecs import CODECS
from atoll.strategies.inner.swarm.activations import ActivationCodec, TensorHead
from atoll.strategies.inner.swarm.runner import MicrobatchKey
from atoll.strategies.inner.swarm.stage import StageCut
from tests.strategies.swarm.kit import batch_of, built, means, plainly, runners, through

SPECS = [row.example for row in CODECS.values() if not row.remembers]


def passed(spec: str, *tensors: Tensor | None) -> tuple[Tensor | None, ...]:
    sender, receiver = ActivationCodec(spec), ActivationCodec(spec)
    heads, data = sender.encode(tensors)
    return receiver.decode(heads, b"".join(bytes(part) for part in data))


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
def test_every_codec_without_memory_takes_activations(spec: str, kind: torch.dtype) -> None:
    torch.manual_seed(1)
    values = torch.randn(4, 8, 64).to(kind)
    (found,) = passed(spec, values)
    assert found is not None
    assert found.shape == values.shape
    assert found.dtype is kind
    assert found.isfinite().all()


def test_int8_is_off_by_half_a_step_of_its_block() -> None:
    torch.manual_seed(1)
    values = torch.randn(4, 8, 64) * torch.logspace(-6, 3, 4)[:, None, None]
    (found,) = passed("int8:64", values)
    assert found is not None
    blocks = values.flatten().view(-1, 64)
    steps = blocks.abs().amax(1, keepdim=True) / 127
    assert ((found.flatten().view(-1, 64) - blocks).abs() <= steps * 0.5001).all()
    size = make_codec("int8:64").nbytes(values.numel())
    heads, data = ActivationCodec("int8:64").encode([values])
    assert sum(len(part) for part in data) == heads[0].nbytes == size < values.nbytes / 3.7


@pytest.mark.parametrize("spec", ["fp32", "int8"])
def test_integers_and_gaps_go_as_they_are(spec: str) -> None:
    ids, mask = torch.randint(1 << 40, (3, 5)), torch.tensor([True, False])
    found = passed(spec, ids, None, mask, torch.zeros(0, 4))
    assert found[1] is None
    for value, expected in zip((found[0], found[2]), (ids, mask), strict=True):
        assert value is not None
        assert value.dtype is expected.dtype
        assert torch.equal(value, expected)
    assert found[3] is not None
    assert found[3].shape == (0, 4)


@pytest.mark.parametrize("kind", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_fp32_keeps_every_bit_of_every_type(kind: torch.dtype) -> None:
    values = torch.randn(3, 7, dtype=torch.float64).to(kind)[:, 1:]
    (found,) = passed("fp32", values)
    assert found is not None
    assert torch.equal(found, values)


def test_a_codec_with_memory_is_refused() -> None:
    for spec in ("feedback(int4)", "ef21(topk:0.1)"):
        with pytest.raises(ConfigError, match="without state"):
            ActivationCodec(spec)
    with pytest.raises(ConfigError, match="int8"):
        ActivationCodec("itn8")


@pytest.mark.parametrize(
    "change",
    [
        {"nbytes": 3}, {"shape": [3, 5]}, {"shape": [1 << 20, 1 << 20]}, {"shape": [-1, -8]},
        {"dtype": "complex64"}, {"codec": "nonsense"}, {"nbytes": -8},
    ],
)  # fmt: skip
@pytest.mark.parametrize("spec", ["fp32", "int8"])
def test_damaged_heads_are_refused(spec: str, change: dict[str, object]) -> None:
    (head,), data = ActivationCodec(spec).encode([torch.randn(2, 4)])
    fields = {name: getattr(head, name) for name in ("shape", "dtype", "codec", "nbytes")}
    with pytest.raises(WireError):
        ActivationCodec(spec).decode([TensorHead(**(fields | change))], bytes(data[0]))


@pytest.mark.parametrize("shape", [[0, 1 << 70], [0, -1]])
def test_empty_tensors_of_impossible_shapes_are_refused(shape: list[int]) -> None:
    with pytest.raises(WireError):
        ActivationCodec().decode([TensorHead(shape, "float32", "", 0)], b"")


def test_int8_changes_gradients_little_and_both_ways() -> None:
    batch, key = batch_of("gpt", 0, 0), MicrobatchKey(0, 0)
    _, expected, _ = plainly(built("gpt"), [batch], rows=4)
    path = runners("gpt", cut=StageCut(stages=4))
    through(path, key, batch, codec="int8")
    for runner in path:
        runner.fold(key)
    for name, gradient in means(path).items():
        error = (gradient - expected[name]).norm() / expected[name].norm()
        assert 0 < error < 0.05, (name, error)
