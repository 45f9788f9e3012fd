"""Codecs that send every value with fewer bits.

Imports the codec room's base only.
Start at `integers.py`, then `blocks.py`.
"""
