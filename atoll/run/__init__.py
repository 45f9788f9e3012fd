"""A PyTorch script's part in a job: `atoll.join()` and what it returns, on every rank."""

from __future__ import annotations

from atoll.run.connect import join as join
from atoll.run.member import Run as Run
