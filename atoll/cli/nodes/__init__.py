"""Machines of others that join a hub: `atoll nodes slurm`, `atoll nodes cell`, `atoll nodes shell`.

May import what cli may. Start with `slurm.py`.
"""
