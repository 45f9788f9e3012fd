"""Node, agent: the agent of a machine: takes commands from the hub and supervises processes.

It may import all sub-rooms but islands.
Start reading at `agent.py`, then `attempt.py`.
"""
