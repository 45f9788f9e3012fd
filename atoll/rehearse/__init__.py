"""A job on this machine, before machines are rented for it: real processes on shaped links.

May import the leaves, config, fleet, forecast, simulate, netlab, net and node. Start with
conduct.py: site.py is the hub and the machines in network namespaces, expected.py what the planner
says of the same minutes, simulated.py takes their place where there are no namespaces, compare.py
sets both beside each other.
"""
