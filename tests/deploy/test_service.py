"""Services: what is written for each system, and what `atoll service` does with it."""

from __future__ import annotations

import os
import plistlib
import re
import shlex
import shutil
import stat
import subprocess
import sys
from pathlib import Path, PurePosixPath
from xml.etree import ElementTree

import pytest

from atoll.cli.service_files import Service
from tests.commands import Done, run_here
from tests.deploy.commands import refusal
from tests.patience import PATIENCE_S

ROOT = Path(__file__).resolve().parents[2]
SHIPPED = ROOT / "deploy" / "systemd"
TICKET = "atoll://hub.example.org:7700/c2VjcmV0"


def service(role: str = "hub", platform: str = "linux", **fields: object) -> Service:
    values: dict[str, object] = {
        "role": role, "platform": platform, "python": "/opt/atoll/bin/python",
        "home": PurePosixPath("/var/lib/atoll"), **fields,
    }  # fmt: skip
    return Service(**values)  # type: ignore[arg-type]


def atoll(home: Path, *words: str, path: str = "") -> Done:
    return run_here("service", *words, environment=environment(home, path), folder=home)


def environment(home: Path, path: str) -> dict[str, str]:
    found = {**os.environ, "HOME": str(home), "ATOLL_HOME": str(home / "state")}
    return {**found, "PATH": path} if path else found


def on_windows(home: Path, *words: str, path: str) -> subprocess.CompletedProcess[str]:
    """Run it in a process of its own, in which Windows is pretended."""
    return subprocess.run(
        [sys.executable, "-m", "atoll.cli", "service", *words], env=environment(home, path),
        capture_output=True, text=True, timeout=PATIENCE_S, check=False,
    )  # fmt: skip


# ------------------------------------------------------------------------------------ files


def test_shipped_units_equal_installed_ones() -> None:
    hub = service("hub", user="atoll")
    node = service("node", user="atoll", arguments=("@/var/lib/atoll/ticket",))
    assert (SHIPPED / "atoll-hub.service").read_text() == hub.text()
    assert (SHIPPED / "atoll-node.service").read_text() == node.text()


@pytest.mark.parametrize("user", ["", "root"])
@pytest.mark.parametrize("role", ["hub", "node"])
@pytest.mark.every(3)
def test_systemd_finds_nothing_wrong(tmp_path: Path, role: str, user: str) -> None:
    verify = shutil.which("systemd-analyze")
    if verify is None:
        pytest.skip("systemd-analyze is not installed")
    unit = service(role, user=user, python=sys.executable, home=PurePosixPath(tmp_path))
    path = tmp_path / f"atoll-{role}.service"
    path.write_text(unit.text())
    command = [verify, "verify", *([] if user else ["--user"]), str(path)]
    environment = {**os.environ, "XDG_RUNTIME_DIR": str(tmp_path), "SYSTEMD_LOG_LEVEL": "warning"}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=PATIENCE_S, check=False, env=environment
    )
    assert (done.returncode, done.stderr.strip()) == (0, "")
    path.write_text(unit.text().replace("KillMode=mixed", "KillMode=never"))
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=PATIENCE_S, check=False, env=environment
    )
    assert "kill mode" in done.stderr  # it does look


@pytest.mark.parametrize(
    "word", ["plain", "with space", 'a"b', "100%", "$HOME", "back\\slash", "a;b", "tab\there"]
)
def test_words_reach_the_program_as_they_were_written(word: str) -> None:
    text = service(arguments=("--advertise", word)).text()
    (line,) = re.findall("^ExecStart=(.*)$", text, re.MULTILINE)
    assert shlex.split(line.replace("%%", "%").replace("$$", "$"))[-1] == word


def test_a_variable_keeps_its_dollar_sign() -> None:
    """In `Environment=` systemd gives it no meaning, so that two of them would be two."""
    text = service(home=PurePosixPath("/srv/$a")).text()
    assert "Environment=ATOLL_HOME=/srv/$a " in text
    assert "--data=/srv/$$a/hub" in text


@pytest.mark.parametrize("role", ["hub", "node"])
@pytest.mark.parametrize("user", ["", "atoll"])
def test_property_lists_are_read_back_and_start_what_atoll_takes(role: str, user: str) -> None:
    arguments = ("@/there/ticket", "--slots", "2") if role == "node" else ("--port", "7701")
    mac = service(role, "macos", arguments=arguments, user=user)
    content = plistlib.loads(mac.text().encode())
    assert content["Label"] == f"atoll-{role}"
    assert content["KeepAlive"] is True
    assert content.get("UserName", "") == user
    assert content["ProgramArguments"][:3] == ["/opt/atoll/bin/python", "-m", "atoll.cli"]
    assert refusal(content["ProgramArguments"][3:]) == ""
    folder = "/Library/LaunchDaemons" if user else "/Users/ann/Library/LaunchAgents"
    assert mac.place(person=Path("/Users/ann")) == Path(folder, f"atoll-{role}.plist")
    domain = "system" if user else f"gui/{os.getuid()}"
    assert mac.removing() == [["launchctl", "bootout", f"{domain}/atoll-{role}"]]


