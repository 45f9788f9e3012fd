"""Group, routes: how an exchange travels: over the relay, directly, or by sites.

It may import group and collectives. Start reading at `routes.py`.
"""
