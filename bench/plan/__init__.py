"""The planner against the truth: `python -m bench.plan`."""
