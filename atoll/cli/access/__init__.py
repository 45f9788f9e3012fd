"""Commands about who may do what: tickets, logins, the audit log, secrets.

May import anything, inside the verb.
Start with `ticket.py`.
"""
