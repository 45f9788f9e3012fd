"""Node, islands: several ranks as one member: rendezvous, rank supervision and restarts.

It may import all sub-rooms of node.
Start reading at `rank_supervisor.py`.
"""
