"""Robust aggregation rules, which tolerate contributions that are wrong on purpose."""
