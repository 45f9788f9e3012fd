"""Reinforcement learning: one policy per machine, and one critic that pools their experience.

May import train, run, queues and what they may; see tests/test_layers.py.
Start with `run.py`, then `actor/actor.py` and `critic/role.py`.
"""
