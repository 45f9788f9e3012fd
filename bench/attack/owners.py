"""The owner of a lent machine allows `trainer` jobs only; an operator wants more of it."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from atoll.errors import AtollError
from atoll.wire.messages import Failure, Launch, Stop, pack_command
from atoll.wire.queue_messages import QueuePut
from bench.attack.attacks import Suite, hold
from bench.attack.session import Session, until
from bench.attack.site import LENT, Site, trainer_job

suite = Suite()

TRAINER_ONLY = "a machine that takes trainer jobs runs no foreign code"
HOME = "a node writes below its own folder only"

MODULES = (
    "msgspec", "torch", "numpy", "sitecustomize", "usercustomize", "logging", "atoll", "json",
    "typing", "psutil",
)  # fmt: skip
"""Names of modules that a trainer loads."""

ENV = (
    "PYTHONPATH=.", "PYTHONSTARTUP=evil.py", "PYTHONHOME=.", "LD_PRELOAD=./evil.so", "PATH=.",
    "LD_LIBRARY_PATH=.", "PYTHONWARNINGS=error::evil.Evil", "BROWSER=./evil", "CXX=./evil",
    "TORCHINDUCTOR_CACHE_DIR=.", "PYTHONINSPECT=1", "GCONV_PATH=.", "HF_HOME=.", "pythonpath=.",
)  # fmt: skip


TASK = """
[job]
name = "t"
on = ["{on}"]
[rl]
algorithm = "grpo"
[[rl.policies]]
name = "p"
env = "text:os:system"
options = {{command = "{command}"}}
"""
"""A job whose task is a function of Python's library; its owner allows `rl` beside `trainer`."""


def _harm(site: Site) -> Path:
    return site.folder / "harm"


def _evil(site: Site) -> str:
    return f"open({str(_harm(site))!r}, 'w').write('foreign code ran here')\n"


def _finished(site: Site, job: str, *, wait_s: float = 240.0) -> dict[str, Any]:
    def ended() -> dict[str, Any] | None:
        view = site.operator.job(job)
        return view if view["state"] in ("done", "failed", "stopped") else None

    return dict(until(ended, f"{job} ends", wait_s=wait_s))


@suite.attack(TRAINER_ONLY)
def put_modules_beside_the_job(site: Site) -> str:
    files = {f"{name}.py": _evil(site) for name in MODULES}
    job = site.operator.submit(trainer_job(site, "shadow", on=LENT), files=files)
    view = _finished(site, job)
    hold(not _harm(site).exists(), "a file beside the job file was run as a module")
    hold(view["state"] == "done", f"the job ended {view['state']}: {view['reason']}")
    return f"{len(files)} names: the job trained, none was loaded"


@suite.attack(TRAINER_ONLY)
def set_variables_that_load_code(site: Site) -> str:
    files = {"sitecustomize.py": _evil(site), "evil.py": _evil(site)}
    waiting = []
    for number, line in enumerate(ENV):
        spec = trainer_job(site, f"env{number}", on=LENT) + f'[launch]\nenv = ["{line}"]\n'
        try:
            waiting.append(site.operator.submit(spec, files=files))
        except AtollError:
            continue
    return _never_runs(site, waiting, f"{len(ENV)} variables")


@suite.attack(TRAINER_ONLY)
def send_other_kinds_of_job(site: Site) -> str:
    touch = ["python3", "-c", _evil(site)]
    kinds = {
        "command": f'[job]\nname = "c"\nnodes = 1\non = ["{LENT}"]\ncommand = {touch!r}\n',
        "script": f'[job]\nname = "s"\nnodes = 1\non = ["{LENT}"]\nscript = "evil.py"\n',
        "own model": trainer_job(site, "m", on=LENT).replace(
            "[model]\n", '[model]\nname = "evil:factory"\n'
        ),
        "task for language models": TASK.format(on=LENT, command=f"touch {_harm(site)}"),
    }
    waiting = []
    for spec in kinds.values():
        try:
            waiting.append(site.operator.submit(spec, files={"evil.py": _evil(site)}))
        except AtollError:
            continue
    return _never_runs(site, waiting, ", ".join(kinds))


def _never_runs(site: Site, jobs: list[str], what: str) -> str:
    """Wait until an honest job has run after these, then see that they did nothing."""
    after = site.operator.submit(trainer_job(site, "after", on=LENT))
    _finished(site, after)
    for job in jobs:
        view = site.operator.job(job)
        hold(view["state"] in ("waiting", "failed"), f"{job} is {view['state']}")
        site.operator.stop(job, grace_s=0.0)
    hold(not _harm(site).exists(), "foreign code ran")
    return f"{what}: {len(jobs)} wait for another machine, the others were refused"


def _launch(site: Site, session: Session, launch: Launch) -> str:
    """Put a command into the queue of the lent machine; return what became of it."""
    put = QueuePut(f"node/{LENT}", key=f"{time.monotonic()}", payload=pack_command(launch))
    answer = session.ask(put)
    return answer.error["what"] if isinstance(answer, Failure) else "taken"


@suite.attack(HOME)
def launch_outside_the_nodes_folder(site: Site) -> str:
    """As an operator, or a hub that was taken over, puts commands into the node's queue."""
    spec = trainer_job(site, "out", on=LENT)
    top = site.cluster.folder
    before = {str(path) for path in top.rglob("*")}
    names = [
        ("../../x", "w0"), ("..", "w0"), ("/tmp/atoll-attack", "w0"), ("x", "../../w0"),
        ("x", "reducer-x/../../../.."), ("x", "reducer/../../y"), ("a/b", "w0"), ("x\0y", "w0"),
        ("x", "w0\n"), ("", "w0"), ("x", "."),
    ]  # fmt: skip
    said = set()
    with site.socket() as opened:
        session = Session(opened, "attack/w0", site.cluster.token)
        for job, member in names:
            files = {"authorized_keys": "ssh-ed25519 evil"}
            said.add(_launch(site, session, Launch(job, member, 0, "t", spec, files)))
        for file in ("../evil", "/tmp/evil", "a/../../evil", "..\\evil"):
            said.add(_launch(site, session, Launch("named", "w0", 0, "t", spec, {file: "evil"})))
        foreign = {"msgspec.py": _evil(site), "sitecustomize.py": _evil(site)}
        said.add(_launch(site, session, Launch("foreign", "reducer", 0, "t", spec, foreign)))
        script = '[job]\nname = "s"\nnodes = 1\nscript = "evil.py"\n'
        said.add(
            _launch(site, session, Launch("s", "w0", 0, "t", script, {"evil.py": _evil(site)}))
        )
        session.ask(QueuePut(f"node/{LENT}", "stop", pack_command(Stop("../..", "w0"))))
    _finished(site, site.operator.submit(trainer_job(site, "after2", on=LENT)))
    allowed = str(top / "nodes" / LENT)
    keys = [p for p in top.parent.rglob("authorized_keys") if not str(p).startswith(allowed)]
    new = {str(path) for path in top.rglob("*")} - before
    outside = [path for path in new if "/nodes/" in path and not path.startswith(allowed)]
    hold(not keys and not outside, f"written outside: {[*keys, *outside][:5]}")
    hold(not Path("/tmp/atoll-attack").exists(), "written to /tmp")
    hold(not _harm(site).exists(), "files of a reducer were run as modules")
    hold(site.node_state(LENT) == "online", "the agent is gone")
    return f"{len(names) + 7} commands ({', '.join(sorted(said))}): nothing outside, agent online"
