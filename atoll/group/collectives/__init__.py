"""Exact collectives between members with direct connections, with bounded waits.

May import group. Start reading at `collectives.py`.
"""
