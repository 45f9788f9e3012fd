"""Hub, paths: the ledger of each job whose model has paths, and its members' requests.

It may import hub/db, observability, storage, jobs and rounds.
Start reading at `service.py`; the pure ledger is `atoll/paths`.
"""
