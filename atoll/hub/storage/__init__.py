"""Hub, storage: files, blobs and checkpoints of jobs, uploads, backup and restore.

It may import hub/db, quotas, observability and security.
Start reading at `files.py`, then `blobs.py`.
"""
