from __future__ import annotations

import io
from pathlib import Path

from rich.console import Console
from rich.text import Text

from atoll.cli.views.job import Watched
from atoll.cli.views.live import Picture, View


def test_screenshot_shows_the_frame_before_its_moment(tmp_path: Path) -> None:
    picture = Picture(tmp_path / "new" / "run.svg")
    for share, words in ((0.1, "early"), (0.5, "middle"), (0.9, "evening")):
        picture.offer(Text(words), share=share)
    picture.save("a run", lambda console: console.print("results"))
    drawn = picture.path.read_text(encoding="utf-8")
    assert "middle" in drawn
    assert "results" in drawn
    assert "evening" not in drawn


def test_the_picture_names_no_other_host_and_no_token(tmp_path: Path) -> None:
    picture = Picture(tmp_path / "run.svg")
    picture.save("a run", lambda console: console.print("http://127.0.0.1:1/?token=s3cret-x"))
    drawn = picture.path.read_text(encoding="utf-8")
    assert "s3cret" not in drawn
    assert "@font-face" not in drawn
    assert "https:" not in drawn


def test_lines_keep_their_width_without_spaced_letters(tmp_path: Path) -> None:
    picture = Picture(tmp_path / "run.svg")
    console = Console(file=io.StringIO(), width=80)
    with View(console, dashboard="http://127.0.0.1:1/?token=s3cret", picture=picture) as view:
        job = {"job": "demo", "state": "running", "members": [], "committed_round": 1}
        view.show(Watched.of({**job, "progress": {"step": 1, "steps": 9}}))
    picture.save("a run", lambda console: console.print("results"))
    drawn = picture.path.read_text(encoding="utf-8")
    assert "http://127.0.0.1:1/<" in drawn
    assert drawn.count("textLength=") == drawn.count('lengthAdjust="spacingAndGlyphs"') > 0
