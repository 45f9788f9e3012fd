"""Networks of policies and critics, their distributions and optimizers.

May import rl.trajectory and rl.environments.
Start with `policy.py`, then `value.py`.
"""
