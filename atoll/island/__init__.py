"""What every rank of an island needs: process group, mesh, commands of rank 0, start phases.

May import the leaves, config and devices; torch only where it is used.
Start with `command_broadcaster.py`.
"""
