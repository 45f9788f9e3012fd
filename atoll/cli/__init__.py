"""The command line: `main.py` registers the verbs of `commands/`.

May import anything, inside the functions; starting `atoll --help` loads nothing heavy.
Start with `main.py`.
"""
