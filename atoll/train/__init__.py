"""The built-in trainer: from a job file to trained weights, as one member of a group.

May import the leaves, config, wire, net, queues, rounds, swarm, paths, verification and what it
trains with: task, island, devices, models, data, codec, group, strategies, checkpoint, recovery.
Start with `trainer.py`, then `loop.py`.
"""
