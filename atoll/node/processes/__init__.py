"""Child processes: their output, exit codes, trees, and locks between them; and threads.

May import errors and ids. Start reading at `process_tree.py`.
"""
