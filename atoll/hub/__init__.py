"""The hub: the one server of a cluster. It keeps jobs, rounds, queues and nodes and relays tensors.

It may import the leaves, config, wire, rounds, swarm, paths and verification, and never torch:
tensors pass as opaque bytes. Start reading at `app.py`, which wires the rooms together.
"""
