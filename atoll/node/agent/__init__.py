"""The agent of a machine: takes commands from the hub and supervises processes.

May import all sub-packages of node but islands. Start reading at `agent.py`, then `attempt.py`.
"""
