"""The hub's REST interface for synchronous programs.

May import the rest of net, and what net may. Start reading at `client.py`; `http.py` turns
responses into errors.
"""
