"""`atoll paths` and `atoll generate --paths`."""

from __future__ import annotations

import ctypes
import dataclasses
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from atoll.checkpoint import describe, save_weights
from atoll.cli import main as command
from atoll.data import ByteTokenizer, load_dataset
from atoll.data.assignment import read_assignment
from atoll.models import GPT, GPTConfig
from atoll.routing.router import Router, read_router
from tests.patience import PATIENCE_S

JOB = """
[job]
name = "shards"
seed = 3
[model]
name = "gpt"
context = 16
[data]
corpus = "{corpus}"
[train]
steps = 1
"""


def run(*words: str) -> int:
    with pytest.raises(SystemExit) as leaving:
        command.main(list(words))
    return int(leaving.value.code or 0)


@pytest.fixture
def job(tmp_path: Path) -> Path:
    draw = torch.Generator().manual_seed(0)
    for domain, alphabet in enumerate(("abcde", "01234", "XYZWV", "+-*/=")):
        folder = tmp_path / "text" / f"kind{domain}"
        folder.mkdir(parents=True)
        for number in range(6):
            letters = torch.randint(5, (400,), generator=draw).tolist()
            (folder / f"{number}.txt").write_text("".join(alphabet[i] for i in letters))
    (tmp_path / "text" / "kind0" / "empty.txt").write_text("")
    file = tmp_path / "job.toml"
    file.write_text(JOB.format(corpus=f"files:{tmp_path}/text/*/*.txt"))
    return file


