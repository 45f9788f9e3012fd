"""Clients of rounds: synchronous, in the background, and compressed in both directions.

May import vectors and strategies. Start reading at `round_client.py`.
"""
