"""Environments as columns of arrays, and what a policy must know about them.

May import only errors and config.
Start with `environment.py`, then `vector_env.py`.
"""
