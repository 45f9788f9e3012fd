"""The commands of `atoll`, one file each; heavy imports are inside the functions.

May import anything, inside the functions of commands.
Start with `run.py`.
"""
