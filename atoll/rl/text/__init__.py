"""Reinforcement learning of language models on tasks that a program can check.

May import the other rooms of rl, models and data.
Start with `run.py`, then `actor.py`.
"""
