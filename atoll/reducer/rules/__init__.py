"""Robust rules: each makes one vector of many, some of which may be wrong on purpose."""
