"""How the ranks of one member compute a step: shards, replicas, tensor and pipeline parallelism.

May import what strategies may; knows no network and no hub. Start reading at `base.py` (a rank's
part of a model), then `worker.py` (its commands) and `leader.py` (how rank 0 leads).
"""
