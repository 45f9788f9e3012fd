"""Hub, swarm: the ledger of each job that trains as a SWARM, and its members' requests.

It may import hub/db, observability, storage, jobs and rounds.
Start reading at `service.py`; the pure ledger is `atoll/swarm`.
"""
