"""Node, launchers: start the processes of a job, as plain processes or in containers.

It may import node/processes and identity.
Start reading at `launcher.py`, the interface.
"""
