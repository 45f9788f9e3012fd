"""Environment variables that a job without code of its own may set on other people's machines."""

from __future__ import annotations

NAMES = frozenset(
    {
        "CUDA_LAUNCH_BLOCKING",
        "CUDA_VISIBLE_DEVICES",
        "GLOO_SOCKET_IFNAME",
        "HF_HUB_OFFLINE",
        "LANG",
        "LC_ALL",
        "MKL_NUM_THREADS",
        "NCCL_DEBUG",
        "NCCL_IB_DISABLE",
        "NCCL_P2P_DISABLE",
        "NCCL_SOCKET_IFNAME",
        "NUMEXPR_NUM_THREADS",
        "OMP_NUM_THREADS",
        "OPENBLAS_NUM_THREADS",
        "PYTHONHASHSEED",
        "PYTORCH_CUDA_ALLOC_CONF",
        "PYTORCH_ENABLE_MPS_FALLBACK",
        "THP_MEM_ALLOC_ENABLE",
        "TOKENIZERS_PARALLELISM",
        "TZ",
        "VECLIB_MAXIMUM_THREADS",
    }
)

SECRETS = ("_API_KEY", "_TOKEN")
"""Ends of the names of keys for services."""


def is_harmless(name: str) -> bool:
    """Return whether a variable cannot make a program load code or files.

    Others can (PYTHONPATH, LD_PRELOAD, CXX, ...); the list of those would never be complete.
    """
    return name in NAMES or name.endswith(SECRETS)
