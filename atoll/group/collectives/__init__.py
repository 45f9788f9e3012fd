"""Group, collectives: exact collectives between dialled members, with bounded waits.

It may import group. Start reading at `collectives.py`.
"""
