"""Supervisors of islands: they start the ranks on all hosts and end them together.

May import what node may, and loads no torch. Start reading at `supervisor.py`; `follower.py`
is the supervisor on further hosts.
"""
