"""Group, in process: a group whose members are threads of one process, for tests and simulations.

It may import group and routes. Start reading at `groups.py`.
"""
