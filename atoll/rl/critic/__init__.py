"""The pooled critic: one value network, trained on the trajectories of every actor.

May import rl.trajectory, rl.environments, rl.nets, rl.algorithms and rl.channel.
Start with `role.py`, then `critic.py`.
"""
