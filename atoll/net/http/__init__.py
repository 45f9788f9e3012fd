"""The hub's REST interface for synchronous programs.

May import the rest of net, and what net may. Start reading at `client.py`; `http.py` turns
responses into errors.
"""

from __future__ import annotations

import sys
from typing import Any

# httpx loads its own command line, with pygments and parts of rich: a sixth of the processor time
# of `atoll status`. Nothing here uses it, and httpx allows for its absence.
_modules: dict[str, Any] = sys.modules
_modules.setdefault("httpx._main", None)
