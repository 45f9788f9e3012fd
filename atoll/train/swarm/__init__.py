"""A member of a SWARM: it serves a stage, and drives microbatches if that is the first one.

May import swarm, and what train may; of train all but paths and verification.
Start reading at `member.py` (the loop and the ledger), then `work.py` (computing and sending).
"""
