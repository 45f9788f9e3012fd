"""Memory of a job, predicted before it runs: bytes per rank, and what would fit.

May import config, models, strategies and train; torch makes meta tensors only.
Start with memory.py.
"""