@pytest.mark.parametrize("role", ["hub", "node"])
def test_units_start_what_atoll_takes(role: str) -> None:
    text = (SHIPPED / f"atoll-{role}.service").read_text()
    (line,) = re.findall("^ExecStart=(.*)$", text, re.MULTILINE)
    words = shlex.split(line)
    assert words[1:3] == ["-m", "atoll.cli"]
    assert refusal(words[3:]) == ""


def windows(role: str = "hub", **fields: object) -> Service:
    home, python = PurePosixPath("C:/Users/Ann & Bo/.atoll"), r"C:\Users\Ann & Bo\v\python.exe"
    return service(role, "windows", **{"home": home, "python": python, **fields})


def facts(text: str) -> dict[str, str]:
    """Return the texts of a task by element, without the namespace."""
    root = ElementTree.fromstring(text.encode("utf-16"))
    assert root.attrib == {"version": "1.2"}
    return {one.tag.partition("}")[2]: (one.text or "").strip() for one in root.iter()}


@pytest.mark.parametrize("role", ["hub", "node"])
def test_a_task_starts_what_atoll_takes_and_again_when_it_ends(role: str) -> None:
    arguments = ("@C:/there/ticket", "--slots", "2") if role == "node" else ("--port", "7701")
    found = facts(windows(role, arguments=arguments, account="ann").text())
    assert found["Command"] == r"C:\Users\Ann & Bo\v\pythonw.exe"
    home = "C:/Users/Ann & Bo/.atoll"
    start, log = f'-m atoll.cli.logged "{home}"', f'"{home}/atoll-{role}.log" '
    assert found["Arguments"].startswith(f"{start} {log}")
    words = shlex.split(found["Arguments"])[4:]
    assert words[-len(arguments) :] == list(arguments)
    assert refusal(words) == ""
    assert found["LogonType"] == "InteractiveToken"
    assert found["UserId"] == "ann"
    assert "LogonTrigger" in found
    assert (found["MultipleInstancesPolicy"], found["Interval"]) == ("IgnoreNew", "PT1M")
    assert found["ExecutionTimeLimit"] == "PT0S"  # else it would be ended after three days
    assert found["DisallowStartIfOnBatteries"] == found["StopIfGoingOnBatteries"] == "false"


def test_a_system_task_starts_at_boot_in_a_closed_folder() -> None:
    task = windows(home=PurePosixPath("C:/ProgramData/Atoll"), user="atoll")
    found = facts(task.text())
    assert "BootTrigger" in found
    assert "LogonTrigger" not in found
    assert found["UserId"] == "S-1-5-19"
    assert found["RunLevel"] == "LeastPrivilege"
    (command,) = task.preparing()
    assert command[:4] == ["icacls", "C:/ProgramData/Atoll", "/inheritance:r", "/grant:r"]
    assert command[4:] == [f"*S-1-5-{who}:(OI)(CI)F" for who in ("19", "18", "32-544")]
    assert task.place(person=Path("C:/Users/Ann")) == Path("C:/ProgramData/Atoll/atoll-hub.xml")


@pytest.mark.parametrize("word", ["with space", 'a"b', "back\\slash\\", "<&>", "tab\there", ""])
def test_words_reach_the_program_of_a_task(word: str) -> None:
    found = facts(windows(arguments=("--advertise", word)).text())
    last = subprocess.list2cmdline(["--advertise", word])
    assert found["Arguments"].endswith(last)


def test_output_of_a_task_goes_to_its_log(tmp_path: Path) -> None:
    log = tmp_path / "atoll.log"
    words = [sys.executable, "-m", "atoll.cli.logged", str(tmp_path), str(log)]
    for _ in range(2):
        done = subprocess.run(
            [*words, "--version"], capture_output=True, timeout=PATIENCE_S, check=False
        )
        assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")
    first, second = log.read_text(encoding="utf-8").splitlines()
    assert first == second
    assert first.startswith("atoll")


# ------------------------------------------------------------------------------------- verbs


@pytest.fixture
def system(tmp_path: Path) -> Path:
    """A folder with a `systemctl` that writes down what it is asked."""
    folder = tmp_path / "bin"
    folder.mkdir()
    script = folder / "systemctl"
    script.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/asked\n[ ! -e {tmp_path}/refuse ]\n')
    script.chmod(0o755)
    return folder


