"""The table of training methods: options, presets and capabilities.

Imports only `errors` and never torch, so the hub, the CLI and the configuration can read it.
Start at `method.py` (a row), then `table.py` (the list).
"""
