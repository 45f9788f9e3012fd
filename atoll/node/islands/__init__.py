"""Supervisors: they start the ranks of an island on its machines and end them together.

May import what node may, and loads no torch.
Start with rank_supervisor.py; follower.py is its part on further machines.
"""
