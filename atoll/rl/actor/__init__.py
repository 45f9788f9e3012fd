"""The actor: collect trajectories, improve a policy with their values, send them to the critic.

May import rl.trajectory, rl.environments, rl.nets, rl.algorithms, rl.channel and rl.critic.
Start with `actor.py`, then `collector.py`.
"""
