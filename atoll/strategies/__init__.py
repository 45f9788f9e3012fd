"""How a step is computed (inner) and how members come to agree (outer).

May import the leaves, methods, config, wire, task, island, models, codec, group and devices; not
net or hub.
Start at `base.py` for the two seams, and at `outer/average.py` for the shortest method.
"""
