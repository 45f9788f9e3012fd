"""Nodes that joined and the processes on them, from launch to exit.

May import wire and, of the hub, jobs, rounds, sessions, storage and db.
Start in `membership.py`: what the loss of a connection or the exit of a process changes.
"""
