"""The table of codecs: description, use, and what each can be combined with.

A new codec is a file with a class and a row here. In a spec, the part before `|` selects numbers of
a vector, the part after encodes them: `topk:0.01|int8`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from atoll.methods.method import Paper, arxiv


@dataclass(frozen=True, slots=True, kw_only=True)
class CodecRow:
    """One codec. Speeds are bytes of float32 per second on one core.

    They are rounded from `python -m bench.codecs` on an AMD EPYC of 2025 and shared, because all
    members must make the same choice (see `auto`). fp16 and bf16 count like fp32: their measured
    advantage is an artifact of memory allocation.
    """

    name: str
    implementation: str
    """`module:Class`, with a class method `from_spec`."""
    example: str
    line: str
    good_for: str
    papers: tuple[Paper, ...] = ()
    selects: bool = False
    """Selects numbers, so another codec can follow after `|`."""
    wraps: bool = False
    """Takes other codecs in parentheses."""
    needs_allgather: bool = False
    """The mean of several packets does not fit into one packet."""
    remembers: bool = False
    """Keeps state from one vector to the next."""
    precise: bool = False
    """Stateless, with negligible loss of every number."""
    unbiased: bool = False
    """Without loss on average, so that error feedback does harm."""
    whole_vectors: bool = False
    """Depends on the shapes or the length of a vector, so it cannot follow `|`."""
    kept_vectors: float = 0.0
    """Memory, in vectors as long as the model."""
    encode_bytes_per_s: float = 0.5e9
    """The default is that of a slow codec: selection costs more than rounding."""
    decode_bytes_per_s: float = 2e9
    page: str = "docs/reference/codecs.md"


CODECS: Mapping[str, CodecRow] = MappingProxyType(
    {
        row.name: row
        for row in (
            CodecRow(
                name="fp32",
                implementation="atoll.codec.quantized.cast:Cast",
                example="fp32",
                line="unchanged 32-bit floats",
                good_for="fast links, references",
                precise=True,
                encode_bytes_per_s=9e9,
                decode_bytes_per_s=10e9,
            ),
            CodecRow(
                name="fp16",
                implementation="atoll.codec.quantized.cast:Cast",
                example="fp16",
                line="half precision",
                good_for="half the bytes where values stay within 6e-5 to 65504",
                precise=True,
                encode_bytes_per_s=9e9,
                decode_bytes_per_s=10e9,
            ),
            CodecRow(
                name="bf16",
                implementation="atoll.codec.quantized.cast:Cast",
                example="bf16",
                line="the upper half of fp32",
                good_for="half the bytes, any range, 3 digits",
                precise=True,
                encode_bytes_per_s=9e9,
                decode_bytes_per_s=10e9,
            ),
            CodecRow(
                name="fp8",
                implementation="atoll.codec.quantized.exponents:BlockwiseFp8",
                example="fp8:256",
                line="8-bit floats (e4m3) with a scale per block",
                good_for="a quarter of the bytes where values of a block differ in size",
                papers=(arxiv("2209.05433", "FP8 Formats for Deep Learning", 2022),),
                encode_bytes_per_s=2.3e9,
                decode_bytes_per_s=3.5e9,
            ),
            CodecRow(
                name="int8",
                implementation="atoll.codec.quantized.blockwise:BlockwiseInt8",
                example="int8:256",
                line="8-bit whole numbers with a scale per block",
                good_for="a quarter of the bytes without a measurable loss: the usual choice",
                papers=(arxiv("2110.02861", "8-bit Optimizers via Block-wise Quantization", 2021),),
                precise=True,
                encode_bytes_per_s=3.2e9,
                decode_bytes_per_s=10.8e9,
            ),
            CodecRow(
                name="sigma8",
                implementation="atoll.codec.quantized.sigma8:Sigma8",
                example="sigma8:6",
                line="256 buckets of a few standard deviations; each decodes to the mean of its "
                "values",
                good_for="normally distributed pseudo-gradients; sums are kept",
                papers=(arxiv("2412.01152", "INTELLECT-1 Technical Report", 2024),),
                precise=True,
                encode_bytes_per_s=0.9e9,
                decode_bytes_per_s=4.6e9,
            ),
            CodecRow(
                name="int6",
                implementation="atoll.codec.quantized.integers:BlockwiseInt6",
                example="int6:256",
                line="6-bit whole numbers with a scale per block",
                good_for="activations in a subspace: more dimensions for the same bytes",
                precise=True,
                encode_bytes_per_s=1.3e9,
                decode_bytes_per_s=1.8e9,
            ),
            CodecRow(
                name="int4",
                implementation="atoll.codec.quantized.integers:BlockwiseInt4",
                example="int4:256",
                line="4-bit whole numbers with a scale per block",
                good_for="an eighth of the bytes, with feedback",
                encode_bytes_per_s=2.2e9,
                decode_bytes_per_s=5.3e9,
            ),
            CodecRow(
                name="int2",
                implementation="atoll.codec.quantized.integers:BlockwiseInt2",
                example="int2:256",
                line="2-bit whole numbers with a scale per block",
                good_for="a sixteenth of the bytes, with feedback, under Muon",
                papers=(
                    arxiv(
                        "2505.23725", "MuLoCo: Muon is a Practical Inner Optimizer for DiLoCo", 2025
                    ),
                ),
                encode_bytes_per_s=1e9,
                decode_bytes_per_s=6e9,
            ),
            CodecRow(
                name="mean2",
                implementation="atoll.codec.quantized.mean2:Mean2",
                example="mean2",
                line="2 bits: sign and large or small, decoded to the mean of its kind",
                good_for="values that topk has chosen",
                papers=(
                    arxiv(
                        "2508.15706",
                        "Communication Efficient LLM Pre-training with SparseLoCo",
                        2025,
                    ),
                ),
                encode_bytes_per_s=0.3e9,
                decode_bytes_per_s=0.7e9,
            ),
            CodecRow(
                name="e3m0",
                implementation="atoll.codec.quantized.exponents:E3M0",
                example="e3m0:256",
                line="4 bits: sign and a power of two, with a half-precision scale per block",
                good_for="an eighth of the bytes; small values keep their size",
                papers=(
                    arxiv(
                        "2501.18512",
                        "Streaming DiLoCo with overlapping communication: Towards a Distributed "
                        "Free Lunch",
                        2025,
                    ),
                ),
                encode_bytes_per_s=1.5e9,
                decode_bytes_per_s=5.3e9,
            ),
            CodecRow(
                name="topk",
                implementation="atoll.codec.sparse.topk:TopK",
                example="topk:0.01",
                line="the largest values and where they are",
                good_for="very few bytes, with feedback; members gather",
                papers=(
                    arxiv(
                        "1704.05021", "Sparse Communication for Distributed Gradient Descent", 2017
                    ),
                ),
                selects=True,
                needs_allgather=True,
            ),
            CodecRow(
                name="randomk",
                implementation="atoll.codec.sparse.randomk:RandomK",
                example="randomk:0.1",
                line="values at random places that all members know",
                good_for="very few bytes that can be summed on the way; with feedback",
                papers=(arxiv("1809.07599", "Sparsified SGD with Memory", 2018),),
                selects=True,
            ),
            CodecRow(
                name="lowrank",
                implementation="atoll.codec.lowrank:LowRank",
                example="lowrank:4",
                line="every matrix as a product of two low-rank factors",
                good_for="updates of matrices; with feedback",
                papers=(
                    arxiv(
                        "1905.13727",
                        "PowerSGD: Practical Low-Rank Gradient Compression for Distributed "
                        "Optimization",
                        2019,
                    ),
                ),
                needs_allgather=True,
                whole_vectors=True,
            ),
            CodecRow(
                name="dct",
                implementation="atoll.codec.sparse.dct:Dct",
                example="dct:32",
                line="the largest cosine components of every tile",
                good_for="values that vary smoothly across a matrix; with feedback",
                papers=(arxiv("2411.19870", "DeMo: Decoupled Momentum Optimization", 2024),),
                selects=True,
                needs_allgather=True,
            ),
            CodecRow(
                name="qsgd",
                implementation="atoll.codec.quantized.qsgd:QSGD",
                example="qsgd:127",
                line="few levels, rounded at random so that the mean is right",
                good_for="proofs, and training without feedback",
                papers=(
                    arxiv(
                        "1610.02132",
                        "QSGD: Communication-Efficient SGD via Gradient Quantization and Encoding",
                        2016,
                    ),
                ),
                unbiased=True,
                encode_bytes_per_s=0.9e9,
                decode_bytes_per_s=3.6e9,
            ),
            CodecRow(
                name="sign",
                implementation="atoll.codec.quantized.sign:Sign",
                example="sign:256",
                line="one bit per value and a scale",
                good_for="a thirty-second of the bytes, with feedback",
                papers=(
                    arxiv(
                        "1802.04434",
                        "signSGD: Compressed Optimisation for Non-Convex Problems",
                        2018,
                    ),
                ),
                encode_bytes_per_s=3e9,
                decode_bytes_per_s=7.5e9,
            ),
            CodecRow(
                name="feedback",
                implementation="atoll.codec.wrappers.feedback:Feedback",
                example="feedback(int8)",
                line="wrapper: adds what the inner codec lost to the next vector",
                good_for="all coarse codecs",
                papers=(
                    arxiv(
                        "1901.09847",
                        "Error Feedback Fixes SignSGD and other Gradient Compression Schemes",
                        2019,
                    ),
                ),
                wraps=True,
                remembers=True,
                kept_vectors=3.0,
            ),
            CodecRow(
                name="ef21",
                implementation="atoll.codec.wrappers.ef21:EF21",
                example="ef21(topk:0.1)",
                line="wrapper: sends only the change since the last vector",
                good_for="coarse codecs of gradients, without a bound on these",
                papers=(
                    arxiv(
                        "2106.05203",
                        "EF21: A New, Simpler, Theoretically Better, and Practically Faster "
                        "Error Feedback",
                        2021,
                    ),
                ),
                wraps=True,
                remembers=True,
                kept_vectors=2.0,
            ),
            CodecRow(
                name="by_size",
                implementation="atoll.codec.wrappers.by_size:BySize",
                example="by_size:65536(fp32,int8)",
                line="short vectors in one codec, long ones in another",
                good_for="methods that send many small pieces",
                wraps=True,
                precise=True,
                whole_vectors=True,
            ),
            CodecRow(
                name="by_role",
                implementation="atoll.codec.wrappers.by_role:ByRole",
                example="by_role(topk:0.01,bf16)",
                line="matrices in one codec, tensors of one dimension in another",
                good_for="a coarse codec for large tensors, a precise one for biases and norms",
                wraps=True,
                needs_allgather=True,
                whole_vectors=True,
            ),
            CodecRow(
                name="auto",
                implementation="atoll.codec.wrappers.auto:Auto",
                example="auto(fp32,bf16,int8)",
                line="the fastest codec on the measured links",
                good_for="machines with unknown links",
                wraps=True,
                remembers=True,
            ),
        )
    }
)
"""Name -> codec, in the order of `atoll methods codecs`."""
