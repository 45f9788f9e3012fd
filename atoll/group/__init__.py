"""The members of a job as a strategy sees them: join a round, reduce, commit.

May import net, codec, reducer, rounds and wire; it knows neither strategies nor tasks.
Start reading at `base.py` (the protocol), then `run_round.py` (one round) and `hub.py`.
"""
