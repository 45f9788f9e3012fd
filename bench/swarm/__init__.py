"""Throughput of a SWARM of real processes against its ideal: `python -m bench.swarm`."""
