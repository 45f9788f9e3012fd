"""Codecs around other codecs.

Imports the codec room only.
Start at `wrapper.py`, then `feedback.py`.
"""
