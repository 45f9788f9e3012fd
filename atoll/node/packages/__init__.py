"""The code and the Python environments of jobs, with their caches.

May import node/processes. Start reading at `venvs.py`.
"""
