"""Every training method as a row of data: its options, words, presets and capabilities.

Imports only `errors` and never torch, so the hub, the command line and the configuration read it.
Start at `method.py` for what a row says, and at `table.py` for the list.
"""
