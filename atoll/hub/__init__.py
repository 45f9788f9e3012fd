"""The hub: the one process that listens. Queue, membership, rounds, jobs, relay, dashboard.

It never loads torch: tensors pass through it as opaque bytes.
"""
