"""Machines and the links between them: a value read from a TOML file or from what a hub knows.

May import errors and config. Never loads torch. Start with fleet.py; reading.py reads and
writes files, measured.py reads a hub's list of nodes, kept_links.py keeps measured links.
"""
