"""Outer strategies without parameter servers: one file per method, and their base classes.

Imports the rest of strategies except inner; options are in `atoll.methods`. Start at `average.py`,
then `periodic.py`.
"""
