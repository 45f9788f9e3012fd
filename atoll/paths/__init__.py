"""Modular models whose paths share modules: which path has which module, and who trains it when.

May import `errors`, `ids` and `wire`: no torch, no sockets, no clock.
Start with `layout.py`, then `ledger.py`.
"""
