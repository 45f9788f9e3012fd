"""Inner optimizers, learning-rate schedules, and the lazy import of the compiler.

May import only errors, config and the wrapped optimizer.
Start with `optimizers.py`.
"""
