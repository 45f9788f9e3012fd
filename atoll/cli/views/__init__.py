"""Terminal output: the live view, tables, and the one console.

May import cli.views and values of other packages, no commands.
Start with `live.py`; `screen.py` owns the output.
"""
