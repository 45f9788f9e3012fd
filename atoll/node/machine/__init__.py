"""Node, machine: what a machine has: cores, accelerators, interfaces and bandwidth.

It may import node/processes.
Start reading at `probe.py`.
"""
