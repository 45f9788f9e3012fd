"""What every codec has to prove; subclass :class:`CodecSuite` in a test file, one per spec."""

from __future__ import annotations

import random
import socket
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from atoll.codec import Codec, Packet, base_spec, make_codec
from atoll.codec.quantized.cast import STRIP
from atoll.errors import ConfigError, WireError
from tests.tiers import examples

SIZES = (0, 1, 7, 8, 255, 256, 257, 4095, 4097, STRIP - 1, STRIP, STRIP + 1, 2 * STRIP + 3)
FLOATS = st.floats(width=32, allow_nan=False, allow_infinity=False)
QUICK = settings(
    max_examples=examples(25),
    deadline=None,
    database=None,
    # Every subclass runs the same property with its own codec.
    suppress_health_check=[HealthCheck.differing_executors],
)
MODERATE = st.floats(-1e4, 1e4, width=32)


def gaussian(elements: int, *, seed: int = 0) -> Tensor:
    return torch.randn(elements, generator=torch.Generator().manual_seed(seed))


def relative_error(found: Tensor, x: Tensor) -> float:
    return float((found.double() - x.double()).norm() / x.double().norm())


class CodecSuite:
    """The promises of every codec. Subclasses say which one, and how much it may lose."""

    spec: ClassVar[str]
    error: ClassVar[float]
    """Largest relative error, in Euclidean norms, of a Gaussian vector; measured plus some air."""
    idempotent: ClassVar[bool] = True
    """Whether encoding what was decoded changes nothing more."""
    contracts: ClassVar[bool] = True
    """Whether the error of a vector is never longer than the vector, so that feedback works."""
    shows_place: ClassVar[bool] = True
    """Whether a value that is not finite is so after decoding in its own place too."""
    one_way: ClassVar[bool] = True
    """Whether the bytes depend on no number of threads."""

    def codec(self, *, round_: int = 3) -> Codec:
        codec = make_codec(self.spec)
        codec.set_round(round_)
        return codec

    def sent(self, x: Tensor, *, round_: int = 3) -> Tensor:
        """Return what everybody decodes of the first packet of a vector."""
        packet = self.codec(round_=round_).encode(x)
        return make_codec(packet.codec).decode(packet)

    def test_spec_is_canonical_and_names_what_decodes(self) -> None:
        codec = self.codec()
        assert make_codec(codec.spec).spec == codec.spec
        packet = codec.encode(gaussian(100))
        assert packet.codec == codec.base.spec == base_spec(self.spec)
        assert make_codec(packet.codec).base.spec == packet.codec

    @pytest.mark.parametrize("elements", SIZES)
    def test_packet_has_exactly_the_promised_bytes(self, elements: int) -> None:
        codec, x = self.codec(), gaussian(elements)
        before = x.clone()
        packet = codec.encode(x, key="k")
        assert torch.equal(x, before)
        assert packet.sizes == (elements,)
        assert len(packet.data) == memoryview(packet.data).nbytes == codec.nbytes(elements)
        decoded = make_codec(packet.codec).decode(packet)
        assert decoded.shape == (elements,)
        assert decoded.dtype == torch.float32
        assert torch.isfinite(decoded).all()

    @pytest.mark.parametrize("elements", [100_003, 5 * 4096])
    def test_error_is_within_the_bound(self, elements: int) -> None:
        x = gaussian(elements)
        assert relative_error(self.sent(x), x) <= self.error

    @pytest.mark.parametrize("magnitude", [1e30, 1e4, 1e-4, 1e-8, 1e-20])
    def test_error_does_not_depend_on_the_magnitude(self, magnitude: float) -> None:
        x = gaussian(10_000)
        assert relative_error(self.sent(x * magnitude), x * magnitude) <= self.error * 1.15

    def test_encoding_twice_and_decoding_anywhere_give_the_same_bits(self) -> None:
        x = gaussian(70_001)
        one, two = self.codec().encode(x), self.codec().encode(x.clone())
        assert bytes(one.data) == bytes(two.data)
        # As it arrives from a socket: read-only, at an odd address.
        moved = Packet(memoryview(b"x" + bytes(one.data))[1:], one.codec, one.sizes)
        base, out = make_codec(one.codec), torch.full((70_001,), torch.nan)
        assert base.decode(moved, out=out) is out
        assert torch.equal(make_codec(one.codec).decode(one), out)

    @pytest.mark.parametrize("threads", [2, 3])
    def test_thread_count_does_not_change_a_bit(self, threads: int) -> None:
        x, before = gaussian(200_003), torch.get_num_threads()
        codec, results = self.codec(), []
        packet = codec.encode(x)
        try:
            for count in (1, threads):
                torch.set_num_threads(count)
                again = self.codec().encode(x) if self.one_way else packet
                base, total = make_codec(packet.codec), gaussian(200_003, seed=1)
                base.decode_add(packet, out=total, weight=0.3)
                results.append((bytes(again.data), base.decode(packet), total))
        finally:
            torch.set_num_threads(before)
        (data, decoded, total), (data_2, decoded_2, total_2) = results
        assert data == data_2
        assert torch.equal(decoded, decoded_2)
        assert torch.equal(total, total_2)

    def test_decode_add_equals_decode_then_add(self) -> None:
        packet, start = self.codec().encode(gaussian(70_001)), gaussian(70_001, seed=1)
        codec = make_codec(packet.codec)
        plain, weighted, before = start.clone(), start.clone(), bytes(packet.data)
        codec.decode_add(packet, out=plain)
        assert torch.equal(plain, start + codec.decode(packet))
        codec.decode_add(packet, out=weighted, weight=0.37)
        torch.testing.assert_close(
            weighted, start + 0.37 * codec.decode(packet), rtol=1e-6, atol=2e-6
        )
        assert bytes(packet.data) == before

    def test_encoding_what_was_decoded_changes_nothing(self) -> None:
        if not self.idempotent:
            pytest.skip("not promised by this codec")
        packet = self.codec().encode(gaussian(50_001))
        base = make_codec(packet.codec)
        once = base.decode(packet)
        assert torch.equal(base.decode(base.mean_codec(packet).encode(once)), once)

    def test_mean_of_packets_is_a_packet_or_is_left_to_the_members(self) -> None:
        vectors = [gaussian(20_003, seed=seed) for seed in range(3)]
        codecs = [self.codec() for _ in vectors]
        packets = [codec.encode(x) for codec, x in zip(codecs, vectors, strict=True)]
        base, total = make_codec(packets[0].codec), torch.zeros(20_003)
        for packet in packets:
            base.decode_add(packet, out=total)
        mean = total / 3
        if codecs[0].needs_allgather:
            assert torch.isfinite(mean).all()
            return
        again = base.mean_codec(packets[0]).encode(mean, key="mean")
        assert again.codec == packets[0].codec
        assert len(again.data) == len(packets[0].data)
        # No scale and no choice of positions is applied twice.
        limit = max(self.error, 1e-6) if self.contracts else 1.2 * self.error
        assert relative_error(base.decode(again), mean) <= min(limit * 1.1, 1.2 * self.error + 1e-6)

    def test_zeros_stay_zeros(self) -> None:
        x = torch.zeros(9_001)
        if "sign" not in self.spec:
            assert torch.equal(self.sent(x), x)
        assert not self.sent(x).any()

    @pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
    def test_a_value_that_is_not_finite_is_never_hidden(self, bad: float) -> None:
        for place in (500, 5000):
            x = gaussian(9_000)
            x[place] = bad
            decoded = self.sent(x)
            assert not torch.isfinite(decoded).all()
            assert not self.shows_place or not torch.isfinite(decoded[place])

    def test_overflowing_sum_is_infinite_without_a_warning(self) -> None:
        packet = self.codec().encode(torch.full((5000,), 6e4))
        total = torch.full((5000,), 3e38)
        make_codec(packet.codec).decode_add(packet, out=total, weight=1e34)
        assert torch.isinf(total).any()

    def test_packet_owns_its_memory_and_a_socket_takes_it(self) -> None:
        x = gaussian(1000)
        packet = self.codec().encode(x)
        before = bytes(packet.data)
        x.zero_()
        left, right = socket.socketpair()
        with left, right:
            left.sendall(packet.data)
            left.shutdown(socket.SHUT_WR)
            assert b"".join(iter(lambda: right.recv(65_536), b"")) == before
        view = memoryview(packet.data)
        assert (view.format, view.ndim, view.itemsize, view.contiguous) == ("B", 1, 1, True)

    @pytest.mark.parametrize("change", [-1, 1, 4])
    def test_packet_of_wrong_length_is_refused(self, change: int) -> None:
        packet = self.codec().encode(gaussian(1000))
        data = (bytes(packet.data) + b"1234")[: len(packet.data) + change]
        wrong, codec = Packet(data, packet.codec, packet.sizes), make_codec(packet.codec)
        with pytest.raises(WireError, match="wrong length"):
            codec.decode(wrong)
        with pytest.raises(WireError, match="wrong length"):
            codec.decode_add(wrong, out=torch.zeros(1000))

    def test_packet_of_another_codec_or_of_negative_size_is_refused(self) -> None:
        other = make_codec("int8:8").encode(gaussian(1000))
        with pytest.raises(WireError, match="wrong codec"):
            make_codec(self.codec().base.spec).decode(other)
        empty = Packet(b"", self.codec().base.spec, (5, -5))
        with pytest.raises(WireError, match="wrong length"):
            make_codec(empty.codec).decode(empty)

    @pytest.mark.parametrize("seed", range(5))
    def test_damaged_packet_never_crashes_the_decoder(self, seed: int) -> None:
        packet = self.codec().encode(gaussian(6000))
        data, chance = bytearray(packet.data), random.Random(seed)
        for place in range(0, len(data), 1 + seed * 7):
            data[place] = chance.randrange(256)
        base = make_codec(packet.codec)
        with np.errstate(all="ignore"):
            try:
                decoded = base.decode(Packet(bytes(data), packet.codec, packet.sizes))
            except WireError:
                return
        assert decoded.shape == (6000,)

    def test_anything_but_a_flat_float32_vector_is_refused(self) -> None:
        wrong: list[Any] = [
            torch.zeros(4, dtype=torch.float64), torch.zeros(2, 2), torch.zeros(8)[::2],
        ]  # fmt: skip
        for x in wrong:
            with pytest.raises(ConfigError, match="contiguous float32 vector"):
                self.codec().encode(x)
        packet = self.codec().encode(gaussian(100))
        for out in (torch.zeros(99), torch.zeros(100, dtype=torch.float64)):
            with pytest.raises(ConfigError, match="as the output"):
                make_codec(packet.codec).decode(packet, out=out)
            with pytest.raises(ConfigError, match="as the output"):
                make_codec(packet.codec).decode_add(packet, out=out)
        assert not self.sent(gaussian(100).requires_grad_()).requires_grad

    def test_parts_that_are_cut_out_decode_to_parts(self) -> None:
        base: Any = make_codec(self.codec().base.spec)
        if not hasattr(base, "cut"):
            pytest.skip("the packets of this codec are decoded whole")
        middle = 2 * base.grain
        end = middle + base.grain + 77
        packet = self.codec().encode(gaussian(end))
        whole = base.decode(packet)
        for start, stop in ((0, middle), (middle, end), (middle, middle)):
            part = base.cut(packet, start, stop)
            assert len(part.data) == base.nbytes(stop - start)
            assert torch.equal(base.decode(part), whole[start:stop])

    def test_aborted_round_is_as_if_nothing_had_been_sent(self) -> None:
        disturbed, calm = self.codec(), self.codec()
        for codec in (disturbed, calm):
            codec.encode(gaussian(3000, seed=1))
            codec.finish(committed=True)
        disturbed.encode(gaussian(3000, seed=2))
        disturbed.finish(committed=False)
        again, expected = (codec.encode(gaussian(3000, seed=3)) for codec in (disturbed, calm))
        assert bytes(again.data) == bytes(expected.data)

    def test_saved_state_continues_bit_for_bit(self) -> None:
        codec, other = self.codec(), self.codec()
        for seed in range(3):
            codec.encode(gaussian(3000, seed=seed))
            codec.finish(committed=True)
        other.load_state_dict({name: value.clone() for name, value in codec.state_dict().items()})
        again, expected = (c.encode(gaussian(3000, seed=9)) for c in (codec, other))
        assert bytes(again.data) == bytes(expected.data)

    @QUICK
    @given(values=st.lists(FLOATS, max_size=70))
    def test_any_finite_vector_passes(self, values: list[float]) -> None:
        x = torch.tensor(values, dtype=torch.float32)
        decoded = self.sent(x)
        assert decoded.shape == x.shape
        assert not decoded.isnan().any()

    @QUICK
    @given(values=st.lists(MODERATE, max_size=70), repeats=st.integers(1, 9))
    def test_error_is_never_longer_than_the_vector(self, values: list[float], repeats: int) -> None:
        if not self.contracts:
            return
        x = torch.tensor(values * repeats, dtype=torch.float32)
        lost = (self.sent(x).double() - x.double()).norm()
        assert lost <= x.double().norm() * (1 + 1e-3) + 1e-30
