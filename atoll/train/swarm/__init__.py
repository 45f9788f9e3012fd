"""A member of a SWARM: it serves a stage, and drives microbatches if that is the first one.

Start reading at `member.py` (the loop and the ledger), then `work.py` (computing and sending).
"""
