from __future__ import annotations

from pathlib import Path

from rich.text import Text

from atoll.cli.views.live import Picture


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
