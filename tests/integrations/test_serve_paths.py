"""The example that serves paths: prompts reach the server of their path, and none is lost."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from atoll.queues import InMemoryChannel
from atoll.routing.folder import PathFolder
from atoll.routing.serving import Lanes, PathServer, ask, publish_model
from atoll.routing.writing import Sampling, continue_text
from tests.e2e.conftest import Atoll, atoll, until
from tests.integrations.examples import EXAMPLES
from tests.patience import PATIENCE_S
from tests.routing.conftest import small_reader
from tests.routing.test_folder import ids, write_run
from tests.routing.test_together import Place

__all__ = ["atoll"]

DIGITS, LETTERS = "31415926535897932384626", "a word or two of text"

HELD = """
import time
from pathlib import Path
from atoll.routing import serving
real = serving.PathServer._continued
def held(self, path, request):
    while path == 4 and not Path({free!r}).exists():
        Path({held!r}).touch()
        time.sleep(0.05)
    return real(self, path, request)
serving.PathServer._continued = held
"""


def run_of(folder: Path) -> PathFolder:
    folder.mkdir()
    return write_run(folder, small_reader())


def test_two_servers_have_half_of_the_paths_each(tmp_path: Path) -> None:
    paths, channel = run_of(tmp_path / "run"), InMemoryChannel()
    places = [Place(channel, f"w{number}") for number in range(3)]
    client = Lanes(places[0])
    publish_model(client, paths)
    publish_model(client, paths)  # a client that was started again
    over, servers = threading.Event(), []

    def serve(number: int) -> None:
        lanes, folder = Lanes(places[1 + number]), tmp_path / f"server-{number}"
        servers.append(PathServer(lanes, folder, server=number, servers=2))
        servers[-1].serve(over.is_set)

    threads = [threading.Thread(target=serve, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    requests: dict[str, dict[str, Any]] = {
        "one": {"prompt": DIGITS, "tokens": 9, "seed": 3},
        "two": {"prompt": LETTERS, "tokens": 9, "seed": 4},
        "bad": {"tokens": 9},
    }
    answers = ask(client, requests)
    assert ask(client, requests) == answers
    over.set()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert (answers["one"]["path"], answers["two"]["path"]) == (4, 1)
    assert "prompt" in answers["bad"]["error"]
    expected = continue_text(paths, ids(DIGITS), Sampling(tokens=9, seed=3))
    assert answers["one"]["text"] == paths.tokenizer.decode(expected.ids).decode(errors="replace")
    assert sorted(one.own for one in servers) == [[0, 2, 4], [1, 3, 5]]
    for number in range(2):
        files = {file.name for file in (tmp_path / f"server-{number}").glob("path-*")}
        assert files == {f"path-{path:04d}.safetensors" for path in range(number, 6, 2)}


@pytest.mark.long(
    "tests/integrations/test_serve_paths.py::test_two_servers_have_half_of_the_paths_each"
)
def test_prompts_of_a_killed_server_are_answered(tmp_path: Path, atoll: Atoll) -> None:
    paths = run_of(tmp_path / "run")
    prompts = [DIGITS, LETTERS, "2718281828459045", "some other words"]
    (tmp_path / "prompts.txt").write_text("\n".join(prompts))
    free, held = tmp_path / "free", tmp_path / "held"
    script = tmp_path / "serve_paths.py"
    text = (EXAMPLES / "serve_paths.py").read_text("utf-8")
    line = "from atoll.routing.folder import open_paths\n"
    assert line in text
    script.write_text(text.replace(line, HELD.format(free=str(free), held=str(held)) + line))
    words = [str(paths.folder), "--prompts", str(tmp_path / "prompts.txt"), "--tokens", "12"]
    running = atoll.start("run", str(script), "--local", "3", "--", *words, "--lease-s", "3")
    until(held.exists)
    atoll.worker("w1").kill()
    free.touch()
    done = running.wait()
    assert done.code == 0, done.both
    assert done.out.count("w1: serves paths [0, 2, 4] of 6") == 2  # it was started again
    assert "w2: serves paths [1, 3, 5] of 6" in done.out
    file = atoll.job_folder() / "artifacts" / "w0" / "answers.json"
    answers = json.loads(file.read_text("utf-8"))
    assert [answers[f"prompt-{n}"]["path"] for n in range(4)] == [4, 1, 4, 1]
    assert all(answers[f"prompt-{n}"]["text"].startswith(prompts[n]) for n in range(4))


def test_the_example_serves_alone(tmp_path: Path) -> None:
    paths = run_of(tmp_path / "run")
    words = [str(paths.folder), "-p", LETTERS, "--tokens", "5"]
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / "serve_paths.py"), *words],
        cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "prompt-0, path 1: 'a word or two of text" in done.stdout
