"""Properties of a machine: cores, accelerators, interfaces and bandwidth.

May import node/processes. Start reading at `probe.py`.
"""
