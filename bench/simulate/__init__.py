"""Simulations: ten thousand members, and six beside real processes: `python -m bench.simulate`."""
