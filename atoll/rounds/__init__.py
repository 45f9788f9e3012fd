"""Rounds: the pure state machine of one job's rounds. It knows no sockets, clocks or stores.

It may import errors, ids and wire. Start reading at `machine.py`, then `quorum.py`.
"""
