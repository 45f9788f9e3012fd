"""Machines and the links between them: a value read from a TOML file or from what a hub knows.

May import errors, ids and config. Never loads torch. Start with fleet.py; reading.py reads and
writes files, measured.py takes a hub's list of nodes, links.py answers what a path carries.
"""
