"""Hub, security: tokens, tickets, certificates, and limits on unauthenticated connections.

It may import hub/db and observability.
Start reading at `auth.py`.
"""
