"""Hub, storage: files, blobs and checkpoints of jobs, uploads, backup and restore.

It may import hub/db, observability, security, jobs and rounds.
Start reading at `files.py`, then `checkpoints.py`.
"""
