"""The outer strategies without parameter servers: one file each, and the bases they share.

Imports the rest of strategies except inner; options are in `atoll.methods`.
Start at `average.py`, then `periodic.py`.
"""
