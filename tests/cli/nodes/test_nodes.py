"""Scripts, cells and lines that make machines nodes: what is in them, and that they work."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from atoll.cli.main import main
from atoll.cli.nodes.slurm import SlurmRequest, notebook_cell, sbatch_script, shell_line
from atoll.hub.app import HubOptions
from atoll.hub.server import HubServer
from atoll.net.http.client import HubClient
from tests.e2e.conftest import ROOT
from tests.patience import PATIENCE_S

TICKET = "atoll://127.0.0.1:7700/it's-a_secret"


def atoll(*words: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(["nodes", *words])
    return int(str(ended.value.code or 0))


def test_the_script_asks_for_what_was_wished(tmp_path: Path) -> None:
    request = SlurmRequest(
        count=8, time="4:00:00", partition="gpu", account="lab", cpus=6, gpus=1, memory="32G",
        options=["--qos=low"], setup=["module load cuda"],
    )  # fmt: skip
    text = sbatch_script(request, folder=tmp_path, python="/opt/py thon/bin/python")
    options = [line.removeprefix("#SBATCH ") for line in text.splitlines() if line.startswith("#S")]
    assert {"--ntasks=8", "--cpus-per-task=6", "--time=4:00:00", "--partition=gpu"} < set(options)
    assert {"--account=lab", "--gpus-per-task=1", "--mem=32G", "--qos=low"} < set(options)
    assert text.index("module load cuda") < text.index("srun")
    assert subprocess.run(["sh", "-n"], input=text, text=True, check=False).returncode == 0


def test_printing_needs_neither_hub_nor_slurm(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ATOLL_HOME", str(tmp_path / "home"))
    assert atoll("slurm", "--count", "2", "--print", "--folder", str(tmp_path)) == 0
    assert capsys.readouterr().out.startswith("#!/bin/sh\n#SBATCH --job-name=atoll\n")
    assert not (tmp_path / "ticket").exists()


@pytest.mark.parametrize(
    "words", [["--time", "1:00\n#SBATCH --uid=0"], ["--partition", "$(id)"], ["--folder", "a b"]]
)
def test_what_would_break_the_script_is_refused(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert atoll("slurm", "--count", "1", "--print", *words) != 0
    assert "batch script" in capsys.readouterr().err


def test_without_sbatch_it_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert atoll("slurm", "--count", "1", "--folder", str(tmp_path / "x")) != 0
    assert "--print" in capsys.readouterr().err


def test_the_line_quotes_the_ticket() -> None:
    line = shell_line(TICKET)
    assert subprocess.run(["sh", "-n", "-c", line], check=False).returncode == 0
    spoken = line.replace("python3 -m venv", "true").partition(" && ")[2]
    assert "'\"'\"'" in spoken


def test_only_the_node_of_the_line_is_in_the_background(tmp_path: Path) -> None:
    """A shell that waited for it would keep the output of ssh open until the node ends."""
    programs, pipe = tmp_path / ".atoll" / "venv" / "bin", tmp_path / "pipe"
    programs.mkdir(parents=True)
    os.mkfifo(pipe)
    (programs / "python").write_text(f"#!/bin/sh\ncat {pipe}\n")
    (programs / "pip").write_text("#!/bin/sh\n")
    for program in programs.iterdir():
        program.chmod(0o755)
    done = subprocess.run(
        ["bash", "-c", shell_line(TICKET).replace("python3 -m venv", "true")],
        env={"PATH": "/usr/bin:/bin", "HOME": str(tmp_path)}, capture_output=True,
        timeout=PATIENCE_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0
    pipe.write_text("the node ends\n")


INTERRUPTED = "import signal\nsignal.signal(signal.SIGINT, signal.default_int_handler)\n"
"""As in a notebook's kernel; where tests run in the background, SIGINT is ignored at the start."""


def test_ticket_of_a_notebook_is_never_readable_by_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not for the moment between two lines either."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(os, "chmod", lambda path, mode: None)
    monkeypatch.setattr(subprocess, "Popen", lambda *words, **options: SimpleNamespace(
        stdout=[], wait=lambda: 0
    ))  # fmt: skip
    exec(notebook_cell("atoll://hub:1/secret"))
    ticket = tmp_path / "atoll-node" / "ticket"
    assert ticket.read_text() == "atoll://hub:1/secret"
    assert ticket.stat().st_mode & 0o077 == 0


def test_a_notebook_cell_joins_and_leaves(tmp_path: Path) -> None:
    """Run as a notebook does: the cell's text in an interpreter that is interrupted."""
    options = HubOptions(data=tmp_path / "data", jobs=tmp_path / "jobs", reducers=False)
    with HubServer(options) as hub, HubClient(hub.url, hub.operator_token) as client:
        ticket = client.create_ticket(role="node", uses=1, valid_s=600.0, name="", quotas={})
        cell = subprocess.Popen(
            [sys.executable, "-c", INTERRUPTED + notebook_cell(ticket)], cwd=tmp_path,
            env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
        try:
            assert cell.stdout is not None
            assert any("joined" in line for line in cell.stdout)
            assert len(client.nodes()) == 1
            cell.send_signal(2)
            cell.communicate(timeout=PATIENCE_S)
        finally:
            cell.kill()
        assert cell.returncode == 0
