"""A PyTorch script's interface to a job: `atoll.join()` and the object it returns on every rank.

May import train and what it may.
Start with `connect.py`, then `member.py`.
"""

from __future__ import annotations

from atoll.run.connect import join as join
from atoll.run.member import Run as Run
