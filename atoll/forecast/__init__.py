"""Predicts a run on a fleet before it begins: seconds, bytes, memory, loss and money per candidate.

May import fleet, plan, scaling, strategies, wire and what these may. Start with predict.py, one
candidate on one fleet; candidates.py lists them, ranking.py orders them and says why.
"""
