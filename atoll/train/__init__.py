"""The built-in trainer: from a job file to trained weights, as one member of a group.

May import strategies, group, data, models, checkpoint and recovery.
Start with `trainer.py`, then `loop.py`.
"""
