"""Processes of a job: started, listened to, ended with their whole tree. Real processes."""

from __future__ import annotations

import errno
import io
import json
import os
import signal
import subprocess
import sys
import time
from collections import deque
from pathlib import Path

import psutil
import pytest

from atoll.config import JobSpec, JobTable, LaunchTable, dump_spec
from atoll.config.redaction import Redaction
from atoll.errors import AtollError, ConfigError, JobError, ScriptError, StorageFull
from atoll.net.endpoint import PLAIN
from atoll.node.launchers.folder import lay_out
from atoll.node.launchers.launcher import OOM_SCORE, Exit, ResourceCaps
from atoll.node.launchers.process import ChildProcess, ProcessLauncher, argv, process_file
from atoll.node.processes.exits import ERROR_FILE
from atoll.node.processes.output import read_lines, read_output
from atoll.wire.messages import Launch
from tests.node.launchers.ordering import HUB, command_launch, make_order, run, script_launch, until
from tests.patience import PATIENCE_S, PROMPT_S


async def command_to_end(
    command: Launch, root: Path, lines: list[str], *, caps: ResourceCaps | None = None
) -> Exit:
    process = await ProcessLauncher().start(make_order(command, root, caps=caps), lines.append)
    return await process.wait()


async def to_end(script: str, root: Path, lines: list[str], **options: list[str]) -> Exit:
    return await command_to_end(script_launch(script, **options), root, lines)  # type: ignore[arg-type]


def test_script_gets_its_folder_files_arguments_and_environment(tmp_path: Path) -> None:
    script = (
        "import os, sys\n"
        "print(os.getcwd())\nprint(sys.argv[1:])\n"
        "print(os.environ['ATOLL_JOB'], os.environ['ATOLL_MEMBER'], os.environ['ATOLL_HUB'])\n"
        "print(os.path.exists(os.environ['ATOLL_SPEC']), file=sys.stderr)\n"
    )
    lines: list[str] = []
    ended = run(to_end(script, tmp_path, lines, args=["--steps", "3"]))
    assert ended == Exit(0, None, ended.tail)
    folder = tmp_path / "job-1" / "w1"
    assert lines == [str(folder), "['--steps', '3']", f"job-1 w1 {HUB}", "True"]
    assert (folder / "output.log").read_text().splitlines() == lines


def test_raising_script_is_reported_with_its_traceback(tmp_path: Path) -> None:
    lines: list[str] = []
    ended = run(to_end("def f():\n    raise ValueError('boom')\nf()\n", tmp_path, lines))
    assert ended.code == 1
    assert isinstance(ended.error, ScriptError)
    assert "train.py raised ValueError: boom" in ended.error.what
    assert ended.error.given == "line 2 of train.py"
    assert any("Traceback" in line for line in ended.tail)
    assert not any("runpy" in line for line in ended.tail)


def test_script_that_leaves_with_a_status_is_an_error(tmp_path: Path) -> None:
    ended = run(to_end("import sys\nsys.exit(5)\n", tmp_path, []))
    assert isinstance(ended.error, ScriptError)
    assert "exit status 5" in ended.error.what


def test_script_that_runs_out_of_memory_is_called_that(tmp_path: Path) -> None:
    ended = run(to_end("x = bytearray(10**18)\n", tmp_path, []))
    assert ended.error is not None
    assert ended.error.to_dict()["kind"] == "OutOfMemory"


def test_error_file_of_an_earlier_attempt_is_ignored(tmp_path: Path) -> None:
    folder = tmp_path / "job-1" / "w1"
    folder.mkdir(parents=True)
    (folder / ERROR_FILE).write_text(json.dumps({"kind": "DataError", "what": "old"}))
    ended = run(to_end("import os, signal\nos.kill(os.getpid(), 9)\n", tmp_path, []))
    assert ended.code == -signal.SIGKILL
    assert type(ended.error) is JobError


@pytest.mark.parametrize("name", ["notes.txt", "job.toml", "output.log"])
def test_links_in_its_folder_mislead_no_later_start(tmp_path: Path, name: str) -> None:
    victim = tmp_path / "victim"
    victim.write_text("the owner's")
    plant = f"ln -sf {victim} {name}; echo theirs"
    spec = dump_spec(JobSpec(job=JobTable(name="job", command=["sh", "-c", plant])))
    command = Launch("job-1", "w1", 1, "token", spec, files={"notes.txt": "theirs"})
    for _ in range(2):
        assert run(command_to_end(command, tmp_path, [])).code == 0
    assert victim.read_text() == "the owner's"


@pytest.mark.parametrize("error_file", ["mkfifo error.json", "echo [] > error.json"])
def test_unusable_error_file_is_ignored(tmp_path: Path, error_file: str) -> None:
    command = command_launch("sh", "-c", f"{error_file}; exit 7")
    assert "exit status 7" in str(run(command_to_end(command, tmp_path, [])).error)


