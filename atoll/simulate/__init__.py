"""A cluster of thousands on virtual time: the real round machine, on simulated machines and links.

May import the leaves, config, wire, rounds, strategies, fleet, forecast and hub (its placement).
Nothing here sleeps, opens a socket or moves a tensor. Start reading at `world.py`; `hub.py` runs
the round machine, `limits.py` says what breaks first, `scheduler.py` is the virtual clock, which
the fault simulation of the tests runs on, too.
"""
