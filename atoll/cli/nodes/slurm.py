"""`atoll nodes slurm`: nodes from a cluster that Slurm schedules."""

from __future__ import annotations

import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from atoll.errors import AtollError, ConfigError

app = typer.Typer(no_args_is_help=True, help="Nodes from elsewhere: Slurm, notebooks, shells.")

LEAVE_S = 60
"""Seconds before the end of a job at which Slurm signals it, for nodes to leave their round."""
SUBMIT_S = 120.0
HubOption = Annotated[str, typer.Option(help="URL of the hub (default: the last).")]


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmRequest:
    """What is requested of Slurm; empty: its default."""

    count: int
    time: str = "1:00:00"
    partition: str = ""
    account: str = ""
    cpus: int = 1
    gpus: int = 0
    memory: str = ""
    options: Sequence[str] = ()
    """Further options of sbatch, without `#SBATCH`."""
    setup: Sequence[str] = ()
    """Shell lines before the nodes start, e.g. `module load cuda`."""


def sbatch_script(request: SlurmRequest, *, folder: Path, python: str) -> str:
    """Return the batch script: one task per node, each with a folder of its own.

    The ticket is in `FOLDER/ticket`, which only its owner may read: scripts and command lines are
    seen by all users of a cluster. A job that Slurm requeues joins as the same nodes.

    Args:
        request: The resources of the nodes.
        folder: On a file system that the compute nodes share.
        python: The interpreter there that has Atoll.
    """
    directives = [
        "--job-name=atoll", f"--ntasks={request.count}", f"--cpus-per-task={request.cpus}",
        f"--time={request.time}", f"--output={folder}/%j.log", f"--signal=TERM@{LEAVE_S}",
        "--requeue",
        *([f"--partition={request.partition}"] if request.partition else []),
        *([f"--account={request.account}"] if request.account else []),
        *([f"--gpus-per-task={request.gpus}"] if request.gpus else []),
        *([f"--mem={request.memory}"] if request.memory else []),
        *request.options,
    ]  # fmt: skip
    place = f"{folder}/nodes/$SLURM_JOB_ID-$SLURM_PROCID"
    join = (
        f'exec {shlex.quote(python)} -m atoll.cli join "@{folder}/ticket" '
        f'--name "slurm-$SLURM_JOB_ID-$SLURM_PROCID" --home "{place}"'
    )
    lines = [
        "#!/bin/sh",
        *(f"#SBATCH {option}" for option in directives),
        "set -e",
        *request.setup,
        "export PYTHONUNBUFFERED=1",
        # The loss of a node ends no other one; the job ends with its last node.
        f"exec srun --kill-on-bad-exit=0 --wait=0 sh -c {shlex.quote(join)}",
    ]
    return "\n".join(lines) + "\n"


@app.command()
def slurm(
    count: Annotated[int, typer.Option(min=1, help="Number of nodes.")],
    time: Annotated[str, typer.Option(help="Time limit, as of sbatch.")] = "1:00:00",
    partition: Annotated[str, typer.Option(help="Partition.")] = "",
    account: Annotated[str, typer.Option(help="Account.")] = "",
    cpus: Annotated[int, typer.Option(min=1, help="Cores of each node.")] = 1,
    gpus: Annotated[int, typer.Option(min=0, help="GPUs of each node.")] = 0,
    memory: Annotated[str, typer.Option(help="Memory per machine, e.g. 16G.")] = "",
    option: Annotated[
        list[str] | None, typer.Option(help="Option of sbatch, e.g. --qos=low (repeatable).")
    ] = None,
    setup: Annotated[
        list[str] | None,
        typer.Option(help='Shell line before, e.g. "module load cuda" (repeatable).'),
    ] = None,
    python: Annotated[
        str, typer.Option(help="Interpreter with Atoll on the compute nodes (default: this one).")
    ] = "",
    folder: Annotated[
        Path, typer.Option(help="For script, ticket, logs and nodes; shared with compute nodes.")
    ] = Path("atoll-slurm"),
    show: Annotated[
        bool, typer.Option("--print", help="Print the script; make no ticket, submit nothing.")
    ] = False,
    hub: HubOption = "",
) -> None:
    """Submit a batch job whose tasks join the hub as nodes.

    Run it where sbatch is, with a login at the hub (`atoll login`). Compute nodes must reach the
    hub's address; see docs/operate/nodes.md if they do not.
    """
    from atoll.cli.views import screen

    place = folder.expanduser().absolute()
    request = SlurmRequest(
        count=count, time=time, partition=partition, account=account, cpus=cpus, gpus=gpus,
        memory=memory, options=option or (), setup=setup or (),
    )  # fmt: skip
    _check(place, request)
    script = sbatch_script(request, folder=place, python=python or sys.executable)
    if show:
        typer.echo(script, nl=False)
        return
    program = shutil.which("sbatch")
    if program is None:
        raise ConfigError(
            "sbatch is not on this machine", given="no sbatch in PATH",
            expected="a login node of a cluster with Slurm",
            remedy="--print shows the script; submit it there",
        )  # fmt: skip
    from atoll.node.identity.identity import write_secret

    write_secret(place / "ticket", f"{_ticket(hub, uses=count)}\n")
    file = place / "nodes.sbatch"
    file.write_text(script, encoding="utf-8", newline="\n")
    job = _submit(program, file)
    screen.output().print(
        f"submitted job {job}: {count} nodes join when Slurm starts them; "
        f"log {screen.shown(place)}/{job}.log; scancel {job} ends them",
        soft_wrap=True, markup=False,
    )  # fmt: skip


