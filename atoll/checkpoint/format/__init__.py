"""The bytes of a checkpoint: parts in safetensors, their layout, weights.

May import errors, wire, task and the files of checkpoint.
Start with `part.py`, then `layout.py`.
"""
