"""Strategies that average the moments of the inner optimizer as well as the parameters.

Imports what `strategies.outer` may. Start at `desloc.py`.
"""
