"""Strategies, inner: how one optimizer step is computed: on one rank, or on several of an island.

It may import strategies. Start reading at `local.py`, then `worker.py`.
"""