def test_a_program_does_not_choose_what_is_killed(tmp_path: Path) -> None:
    other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        note = {"pid": other.pid, "started": psutil.Process(other.pid).create_time()}
        written = tmp_path / "job-1" / "w1" / "process.json"
        written.parent.mkdir(parents=True)
        written.write_text(json.dumps(note))
        assert run(command_to_end(command_launch("true"), tmp_path, [])).code == 0
        assert _alive(other.pid)
    finally:
        other.kill()
        other.wait()


async def _start_sleeper(tmp_path: Path, lines: list[str], *, stubborn: bool) -> ChildProcess:
    script = (
        "import signal, subprocess, sys, time\n"
        + ("signal.signal(signal.SIGTERM, signal.SIG_IGN)\n" if stubborn else "")
        + "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
        "print(child.pid, flush=True)\ntime.sleep(60)\n"
    )
    order = make_order(script_launch(script), tmp_path)
    process = await ProcessLauncher().start(order, lines.append)
    await until(lambda: lines)
    return process


@pytest.mark.parametrize("stubborn", [False, True])
def test_stop_ends_the_whole_tree_within_the_grace(tmp_path: Path, stubborn: bool) -> None:
    async def scenario() -> tuple[Exit, float]:
        lines: list[str] = []
        process = await _start_sleeper(tmp_path, lines, stubborn=stubborn)
        started = time.monotonic()
        await process.stop(grace_s=0.5)
        ended = await process.wait()
        await until(lambda: not _alive(int(lines[0])))
        return ended, time.monotonic() - started

    ended, took_s = run(scenario())
    assert ended.code == (-signal.SIGKILL if stubborn else -signal.SIGTERM)
    assert took_s < PROMPT_S


def test_child_left_behind_by_a_crash_is_killed(tmp_path: Path) -> None:
    async def scenario() -> int:
        lines: list[str] = []
        process = await _start_sleeper(tmp_path, lines, stubborn=False)
        os.kill(process.pid, signal.SIGKILL)
        await process.wait()
        await until(lambda: not _alive(int(lines[0])))
        return int(lines[0])

    assert not _alive(run(scenario()))


@pytest.mark.parametrize("same", [True, False])
def test_orphan_is_killed_but_not_a_reused_pid(tmp_path: Path, same: bool) -> None:
    left = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        folder = tmp_path / "job-1" / "w1"
        folder.mkdir(parents=True)
        started = psutil.Process(left.pid).create_time() - (0.0 if same else 9.0)
        note = json.dumps({"pid": left.pid, "started": started})
        process_file(folder).write_text(note)
        os.kill(left.pid, signal.SIGSTOP)
        assert run(to_end("pass", tmp_path, [])).code == 0
        assert _alive(left.pid) is not same
    finally:
        left.kill()
        left.wait()


def _alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


# --------------------------------------------------------------------------------- commands


def test_command_runs_in_its_folder_without_a_shell(tmp_path: Path) -> None:
    words = ["python", "-c", "import os, sys; print(os.getcwd(), sys.executable, *sys.argv[1:])"]
    lines: list[str] = []
    command = command_launch(*words, args=["$HOME", "a b; exit 3"])
    ended = run(command_to_end(command, tmp_path, lines))
    assert ended == Exit(0, None, lines)
    assert lines == [f"{tmp_path / 'job-1' / 'w1'} {sys.executable} $HOME a b; exit 3"]


def test_command_gets_atoll_and_launch_variables(tmp_path: Path) -> None:
    launch = LaunchTable(env=["COLOUR=blue=green"])
    program = "import os; print(*(os.environ[n] for n in ('COLOUR', 'ATOLL_JOB', 'ATOLL_MEMBER')))"
    lines: list[str] = []
    run(command_to_end(command_launch("python", "-c", program, launch=launch), tmp_path, lines))
    assert lines == ["blue=green job-1 w1"]


def test_status_of_a_command_is_its_own_failure(tmp_path: Path) -> None:
    command = command_launch("sh", "-c", "echo last words; exit 7")
    ended = run(command_to_end(command, tmp_path, []))
    assert ended.code == 7
    assert ended.tail == ["last words"]
    assert isinstance(ended.error, ScriptError)
    assert "sh ended with exit status 7" in ended.error.what


@pytest.mark.parametrize(("number", "own"), [(signal.SIGSEGV, True), (signal.SIGKILL, False)])
def test_crash_is_a_commands_failure_but_a_kill_is_not(
    tmp_path: Path, number: signal.Signals, own: bool
) -> None:
    program = f"import os; os.kill(os.getpid(), {int(number)})"
    ended = run(command_to_end(command_launch("python", "-c", program), tmp_path, []))
    assert ended.code == -number
    assert isinstance(ended.error, JobError)
    assert isinstance(ended.error, ScriptError) is own
    assert number.name in str(ended.error)


def test_command_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no-such-program"):
        run(command_to_end(command_launch("no-such-program"), tmp_path, []))


# ------------------------------------------------------------------------------------- limits

