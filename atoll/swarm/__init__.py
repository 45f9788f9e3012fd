"""The control of a SWARM: paths of microbatches, their ledger, and who serves which stage.

May import wire only: no sockets, files, clock or torch.
Start reading at `ledger.py` (counting, on the hub), then `driver.py` (one path, on a member).
"""
