"""Routing of documents to the paths of a modular model, and use of its paths (DiPaCo).

May import data, models, paths, checkpoint, queues and the leaves.
Start with `router.py`, then `sharding.py` and `evaluate.py`.
"""
