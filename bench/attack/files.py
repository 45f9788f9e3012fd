"""Names that lead elsewhere, files of other users, and what a program prints."""

from __future__ import annotations

import contextlib
import os
import re
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil

from atoll.errors import AtollError
from atoll.wire.job_messages import LogLines
from bench.attack.attacks import Suite, hold
from bench.attack.session import Session
from bench.attack.site import SPEC, Site
from bench.kit.cluster import ROOT

suite = Suite()

FOLDERS = "a job's files stay in its folder"
MARK = b"written by an attacker"

OTHERS = "other users of the machine read no secret"
TERMINAL = "what others write reaches a terminal as text"
COPIES = "a job file names no folder of the hub's machine"

ESCAPES = (
    "../{n}", "../../{n}", "..%2f..%2f{n}", "%2e%2e/%2e%2e/{n}", "a/../../{n}", "..%5c{n}",
    "/etc/passwd", "%2fetc%2fpasswd", "a/%00/{n}", "..%252f{n}", "~/{n}", ".hidden/../../{n}",
    "..%c0%af{n}", "%ff/{n}", "....//{n}", "C:%5c{n}", "{n}::$DATA", "a" * 300 + "/{n}",
)  # fmt: skip


@suite.attack(FOLDERS)
def leave_the_folder_of_a_job(site: Site) -> str:
    job, name = site.operator.submit(SPEC), "outside.txt"
    outside = [site.cluster.folder / name, site.cluster.jobs / name]
    for path in outside:
        path.write_text("secret outside", encoding="utf-8", newline="\n")
    token = site.cluster.token.encode()
    for escape in ESCAPES:
        for base in (f"/api/jobs/{job}/files/", "/static/", "/api/blobs/", "/api/jobs/"):
            for method in (b"GET", b"PUT"):
                address = (base + escape.format(n=name)).encode()
                answer = site.request(
                    b"%s %s HTTP/1.1\r\nHost: h\r\nConnection: close\r\nAuthorization: Bearer %s"
                    b"\r\nContent-Length: %d\r\n\r\n%s" % (method, address, token, len(MARK), MARK)
                )
                hold(b"secret outside" not in answer, f"{address!r} reads what is outside")
                hold(b"root:" not in answer, f"{address!r} reads the system's files")
                hold(not answer.startswith(b"HTTP/1.1 5"), f"{address!r}: {answer[:30]!r}")
    hold(
        all(path.read_text(encoding="utf-8") == "secret outside" for path in outside), "overwritten"
    )
    for path in outside:
        path.unlink()
    written = [str(p) for p in _small_files(site) if p.read_bytes() == MARK and job not in p.parts]
    hold(not written, f"written outside: {written}")
    return f"{len(ESCAPES)} names x 4 addresses x 2 methods: nothing read or written outside"


def _small_files(site: Site) -> Iterator[Path]:
    for path in site.cluster.folder.rglob("*"):
        with contextlib.suppress(FileNotFoundError):
            if path.is_file() and path.stat().st_size == len(MARK):
                yield path


@suite.attack(FOLDERS)
def send_a_pack_of_code_that_leaves_its_folder(site: Site) -> str:
    """A blob that is no pack, or one of another kind, is the node's to refuse: see owners."""
    with site.web(site.cluster.token) as web:
        for digest in ("0" * 64, "../" * 10, "A" * 64, "0" * 63):
            status = web.put(f"/api/blobs/{digest}", content=b"not that hash").status_code
            hold(status >= 400, f"a blob was taken under the name {digest[:10]}...: {status}")
    return "a blob goes by the hash of its bytes only"


@suite.attack(OTHERS)
def read_as_another_user_of_the_hubs_machine(site: Site) -> str:
    site.operator.submit(SPEC)
    open_ = []
    for path in [*(site.cluster.folder / "hub").rglob("*"), *site.cluster.jobs.rglob("*")]:
        if path.name != "ca.pem" and path.is_file() and _reachable(path, site.cluster.folder):
            open_.append(str(path.relative_to(site.cluster.folder)))
    hold(not open_, f"others may read {open_[:5]}")
    secrets = (site.cluster.token, site.cluster.ticket.rpartition("/")[2].partition("~")[0])
    for process in psutil.process_iter(["cmdline"]):
        line = " ".join(process.info["cmdline"] or ())
        if "bench.attack" not in line and process.pid not in _own_nodes(site):
            hold(not any(secret in line for secret in secrets), f"a secret in: {line[:80]}")
    return "data and job folders are closed, no secret in a command line of the hub"


def _own_nodes(site: Site) -> set[int]:
    """Return the agents that this suite starts with a ticket, as a person would who is careless."""
    return {popen.pid for popen in site.cluster.nodes.values()}


def _reachable(path: Path, top: Path) -> bool:
    """Return whether others may read a file, by it and every folder above it."""
    if not path.stat().st_mode & stat.S_IROTH:
        return False
    above = [one for one in path.parents if top in one.parents]
    return all(one.stat().st_mode & stat.S_IXOTH for one in above)


BAD_TEXT = "\x1b[2J\x1b]52;c;ZXZpbA==\x07\x1b]0;title\x07\x9b31m\u202eevil\u2066\x08\x7f\r<script>"
UNSAFE = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


@suite.attack(TERMINAL)
def print_escape_sequences(site: Site) -> str:
    job = site.operator.submit('[job]\nname = "talk"\nnodes = 1\ncommand = ["true"]\n')
    with site.socket() as opened:
        session = Session(opened, f"{job}/w9", site.cluster.token)
        hold(session.welcome, f"no session: {session.answer}")
        session.ask(LogLines(job, "w9", 1, [f"a line {BAD_TEXT}"]))
    env = {
        **os.environ, "PYTHONPATH": str(ROOT), "ATOLL_HOME": str(site.folder / "reader"),
        "ATOLL_HUB": site.cluster.url, "ATOLL_TOKEN": site.cluster.token,
    }  # fmt: skip
    login = site.operator.create_ticket(role="operator", uses=1)
    shown = ""
    for words in (("login", login), ("logs", job), ("status",), ("status", job), ("queue", "list")):
        done = subprocess.run(
            [sys.executable, "-m", "atoll.cli", *words], env=env, capture_output=True, text=True,
            check=False, timeout=120, stdin=subprocess.DEVNULL,
        )  # fmt: skip
        both = done.stdout + done.stderr
        bad = UNSAFE.findall(both.replace("\r\n", "\n"))
        hold(not bad, f"`atoll {words[0]}` writes {bad[:5]!r}")
        shown += both
    hold("a line" in shown, "no command showed the line: nothing was tried")
    return "logs and status show them as text"


@suite.attack(COPIES)
def make_the_hub_write_anywhere(site: Site) -> str:
    target = site.cluster.folder / "any"
    refused = 0
    for place in (str(target), f"file://{target}", f"{target}/../any", "../../any", "~/any"):
        spec = SPEC + f'[checkpoint]\nto = "{place}"\n'
        try:
            site.operator.submit(spec)
        except AtollError:
            refused += 1
    hold(refused == 5, f"{5 - refused} of 5 places were taken")
    hold(not target.exists(), "the folder was made")
    return "5 places: refused at the submission"
