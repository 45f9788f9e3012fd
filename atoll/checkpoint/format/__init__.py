"""The file format of a checkpoint: parts in safetensors, their layout, exported weights.

May import errors, wire, task and the files of checkpoint.
Start with `part.py`, then `layout.py`.
"""
