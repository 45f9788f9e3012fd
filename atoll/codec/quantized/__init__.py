"""Codecs that write every number with fewer bits.

Imports the codec room's base only.
Start at `integers.py`, then `blocks.py`.
"""
