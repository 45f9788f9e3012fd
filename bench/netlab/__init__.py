"""The network laboratory (`atoll.netlab`) by hand: `python -m bench.netlab`."""
