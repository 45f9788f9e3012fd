"""Scaling laws: how the loss depends on parameters, tokens, members and rounds, from finished runs.

May import errors, config, strategies.resolve and train.report. Loads numpy, never torch. Start with
fit.py; the laws are in laws.py, where the points come from in runs.py, what makes the runs in
sweep.py.
"""
