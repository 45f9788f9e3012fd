"""Child processes: their output, exit codes, files, trees and locks; and threads.

May import errors and ids. Start reading at `process_tree.py`.
"""
