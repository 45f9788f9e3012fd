"""Node, packages: the code and the Python environments of jobs, with their caches.

It may import node/processes.
Start reading at `venvs.py`.
"""
