"""Collect and restore one member's state.

May import checkpoint.format and checkpoint.stores.
Start with `capture.py`.
"""
