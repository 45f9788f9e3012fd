"""REST handler of the quotas and their use."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from atoll.hub.http.context import Context
from atoll.hub.http.endpoint import Json
from atoll.hub.quotas.ledger import Use
from atoll.hub.quotas.limits import Kind

SHOWN = 20
"""Holders per kind, those that use most of their limit."""
MOST_REACHED = 100
"""Reached limits per kind that are shown even beyond these."""


async def show(request: Request, context: Context) -> Response:
    """GET /api/limits: the limits, and the holders that use most; `?all=1`: all holders."""
    ledger = context.stores.ledger
    uses = await ledger.uses()
    shown = uses if request.query_params.get("all") == "1" else fullest(uses)
    limits = {kind.value: ledger.quotas.of(kind) for kind in Kind}
    return Json({"limits": limits, "uses": [row(use) for use in shown], "number": len(uses)})


def fullest(uses: Sequence[Use]) -> list[Use]:
    """Return the reached limits and the first `SHOWN` of every kind."""
    seen: Counter[Kind] = Counter()
    found = []
    for use in uses:
        seen[use.kind] += 1
        if seen[use.kind] <= (MOST_REACHED if use.reached else SHOWN):
            found.append(use)
    return found


def row(use: Use) -> dict[str, Any]:
    """Return one line of the view."""
    holder = use.holder
    return {
        "kind": use.kind.value, "text": use.kind.text, "in_bytes": use.kind.in_bytes,
        "who": holder.text, "role": holder.role, "name": holder.name, "member": holder.member,
        "used": use.used, "limit": use.limit, "refused": use.refused,
        "refused_at": use.refused_at, "reached": use.reached,
    }  # fmt: skip
