"""Updates of a policy and targets of a critic: PPO, IMPALA (V-trace) and A3C.

May import rl.trajectory, rl.environments, rl.nets and the encodings of rl.channel.
Start with `ppo.py`; the formulas are in `losses.py` and `targets.py`.
"""
