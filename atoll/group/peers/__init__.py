"""Messages from one member to another, outside of rounds: a head and bytes, acknowledged.

May import net, wire, the leaves and, of group, routes. Start reading at `channel.py`, which states
the interface; `nearest.py` chooses between the others.
"""
