"""What actors and the critic send each other through queues and topics at the hub.

May import rl.trajectory, rl.environments and the queues.
Start with `messages.py`, then `actor.py` and `critic.py`.
"""
