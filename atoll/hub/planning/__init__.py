"""Plans of jobs on the machines that are there, made by a process of their own.

May import the leaves, wire, rounds and, of the hub, jobs, nodes, rounds and security.
Start reading at `replanning.py`, then `planner.py`, which asks the process.
"""