SHOW = """
import os
names = (
    "OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "CUDA_VISIBLE_DEVICES",
    "THP_MEM_ALLOC_ENABLE",
)
print(sorted(os.sched_getaffinity(0)), os.nice(0), *(os.environ.get(name) for name in names))
"""


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="no affinity on this system")
def test_limits_hold_for_a_process_and_for_what_it_starts(tmp_path: Path) -> None:
    (cpu, *_) = sorted(os.sched_getaffinity(0))
    caps = ResourceCaps(cpus=(cpu,), threads=3, nice=5, gpus=(2,))
    program = f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {SHOW!r}])"
    lines: list[str] = []
    command = command_launch("python", "-c", program)
    ended = run(command_to_end(command, tmp_path, lines, caps=caps))
    assert ended.code == 0
    assert lines == [f"[{cpu}] {os.nice(0) + 5} 3 3 3 2 1"]


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="/proc is Linux's")
def test_out_of_memory_kills_the_job_before_owners_work(tmp_path: Path) -> None:
    lines: list[str] = []
    run(command_to_end(command_launch("cat", "/proc/self/oom_score_adj"), tmp_path, lines))
    assert int(lines[0]) == OOM_SCORE


def test_job_may_choose_its_own_threads_and_pages(tmp_path: Path) -> None:
    launch = LaunchTable(env=["OMP_NUM_THREADS=9", "THP_MEM_ALLOC_ENABLE=0"])
    lines: list[str] = []
    command = command_launch(
        "sh", "-c", "echo $OMP_NUM_THREADS $THP_MEM_ALLOC_ENABLE", launch=launch
    )
    run(command_to_end(command, tmp_path, lines, caps=ResourceCaps(threads=2)))
    assert lines == ["9 0"]


# ------------------------------------------------------------------------------ files and output


@pytest.mark.parametrize("name", ["../evil.py", "/etc/evil.py", "a/b.py"])
def test_file_outside_the_folder_is_refused(tmp_path: Path, name: str) -> None:
    bad = Launch("job-1", "w1", 1, "token", dump_spec(JobSpec()), files={name: "x"})
    with pytest.raises(ConfigError, match="unsupported name"):
        lay_out(bad, directory=tmp_path / "w1", hub=HUB, endpoint=PLAIN)
    assert [path.name for path in tmp_path.rglob("*evil*")] == []


@pytest.mark.parametrize(("number", "kind"), [(errno.ENOSPC, StorageFull), (errno.EIO, JobError)])
def test_unwritable_folder_is_the_machines_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, kind: type[AtollError]
) -> None:
    def fail(*_: object, **__: object) -> int:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(Path, "open", fail)
    with pytest.raises(kind, match="cannot be written"):
        lay_out(script_launch("pass"), directory=tmp_path / "w1", hub=HUB, endpoint=PLAIN)


def _feed(data: bytes) -> list[str]:
    lines: list[str] = []
    tail: deque[str] = deque()
    stream = io.BufferedReader(io.BytesIO(data))
    read_output(stream, Path(os.devnull), lines.append, tail, hide=Redaction({}))
    assert list(tail) == lines
    return lines


@pytest.mark.parametrize(
    ("data", "lines"),
    [
        (b"a\nb\n", ["a", "b"]),
        (b"a\r\nb", ["a", "b"]),
        (b"10%\r20%\rdone\n", ["10%", "20%", "done"]),
        (b"caf\xc3\xa9 \xff\n", ["caf\u00e9 \ufffd"]),
        (b"", []),
    ],
)
def test_output_is_cut_into_lines(data: bytes, lines: list[str]) -> None:
    assert _feed(data) == lines


def test_line_end_in_two_blocks_ends_one_line() -> None:
    class Blocks:
        def read1(self, size: int = -1, /) -> bytes:
            return blocks.pop(0)

    blocks = [b"a\r", b"\n", b"\nb\r", b"c", b""]
    assert list(read_lines(Blocks())) == [b"a", b"", b"b", b"c"]


def test_endless_line_is_cut_and_shortened() -> None:
    lines = _feed(b"x" * 10**6)
    assert len(lines) > 1
    assert all(len(line) <= 4096 for line in lines)


@pytest.mark.parametrize("member", ["w1", "reducer"])
def test_job_files_do_not_take_the_place_of_our_modules(tmp_path: Path, member: str) -> None:
    harm = tmp_path / "harm"
    names = ("msgspec", "torch", "sitecustomize", "logging", "atoll")
    table = JobTable(name="job")
    launch = LaunchTable(env=["PYTHONPATH=."] if member == "reducer" else [])
    spec = JobSpec(job=table, launch=launch)
    files = {f"{name}.py": f"open({str(harm)!r}, 'w')" for name in names}
    order = make_order(Launch("job-1", member, 1, "t", dump_spec(spec), files=files), tmp_path)
    ended = subprocess.run(
        [*argv(order)[:4], "--help"], cwd=order.folder, capture_output=True, text=True,
        env={**os.environ, **{k: v for k, v in order.environment.items() if k == "PYTHONPATH"}},
        timeout=PATIENCE_S,
    )  # fmt: skip
    assert "Traceback" not in ended.stderr
    assert not harm.exists()
