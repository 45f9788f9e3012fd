"""Speed and error of every codec: `python -m bench.codec [--quick]`, one JSON object on stdout.

One thread, 40 MB of float32 (10 million elements) unless `--megabytes` says otherwise; medians of
several runs. Rates are float32 bytes of the vector per second. `both_mb_s` is encode and decode
one after the other; `add_mb_s` is `decode_add`; `memcpy_mb_s` copies the same vector, as a measure
of what the memory gives.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch

from atoll.codec import make_codec
from bench.report import emit

SPECS = ("fp32", "fp16", "bf16", "int8:256", "int8:1024", "feedback(int8:256)")


def median_s(function: Callable[[], object], *, repeats: int) -> float:
    function()
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        function()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def measure(spec: str, *, x: torch.Tensor, repeats: int) -> dict[str, float | str | int]:
    codec = make_codec(spec)
    out, other = torch.empty_like(x), torch.zeros_like(x)
    packet = codec.encode(x)
    encode_s = median_s(lambda: codec.encode(x), repeats=repeats)
    decode_s = median_s(lambda: codec.decode(packet, out=out), repeats=repeats)
    add_s = median_s(lambda: codec.decode_add(packet, out=other, weight=0.3), repeats=repeats)
    memcpy_s = median_s(lambda: other.copy_(x), repeats=repeats)
    codec.decode(packet, out=out)
    nbytes = x.numel() * 4 / 1e6
    return {
        "codec": codec.spec,
        "nbytes": len(packet.data),
        "encode_mb_s": round(nbytes / encode_s),
        "decode_mb_s": round(nbytes / decode_s),
        "both_mb_s": round(nbytes / (encode_s + decode_s)),
        "add_mb_s": round(nbytes / add_s),
        "memcpy_mb_s": round(nbytes / memcpy_s),
        "relative_error": float((out - x).norm() / x.norm()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer repeats")
    parser.add_argument("--megabytes", type=int, default=40, help="size of the vector")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    x = torch.randn(arguments.megabytes * 250_000, generator=torch.Generator().manual_seed(7))
    repeats = 5 if arguments.quick else 21
    rows = [measure(spec, x=x, repeats=repeats) for spec in SPECS]
    emit({"rows": rows}, rows)


if __name__ == "__main__":
    main()
