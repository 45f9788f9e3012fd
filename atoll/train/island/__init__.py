"""The built-in trainer and scripts on the ranks of an island.

May import what train may.
Start with island_trainer.py for the trainer, script_ranks.py for scripts.
"""
