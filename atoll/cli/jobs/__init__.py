"""Running a job from the command line: read the file, submit it, follow it, fetch its results.

May import config, code, net and, inside functions, the hub and node; `cli/commands` imports it.
Start in `jobfile.py`, then `remote.py` (a hub elsewhere) or `local.py` (an embedded hub).
"""
