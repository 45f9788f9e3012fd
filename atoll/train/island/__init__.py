"""Training with several ranks per member: the built-in trainer and scripts.

May import island, strategies and the rest of train except the trainer.
Start with `island_trainer.py`; for scripts with `script_ranks.py`.
"""
