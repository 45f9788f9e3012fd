"""Members that train the paths of a modular model (DiPaCo), one path after the other.

May import `train/swarm` for the outer method of a part of a model, and what that may import.
Start with `trainer.py`, then `modules.py`.
"""
