"""The REST interface and the middleware before it: authentication, limits, errors as JSON.

May import every sub-room of the hub but alarms and dashboard.
Start in `routes.py` (the table of addresses), then `endpoint.py` (one request) and `jobs.py`.
"""
