"""Write checkpoints in the background, in a process that loads no torch.

May import checkpoint.format and checkpoint.stores.
Start with `background.py`; the other process starts in `writer.py`.
"""
