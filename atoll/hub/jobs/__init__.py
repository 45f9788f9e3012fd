"""Jobs: their records, how they end, what views show of them, and how they are deleted.

May import config, wire, rounds/timing and, of the hub, db, observability, security and storage.
Start in `record.py` (what is known of a job), then `jobs.py` (every change of it, durable) and
`members.py` (the states of its processes, and which may follow which).
"""
