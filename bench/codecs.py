"""Speed and error of every codec: `python -m bench.codecs [--quick]`, one JSON object on stdout.

One thread, 40 MB of float32 (10 million elements of a Gaussian) unless `--megabytes` says
otherwise. The codecs take turns, and each figure is the median over the turns. Rates are float32
bytes of the vector per second of the core's time, whatever the packet weighs and whatever other
programs do meanwhile:

    encode_mb_s, decode_mb_s    the two halves; decoding into memory that is there already
    add_mb_s                    decode_add with a weight, as in a sum of many members
    memcpy_mb_s                 copying the same vector: what the memory gives
    encode_limit, decode_limit  share of what the memory allows: the time to read the one and write
                                the other at the copy's rate, over the time it took
    bits_per_value              of a packet, scales and positions included: exact
    relative_error              |decoded - x| / |x|

`lowrank` sees the vector as four matrices of 2500 x 1000 (in proportion for other sizes), and its
error is that of noise, which has no low rank.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from atoll.codec import Codec, make_codec
from bench.kit.report import emit

SPECS = (
    "fp32", "fp16", "bf16", "fp8", "int8", "int8:1024", "sigma8", "int4", "e3m0", "int2", "sign",
    "qsgd", "qsgd:7", "topk:0.01", "topk:0.1|int8", "randomk:0.1", "randomk:0.1|topk:0.2|int4",
    "dct:32", "lowrank:4", "feedback(int8)", "feedback(int4)", "feedback(topk:0.01)",
    "ef21(topk:0.01)",
)  # fmt: skip
QUICK = ("fp32", "bf16", "int8", "int4", "sign", "topk:0.01")


def seconds_of(function: Callable[[], object]) -> float:
    start = time.thread_time()
    function()
    return time.thread_time() - start


class Bench:
    """One codec's figures, turn by turn."""

    def __init__(self, spec: str, x: torch.Tensor, *, out: torch.Tensor) -> None:
        self.codec: Codec = make_codec(spec)
        self.codec.set_shapes(
            [(x.numel() // 4000, 1000)] * 4 if x.numel() % 4000 == 0 else [x.shape]
        )
        self.x, self.out = x, out
        self.packet = self.codec.encode(x)
        self.codec.decode(self.packet, out=out)
        self.error = float((out - x).norm() / x.norm())
        self.durations: dict[str, list[float]] = {
            "encode": [],
            "decode": [],
            "add": [],
            "memcpy": [],
        }

    def turn(self) -> None:
        """Time everything once."""
        codec, packet, x, out = self.codec, self.packet, self.x, self.out
        for name, function in {
            "memcpy": lambda: out.copy_(x),
            "encode": lambda: codec.encode(x),
            "decode": lambda: codec.decode(packet, out=out),
            "add": lambda: codec.decode_add(packet, out=out, weight=0.3),
        }.items():
            self.durations[name].append(seconds_of(function))

    def row(self) -> dict[str, Any]:
        """Return the medians so far."""
        median_s = {
            name: statistics.median(durations) for name, durations in self.durations.items()
        }
        nbytes, packet_bytes = 4 * self.x.numel(), len(self.packet.data)
        # A copy of n bytes reads n and writes n.
        least_s = median_s["memcpy"] * (nbytes + packet_bytes) / (2 * nbytes)
        rates = {f"{name}_mb_s": round(nbytes / 1e6 / s) for name, s in median_s.items()}
        return {
            "codec": self.codec.spec,
            "encode_mb_s": rates["encode_mb_s"],
            "decode_mb_s": rates["decode_mb_s"],
            "add_mb_s": rates["add_mb_s"],
            "memcpy_mb_s": rates["memcpy_mb_s"],
            "encode_limit": round(least_s / median_s["encode"], 3),
            "decode_limit": round(least_s / median_s["decode"], 3),
            "bits_per_value": round(8 * packet_bytes / self.x.numel(), 4),
            "relative_error": round(self.error, 6),
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="few codecs, few turns")
    parser.add_argument("--megabytes", type=int, default=40, help="size of the vector")
    parser.add_argument("--codec", action="append", help="only this one; may be repeated")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    x = torch.randn(arguments.megabytes * 250_000, generator=torch.Generator().manual_seed(7))
    specs = arguments.codec or (QUICK if arguments.quick else SPECS)
    out = torch.empty_like(x)
    benches = [Bench(spec, x, out=out) for spec in specs]
    for _ in range(5 if arguments.quick else 9):
        for bench in benches:
            bench.turn()
    rows = [bench.row() for bench in benches]
    emit({"megabytes": arguments.megabytes, "rows": rows}, rows)


if __name__ == "__main__":
    main()
