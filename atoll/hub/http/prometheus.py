"""GET /metrics: the hub's metrics for Prometheus, without a client library.

Format: https://prometheus.io/docs/instrumenting/exposition_formats/ (text, version 0.0.4).
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from atoll.hub.http.context import Context
from atoll.hub.http.metric_families import Family, families

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def render(families: Iterable[Family]) -> str:
    """Return the metrics as text; samples without a value are omitted."""
    return "".join(_family(family) for family in families)


def _family(family: Family) -> str:
    lines = [f"# HELP {family.name} {family.text}", f"# TYPE {family.name} {family.kind}"]
    for labels, value in family.samples:
        if value is None:
            continue
        inside = ",".join(f'{key}="{_escaped(text)}"' for key, text in labels.items())
        name = f"{family.name}{{{inside}}}" if inside else family.name
        lines.append(f"{name} {_number(value)}")
    return "\n".join(lines) + "\n"


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _number(value: float) -> str:
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    return repr(value)


async def show(_request: Request, context: Context) -> Response:
    """GET /metrics: all current metrics."""
    text = render(await families(context))
    return PlainTextResponse(text, headers={"content-type": CONTENT_TYPE})
