"""What a checkpoint holds of one member, collected and restored.

May import checkpoint.format and checkpoint.stores.
Start with `capture.py`.
"""
