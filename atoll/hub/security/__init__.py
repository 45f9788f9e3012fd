"""Hub, security: tokens, tickets, certificates, and limits on unauthenticated connections.

It may import hub/db, quotas and observability.
Start reading at `auth.py`.
"""
