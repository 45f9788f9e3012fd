"""A still of a run as a terminal showed it: one frame of the live view and the results, as SVG."""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from pathlib import Path

from rich.console import Console, RenderableType

WIDTH = 100
MOMENT = 0.6
"""Which frame is kept: the last one before this share of the steps is done."""


class Picture:
    """Keeps a frame while the run goes on; `save` puts the results under it."""

    def __init__(self, path: Path) -> None:
        """Write to `path` in the end."""
        self.path = path
        self._frame: RenderableType | None = None

    def offer(self, frame: RenderableType, *, share: float) -> None:
        """Show what the live view looks like now, `share` of the steps done."""
        if share <= MOMENT or self._frame is None:
            self._frame = frame

    def save(self, title: str, results: Callable[[Console], None]) -> None:
        """Write the file; `results` prints what comes under the frame."""
        console = Console(
            record=True, width=WIDTH, file=io.StringIO(), force_terminal=True, highlight=False
        )
        if self._frame is not None:
            console.print(self._frame)
        results(console)
        # Fonts from elsewhere would be fetched by whoever looks; a token is nobody's business.
        drawn = re.sub(
            r"@font-face\s*\{.*?\}", "", console.export_svg(title=title), flags=re.DOTALL
        )
        drawn = re.sub(r"<!--.*?-->", "", drawn, flags=re.DOTALL)
        # As many dots as there were letters: every line says how long it is.
        drawn = re.sub(r"(?<=token=)[\w-]+", lambda token: "." * len(token[0]), drawn)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(drawn, encoding="utf-8")
