"""Strategies, rounds: clients of rounds: synchronous, in the background, and compressed both ways.

It may import vectors and strategies. Start reading at `round_client.py`.
"""
