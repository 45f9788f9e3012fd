"""One value network for four policies, against four: `python -m bench.pooled`."""
