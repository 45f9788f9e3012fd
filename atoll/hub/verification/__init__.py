"""The verification of jobs with `trust = "audit"`: commitments, challenges, states, evictions.

May import the lower sub-rooms of the hub and `atoll/verification`. Start with `service.py`.
"""
