"""Atoll beside others on the same work and the same links: `python -m bench.peers`."""
