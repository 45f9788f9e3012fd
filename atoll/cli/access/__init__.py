"""Commands about who may do what: tickets, logins, the audit log, secrets.

May import anything, inside the functions of commands.
Start with `ticket.py`.
"""
