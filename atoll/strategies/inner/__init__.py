"""How the ranks of one member compute a step: shards, copies, tensor and pipeline parallelism.

May import what strategies may; knows no network and no hub.
Start with base.py (what a rank has), worker.py (what it does), leader.py (how rank 0 leads).
"""
