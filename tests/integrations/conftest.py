from __future__ import annotations

from tests.e2e.conftest import atoll

__all__ = ["atoll"]