def test_a_corpus_is_sharded_by_its_kinds(
    job: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "made" / "paths.safetensors"
    words = ["paths", "shard", str(job), "--modules", "2,2", "--out", str(out)]
    options = ["--reader-steps", "20", "--longest", "200", "--copies", "1", "--slack", "2"]
    assert run(*words, *options) == 0
    shown = capsys.readouterr().out
    assert "left out: 1 empty" in shown
    made = read_assignment(out)
    data = load_dataset(f"files:{tmp_path}/text/*/*.txt", seed=3)
    assert made.bounds[-1] == len(data.train)
    assert made.num_paths == 4
    for path in range(4):  # every path has one kind of text
        assert f"path {path}: " in shown
        assert shown.split(f"path {path}: ")[1].splitlines()[0].endswith("100%)")
    assert read_router(out.with_name("paths.router.safetensors")).modules == (2, 2)
    assert not out.with_name("paths.safetensors.parts").exists()
    assert run(*words, *options) == 0
    assert np.array_equal(read_assignment(out).paths, made.paths)


def test_a_corpus_smaller_than_the_paths_is_refused(
    job: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "paths.safetensors"
    words = ["paths", "shard", str(job), "-m", "9,9", "--out", str(out), "--reader-steps", "1"]
    assert run(*words) != 0
    assert "shorter pieces" in capsys.readouterr().err
    assert run("paths", "shard", str(job), "-m", "two", "--out", str(out)) != 0
    assert "2,2" in capsys.readouterr().err


def test_an_interrupted_sharding_continues(job: Path, tmp_path: Path) -> None:
    out = tmp_path / "paths.safetensors"
    words = [sys.executable, "-m", "atoll.cli", "paths", "shard", str(job), "-m", "2,2"]
    words += ["--out", str(out), "--longest", "100"]
    with subprocess.Popen([*words, "--reader-steps", "1000000"], stdout=subprocess.PIPE) as process:
        deadline = time.monotonic() + PATIENCE_S
        while not _handles_interrupts(process.pid) and time.monotonic() < deadline:
            assert process.poll() is None
            time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        shown, _ = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 130
    assert b"the same command continues" in shown
    assert (
        subprocess.run([*words, "--reader-steps", "2"], timeout=PATIENCE_S, check=False).returncode
        == 0
    )
    assert read_assignment(out).num_paths == 4


def _handles_interrupts(pid: int) -> bool:
    """Return whether a process has a handler of its own for SIGTERM, as `Interrupts` sets."""
    status = Path(f"/proc/{pid}/status")
    if not status.exists():
        pytest.skip("there is no /proc on this system")
    caught = next(line for line in status.read_text().splitlines() if line.startswith("SigCgt"))
    return bool(int(caught.split()[1], 16) >> (signal.SIGTERM - 1) & 1)


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    """Return a run of two paths, its data and its job file; the router prefers path 1."""
    config = GPTConfig(layers=1, width=8, heads=1, context=128, tie=False)
    text = ByteTokenizer().to_json()
    about = describe("gpt", options=dataclasses.asdict(config), tokenizer=text)
    folder = tmp_path / "run"
    folder.mkdir()
    for path in range(2):
        torch.manual_seed(path)
        model = GPT(config)
        torch.nn.init.normal_(model.head.weight)
        save_weights(folder / f"path-{path:04d}.safetensors", model.state_dict(), about=about)
    save_weights(folder / "features.safetensors", model.state_dict(), about=about)
    router = Router((2,), np.zeros((2, 8)), np.array([0.0, 1.0]), prefix=8, tokenizer=text)
    router.write(folder / "router.safetensors")
    return folder


def test_a_prompt_goes_to_its_path(run_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["generate", str(run_folder), "-p", "some words", "-n", "9", "--seed", "1"]
    assert run(*words, "--paths", "--device", "cpu") == 0
    routed = capsys.readouterr()
    assert "path 1 of 2" in routed.err
    assert run(*words, "--paths", "--path", "1", "--device", "cpu") == 0
    assert capsys.readouterr().out == routed.out
    file = str(run_folder / "path-0001.safetensors")  # a plain model
    assert run("generate", file, *words[2:], "--device", "cpu") == 0
    assert capsys.readouterr().out == routed.out
    assert run(*words, "--paths", "--path", "0", "--device", "cpu") == 0
    assert capsys.readouterr().out != routed.out


@pytest.mark.skipif(sys.platform != "linux", reason="inotify is of Linux")
def test_only_the_file_of_the_chosen_path_is_opened(run_folder: Path) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    watch = libc.inotify_init1(os.O_NONBLOCK)
    assert libc.inotify_add_watch(watch, str(run_folder).encode(), IN_OPEN) > 0
    words = ["-p", "some words", "-n", "3", "--paths", "--device", "cpu"]
    command = [sys.executable, "-m", "atoll.cli", "generate", str(run_folder), *words]
    subprocess.run(command, timeout=PATIENCE_S, check=True, capture_output=True)
    events, opened = os.read(watch, 1 << 16), set()
    os.close(watch)
    while events:
        size = int.from_bytes(events[12:16], sys.byteorder)
        opened.add(events[16 : 16 + size].rstrip(bytes(1)).decode())
        events = events[16 + size :]
    assert opened - {""} == {"router.safetensors", "features.safetensors", "path-0001.safetensors"}


IN_OPEN = 0x20


def test_options_of_paths_need_paths(run_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("generate", str(run_folder), "--path", "1") != 0
    assert "add --paths" in capsys.readouterr().err
    assert run("generate", str(run_folder.parent), "--paths") != 0
    assert "not a folder of paths" in capsys.readouterr().err


def test_a_run_is_scored_on_what_it_held_out_and_on_other_texts(
    run_folder: Path, job: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("paths", "evaluate", str(run_folder), "--device", "cpu") != 0
    assert "what this run held out" in capsys.readouterr().err
    (run_folder / "job.toml").write_text(job.read_text())
    assert run("paths", "evaluate", str(run_folder), "--every", "16", "--device", "cpu") == 0
    shown = capsys.readouterr().out
    assert "once" in shown
    assert "every 16" in shown
    assert "not scored: the first 8 tokens of each document" in shown
    (run_folder / "other.txt").write_text("x" * 108)
    words = ["paths", "evaluate", str(run_folder), f"files:{run_folder}/other.txt"]
    assert run(*words, "--every", "50", "--device", "cpu") == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert rows[0] == ["1", "documents,", "108", "tokens"]
    assert [row[-1] for row in rows if row and row[0] in ("once", "every")] == ["100", "100"]
    assert ["1", "2", "2"] in rows  # both chunks with path 1
    (run_folder / "short.txt").write_text("x" * 8)
    assert run("paths", "evaluate", str(run_folder), f"files:{run_folder}/short.txt") != 0
    assert "no document has a token to score" in capsys.readouterr().err
