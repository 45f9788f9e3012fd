"""Node, processes: child processes: their output, exit codes, trees, and locks between them.

It may import errors and ids.
Start reading at `process_tree.py`.
"""
