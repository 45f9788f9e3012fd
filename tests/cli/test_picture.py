"""A run at the terminal as an animated SVG."""

from __future__ import annotations

import io
import re
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from rich.console import Console
from rich.panel import Panel
from rich.text import Text

from atoll.cli.picture import FRAMES, Picture
from atoll.cli.views.job import Watched
from atoll.cli.views.live import View

SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture
def picture(tmp_path: Path) -> Picture:
    return Picture(tmp_path / "new" / "run.svg", command="atoll demo")


def saved(picture: Picture, results: str = "results") -> str:
    picture.save("a run", lambda console: console.print(results))
    return picture.path.read_text(encoding="utf-8")


def frames(drawn: str) -> list[str]:
    """Return the words of each frame in order."""
    groups = ET.fromstring(drawn).iter(f"{SVG}g")
    return [" ".join(group.itertext()) for group in groups if group.get("class") in ("f", "last")]


def test_frames_follow_each_other_and_results_end_them(picture: Picture) -> None:
    for number in range(50):
        picture.offer(Text(f"step {number}"))
        picture.offer(Text(f"step {number}"))  # nothing has changed
    found = frames(saved(picture))
    assert len(found) == FRAMES + 1
    assert "step 0" in found[0]
    assert "step 49" in found[-2]
    assert "results" in found[-1]
    assert "step 49" in found[-1]
    assert all("atoll demo" in frame for frame in found)


def test_without_animation_the_last_frame_is_shown(picture: Picture) -> None:
    picture.offer(Text("early"))
    drawn = saved(picture)
    assert re.search(r"\.f \{ visibility: hidden;", drawn)
    assert not re.search(r"\.last \{ visibility", drawn)
    assert "@media (prefers-reduced-motion: reduce) { .f, .last { animation: none } }" in drawn


def test_words_have_places_and_lines_are_drawn(picture: Picture) -> None:
    picture.offer(Panel("one   two", width=20))
    drawn = saved(picture)
    assert "textLength" not in drawn
    assert "letter-spacing" not in drawn
    assert not re.search("[─│╭╮╰╯]", drawn)
    places = [float(one) for one in re.findall(r'x="([\d.]+)">(?:one|two)<', drawn)][:2]
    assert places[1] - places[0] == pytest.approx(6 * 8.4)


def test_the_picture_names_no_other_host_and_no_token(picture: Picture) -> None:
    console = Console(file=io.StringIO(), width=80)
    with View(console, dashboard="http://127.0.0.1:1/?token=s3cret", picture=picture) as view:
        job = {"job": "demo", "state": "running", "members": [], "committed_round": 1}
        view.show(Watched.of({**job, "progress": {"step": 1, "steps": 9}}))
    drawn = saved(picture, "http://127.0.0.1:1/?token=s3cret-x")
    assert "http://127.0.0.1:1/" in drawn
    assert "s3cret" not in drawn
    assert "url(" not in drawn
    assert re.findall(r"https?://[^\s<\"?]+", drawn.replace("http://127.0.0.1:1/", "")) == [
        "http://www.w3.org/2000/svg"
    ]


def test_a_long_run_is_a_small_file(picture: Picture) -> None:
    for number in range(400):
        rows = "\n".join(f"lap{k}  running  {number * k}  {k / 7:.3f}  12.1 k" for k in range(12))
        picture.offer(Panel(rows, title=f"demo  {number}"))
    assert len(saved(picture, "\n".join(["a line of results"] * 20))) < 200_000
