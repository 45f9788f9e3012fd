"""The REST interface and the middleware before it: authentication, limits, errors as JSON.

May import every other room of the hub; only app and the dashboard import it.
Start in `routes.py` (the table of addresses), then `endpoint.py` (one request) and `jobs.py`.
"""
