"""The command line: `main.py` registers the commands in `commands/`.

May import anything, inside the functions; starting `atoll --help` loads nothing heavy.
Start with `main.py`.
"""
