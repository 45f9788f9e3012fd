"""The member's part in verified rounds: digests of its own steps, and steps of others again.

May import atoll/verification, and what train may.
Start with `witness.py` (what a member commits to) and `recomputation.py` (what a checker does).
"""