def asked(folder: Path) -> list[str]:
    path = folder / "asked"
    return path.read_text().splitlines() if path.exists() else []


linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="services of systemd")


@linux
def test_a_node_is_installed_asked_for_and_removed(tmp_path: Path, system: Path) -> None:
    path = f"{system}:/usr/bin:/bin"
    done = atoll(tmp_path, "install", "node", "--", TICKET, "--slots", "2", path=path)
    assert done.code == 0, done.err
    place = tmp_path / ".config/systemd/user/atoll-node.service"
    text = place.read_text()
    ticket = tmp_path / "state" / "ticket"
    assert f"@{ticket} --slots 2" in text
    assert TICKET not in text
    assert ticket.read_text() == TICKET + "\n"
    assert stat.S_IMODE(ticket.stat().st_mode) == 0o600
    assert asked(tmp_path) == ["--user daemon-reload", "--user enable --now atoll-node"]
    assert atoll(tmp_path, "status", "node", path=path).code == 0
    assert asked(tmp_path)[2:] == ["--user status --no-pager atoll-node"]
    done = atoll(tmp_path, "uninstall", "node", path=path)
    assert done.code == 0, done.err
    assert asked(tmp_path)[3:] == ["--user disable --now atoll-node", "--user daemon-reload"]
    assert not place.exists()
    assert ticket.exists()


@linux  # where Windows is pretended
def test_a_task_is_installed_asked_for_and_removed(
    tmp_path: Path, system: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (system / "systemctl").rename(system / "schtasks")
    monkeypatch.setenv("PRETENDED_SYSTEM", "win32")
    monkeypatch.setenv("PRETENDED_LOG", str(tmp_path / "processes"))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT / "tests/systems"), str(ROOT)]))
    monkeypatch.setenv("LOGNAME", "ann")
    path = f"{system}:/usr/bin:/bin"
    done = on_windows(tmp_path, "install", "node", "--", TICKET, "--slots", "2", path=path)
    assert done.returncode == 0, done.stderr
    home = tmp_path / "state"
    place = home / "atoll-node.xml"
    text = place.read_bytes().decode("utf-16")
    assert "\r" not in text
    assert facts(text)["UserId"] == "ann"
    assert facts(text)["Arguments"].endswith(f"--home={home} @{home}/ticket --slots 2")
    assert (home / "ticket").read_bytes() == TICKET.encode() + b"\n"
    task = "/TN atoll-node"
    assert asked(tmp_path) == [f"/Create {task} /XML {place} /F", f"/Run {task}"]
    assert on_windows(tmp_path, "status", "node", path=path).returncode == 0
    assert asked(tmp_path)[2:] == [f"/Query {task} /V /FO LIST"]
    done = on_windows(tmp_path, "uninstall", "node", path=path)
    assert done.returncode == 0, done.stderr
    assert asked(tmp_path)[3:] == [f"/Change {task} /DISABLE", f"/End {task}", f"/Delete {task} /F"]
    assert not place.exists()


@linux
def test_what_the_system_refuses_is_told(tmp_path: Path, system: Path) -> None:
    (tmp_path / "refuse").touch()
    done = atoll(tmp_path, "install", "hub", path=f"{system}:/usr/bin:/bin")
    assert done.code == 2
    assert "the system refused the service" in done.err
    done = atoll(tmp_path, "install", "hub", path=str(tmp_path))
    assert done.code == 2
    assert "no `systemctl`" in done.err


def test_print_does_nothing(tmp_path: Path) -> None:
    done = atoll(tmp_path, "install", "node", "--print", "--for", "macos", "--", TICKET)
    assert done.code == 0, done.err
    assert TICKET not in done.out
    assert "launchctl bootstrap" in done.out
    done = atoll(tmp_path, "install", "node", "--print", "--for", "windows", "--", TICKET)
    assert TICKET not in done.out
    assert "# schtasks /Create /TN atoll-node /XML" in done.out
    done = atoll(tmp_path, "install", "hub", "--print", "--for", "linux", "--system")
    assert "systemctl enable --now atoll-hub" in done.out
    assert "User=atoll" in done.out
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("install hubb", "unknown service"),
        ("install node", "needs a ticket"),
        (f"install node -- {TICKET} --slotz 2", "--slotz"),
        ("install hub --print --for amiga", "unknown system"),
        ("uninstall hub", "not installed"),
        ("install hub --system --user nobody-of-that-name", "no user to run as"),
    ],
)
def test_what_cannot_be_is_told_before_anything_is_done(
    tmp_path: Path, words: str, told: str
) -> None:
    done = atoll(tmp_path, *words.split())
    assert done.code == 2
    assert told in done.err
    assert list(tmp_path.iterdir()) == []
