"""From a job file to a finished job: read, check, submit, follow, collect.

May import anything, inside the functions.
Start with `jobfile.py`, then `local.py` or `remote.py`.
"""