def _check(place: Path, request: SlurmRequest) -> None:
    """Check what would break the script; raises ConfigError."""
    texts = [
        str(place),
        request.time,
        request.partition,
        request.account,
        request.memory,
        *request.options,
    ]
    for text in texts:
        if any(character in text for character in '\n\r"$`\\') or " " in str(place):
            raise ConfigError(
                "this cannot be written into a batch script", given=repr(text),
                expected="a text without quotes, line breaks, $ and `; a folder without spaces",
            )  # fmt: skip


def _ticket(hub: str, *, uses: int) -> str:
    from atoll.cli import hub_access

    with hub_access.find(hub).client() as client:
        made: str = client.create_ticket(
            role="node", uses=uses, valid_s=30 * 86_400.0, name="slurm", quotas={}
        )
    return made


def _submit(program: str, file: Path) -> str:
    """Submit a script and return the number of its job."""
    try:
        done = subprocess.run(
            [program, "--parsable", str(file)], capture_output=True, text=True, timeout=SUBMIT_S,
            check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired as error:
        raise ConfigError(
            "Slurm does not answer", given=f"sbatch took more than {SUBMIT_S:.0f} s",
            remedy="look at `sinfo` and `scontrol ping`",
        ) from error  # fmt: skip
    if done.returncode:
        raise SlurmRefused(
            "Slurm refused the job", given=" ".join(done.stderr.split())[:300],
            expected="options that this cluster takes", remedy="--partition, --account, --time",
        )  # fmt: skip
    return done.stdout.strip().partition(";")[0]


class SlurmRefused(AtollError):
    """Slurm does not take the job."""


@app.command()
def shell(
    uses: Annotated[int, typer.Option(min=1, help="Machines that may use the line.")] = 1,
    valid: Annotated[str, typer.Option(help="Validity, e.g. 30m, 2h, 7d.")] = "2h",
    hub: HubOption = "",
) -> None:
    """Print a shell line that makes a machine a node; for a row of PCs, a loop over ssh or Ansible.

    It makes an environment in ~/.atoll, installs Atoll there, and joins.
    """
    typer.echo(shell_line(_made(hub, uses=uses, valid=valid)))


@app.command()
def cell(
    uses: Annotated[int, typer.Option(min=1, help="Notebooks that may use the cell.")] = 1,
    valid: Annotated[str, typer.Option(help="Validity, e.g. 30m, 2h, 7d.")] = "12h",
    hub: HubOption = "",
) -> None:
    """Print a notebook cell that makes its machine a node, e.g. on Colab or Kaggle.

    The node uses the notebook's accelerator and makes outbound connections only. Interrupting the
    cell ends it in order.
    """
    typer.echo(notebook_cell(_made(hub, uses=uses, valid=valid)))


def _made(hub: str, *, uses: int, valid: str) -> str:
    from atoll.cli import hub_access
    from atoll.cli.access.ticket import duration_s

    with hub_access.find(hub).client() as client:
        made: str = client.create_ticket(
            role="node", uses=uses, valid_s=duration_s(valid) or None, name="nodes", quotas={}
        )
    return made


def shell_line(ticket: str, *, package: str = "atoll[train]") -> str:
    """Return a line for sh that installs Atoll into an environment and joins in the background.

    Only the node is in the background: a shell in the background, which waits for it, would keep
    the output of `ssh` open, and `ssh` would not return.
    """
    quoted, home = shlex.quote(ticket), '"$HOME/.atoll"'
    return (
        f"python3 -m venv {home}/venv && {home}/venv/bin/pip install -q {shlex.quote(package)} && "
        f"{{ ATOLL_TICKET={quoted} nohup {home}/venv/bin/python -m atoll.cli join "
        f"--home {home}/node > {home}/node.log 2>&1 & }}"
    )


def notebook_cell(ticket: str, *, package: str = "atoll[train]") -> str:
    """Return Python for a notebook: installs Atoll unless it is there, and joins until stopped."""
    return f"""import importlib.util, os, pathlib, subprocess, sys

if importlib.util.find_spec("atoll") is None:
    subprocess.check_call([sys.executable, "-m", "pip", "install", "-q", {package!r}])
folder = pathlib.Path("atoll-node").absolute()
folder.mkdir(exist_ok=True)
path = folder / "ticket"  # not on the command line, which others may see
with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
    file.write({ticket!r})
node = subprocess.Popen(
    [sys.executable, "-u", "-m", "atoll.cli", "join", f"@{{folder}}/ticket", "--home", str(folder)],
    stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
)
try:
    for line in node.stdout:  # interrupt the cell to leave
        print(line, end="", flush=True)
except KeyboardInterrupt:
    node.terminate()
node.wait()"""
