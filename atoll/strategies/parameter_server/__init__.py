"""Strategies whose members push to parameter servers and pull from them.

Imports the rest of strategies except inner; options are in `atoll.methods`. Start at `base.py`.
"""
