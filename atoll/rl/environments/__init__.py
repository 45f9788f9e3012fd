"""Environments as columns of arrays, and the description of a policy's task.

May import only errors and config.
Start with `environment.py`, then `vector_env.py`.
"""
