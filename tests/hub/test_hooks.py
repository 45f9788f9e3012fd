"""Hooks against a real web server, a real program and a real mail server."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import http.server
import json
import socket
import ssl
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from email import message_from_bytes
from pathlib import Path
from typing import Any

import psutil
import pytest
from aiosmtpd.controller import Controller
from aiosmtpd.smtp import AuthResult, Envelope, LoginPassword
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from atoll.clock import RealClock
from atoll.errors import ConfigError, HubError
from atoll.hub.alarms.engine import Alarm
from atoll.hub.alarms.finding import Finding
from atoll.hub.alarms.watch import Looking
from atoll.hub.app import HubOptions
from atoll.hub.hook_file import Command, Email, Hook, Webhook, load_hooks
from atoll.hub.hook_senders import SIGNATURE, Hopeless, send, subject
from atoll.hub.hooks import MOST_WAITING, Hooks, wanted
from atoll.hub.server import HubServer
from tests.hub.peer import node

WAIT_S = 15.0


def alarm(
    id_: int = 1, *, ended: float | None = None, silenced: bool = False, **more: Any
) -> Alarm:
    told = {"kind": "straggler", "cause": "lap3 is slow", "remedy": "atoll drain lap3",
            "severity": "warning", "job": "j1", "node": "lap3"}  # fmt: skip
    return Alarm(id_, Finding(**(told | more)), 1.0, 2.0, ended, silenced)


def message(*alarms: Alarm) -> dict[str, Any]:
    views = [a.view() for a in alarms or (alarm(),)]
    return {"hub": "http://hub", "time": 3.0, "alarms": views, "left_out": 0}


# ---------------------------------------------------------------------------- who is told


def test_hooks_choose_by_severity_kind_and_job() -> None:
    assert wanted(Webhook(), alarm())
    assert not wanted(Webhook(min_severity="critical"), alarm())
    assert wanted(Webhook(min_severity="critical"), alarm(severity="critical"))
    assert not wanted(Webhook(kinds=("stale",)), alarm())
    assert wanted(Webhook(jobs=("j*",)), alarm())
    assert not wanted(Webhook(jobs=("other", "k*")), alarm())
    assert not wanted(Webhook(ends=False), alarm(ended=5.0))
    assert not wanted(Webhook(), alarm(silenced=True))


@dataclass
class Told:
    """Stands in for the events of a hub."""

    texts: list[str] = field(default_factory=list)

    async def add(self, job: str, kind: str, text: str, **more: Any) -> int:
        self.texts.append(f"{kind}: {text}")
        return len(self.texts)


def run_hooks(
    hooks: list[Hook],
    work: Callable[[Hooks], Awaitable[None]],
    sender: Callable[[Hook, Mapping[str, Any]], Awaitable[None]] = send,
) -> Told:
    """Run hooks beside some work; return what was told as events."""
    told = Told()
    events: Any = told

    async def body() -> None:
        made = Hooks(
            hooks, events=events, clock=RealClock(), hub="http://hub", send=sender, gather_s=0.05,
            first_pause_s=0.01,
        )  # fmt: skip
        task = asyncio.create_task(made.run())
        await asyncio.wait_for(work(made), WAIT_S)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    asyncio.run(body())
    return told


async def until(condition: Callable[[], Any]) -> None:
    while not condition():
        await asyncio.sleep(0.01)


def test_a_storm_sends_few_messages_with_everything_in_them() -> None:
    sent: list[Mapping[str, Any]] = []

    async def note(hook: Hook, told: Mapping[str, Any]) -> None:
        sent.append(told)

    async def storm(hooks: Hooks) -> None:
        for number in range(300):
            await hooks.tell(alarm(number))
            await asyncio.sleep(0.001)
        await until(lambda: sum(len(told["alarms"]) for told in sent) == 300)

    run_hooks([Webhook(url="http://x", pause_s=0.4)], storm, note)
    assert 2 <= len(sent) <= 4


def test_more_than_anybody_reads_is_counted_and_the_newest_are_kept() -> None:
    sent: list[Mapping[str, Any]] = []

    async def note(hook: Hook, told: Mapping[str, Any]) -> None:
        sent.append(told)

    async def flood(hooks: Hooks) -> None:
        for number in range(MOST_WAITING + 5):
            await hooks.tell(alarm(number))
        await hooks.tell(alarm(MOST_WAITING + 4, ended=9.0))
        await until(lambda: sent)

    run_hooks([Webhook(url="http://x")], flood, note)
    assert sent[0]["left_out"] == 6
    assert len(sent[0]["alarms"]) == MOST_WAITING - 1, "an alarm that ended meanwhile is told once"
    assert sent[0]["alarms"][-1]["ended"] == 9.0


def test_failures_are_tried_again_then_become_an_event_and_hinder_no_other_hook() -> None:
    tried: list[str] = []

    async def fail(hook: Hook, told: Mapping[str, Any]) -> None:
        tried.append(hook.name)
        if isinstance(hook, Webhook):
            raise HubError("no", given="status 503")

    async def work(hooks: Hooks) -> None:
        await hooks.tell(alarm())
        await until(lambda: len(tried) == 4)
        await asyncio.sleep(0.05)

    told = run_hooks(
        [Webhook(url="http://u:p@x/secret", attempts=3), Command(argv=("b",))], work, fail
    )
    assert sorted(tried) == ["command b", "webhook x", "webhook x", "webhook x"]
    (text,) = told.texts
    assert "webhook x: 1 alarms were not told after 3 attempts" in text
    assert "secret" not in text


def test_what_is_refused_for_good_is_not_tried_again() -> None:
    tried: list[int] = []

    async def refuse(hook: Hook, told: Mapping[str, Any]) -> None:
        tried.append(1)
        raise Hopeless("status 404")

    async def work(hooks: Hooks) -> None:
        await hooks.tell(alarm())
        await until(lambda: tried)
        await asyncio.sleep(0.1)

    assert len(run_hooks([Webhook(url="http://x")], work, refuse).texts) == 1
    assert len(tried) == 1


# ------------------------------------------------------------------------------ a web server


@dataclass
class Web:
    """A web server that answers as told and keeps what came."""

    url: str = ""
    statuses: list[int] = field(default_factory=list)
    came: list[tuple[dict[str, str], bytes]] = field(default_factory=list)
    wait_s: float = 0.0


@pytest.fixture
def web() -> Iterator[Web]:
    kept = Web()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            kept.came.append(({k.lower(): v for k, v in self.headers.items()}, body))
            time.sleep(kept.wait_s)
            self.send_response(kept.statuses.pop(0) if kept.statuses else 204)
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None:
            return

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    kept.url = f"http://127.0.0.1:{server.server_address[1]}/hook"
    yield kept
    server.shutdown()
    server.server_close()
    thread.join()


def test_webhook_posts_json_with_a_signature_that_can_be_checked(web: Web) -> None:
    asyncio.run(send(Webhook(url=web.url, secret="key"), message()))
    headers, body = web.came[0]
    assert json.loads(body)["alarms"][0]["cause"] == "lap3 is slow"
    assert headers["content-type"] == "application/json"
    stamp, _, mark = headers[SIGNATURE.lower()].partition(",v1=")
    stamp = stamp.removeprefix("t=")
    assert abs(int(stamp) - time.time()) < 30
    assert mark == hmac.new(b"key", f"{stamp}.".encode() + body, hashlib.sha256).hexdigest()


def test_webhook_is_tried_again_until_the_server_is_well(web: Web) -> None:
    web.statuses = [503, 500]

    async def work(hooks: Hooks) -> None:
        await hooks.tell(alarm())
        await until(lambda: len(web.came) == 3)

    assert not run_hooks([Webhook(url=web.url)], work).texts


@pytest.mark.parametrize(("status", "kind"), [(404, Hopeless), (302, Hopeless), (500, HubError)])
def test_webhook_that_is_refused_says_how(web: Web, status: int, kind: type[HubError]) -> None:
    web.statuses = [status]
    with pytest.raises(kind, match=str(status)):
        asyncio.run(send(Webhook(url=web.url), message()))


def test_webhook_that_hangs_or_is_not_there_is_given_up_in_time(web: Web) -> None:
    web.wait_s = 1.0
    began = time.monotonic()
    with pytest.raises(HubError, match="could not be reached"):
        asyncio.run(send(Webhook(url=web.url, timeout_s=0.2), message()))
    assert time.monotonic() - began < 0.9
    with pytest.raises(HubError, match="could not be reached"):
        asyncio.run(send(Webhook(url="http://127.0.0.1:9/"), message()))


# --------------------------------------------------------------------------------- a program


def python(code: str, **more: Any) -> Command:
    return Command(argv=(sys.executable, "-c", code), **more)


def test_command_gets_the_alarms_on_its_standard_input(tmp_path: Path) -> None:
    out = tmp_path / "out"
    code = f"import sys; open({str(out)!r}, 'w').write(sys.stdin.read())"
    asyncio.run(send(python(code), message(alarm(), alarm(2))))
    assert [a["id"] for a in json.loads(out.read_text())["alarms"]] == [1, 2]


def test_command_that_fails_hangs_or_is_not_there_says_so_and_leaves_nothing(
    tmp_path: Path,
) -> None:
    with pytest.raises(HubError, match="status 3 sorry"):
        asyncio.run(
            send(python("import sys; sys.exit(print('sorry', file=sys.stderr) or 3)"), message())
        )
    pid = tmp_path / "pid"
    child = (
        "import os, subprocess, sys, time; p = subprocess.Popen([sys.executable, '-c', "
        f"'import time; time.sleep(60)']); open({str(pid)!r}, 'w').write(str(p.pid)); "
        "time.sleep(60)"
    )
    with pytest.raises(HubError, match="too long"):
        asyncio.run(send(python(child, timeout_s=2.0), message()))
    left = int(pid.read_text())
    assert is_gone(left)
    with pytest.raises(Hopeless, match="cannot be started"):
        asyncio.run(send(Command(argv=("/nowhere/program",)), message()))


def is_gone(pid: int) -> bool:
    """Return whether a process that was killed has ended, buried or not."""
    try:
        process = psutil.Process(pid)
        deadline = time.monotonic() + WAIT_S
        while process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
            if time.monotonic() > deadline:
                return False
            time.sleep(0.01)
    except psutil.NoSuchProcess:
        return True
    return True


# ----------------------------------------------------------------------------- a mail server


@dataclass
class Mailbox:
    port: int = 0
    ca: str = ""
    letters: list[Envelope] = field(default_factory=list)

    async def handle_DATA(self, server: Any, session: Any, envelope: Envelope) -> str:
        self.letters.append(envelope)
        return "250 OK"


@pytest.fixture
def mailbox(tmp_path: Path) -> Iterator[Mailbox]:
    """A mail server that wants STARTTLS and a password."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        kept = Mailbox(free.getsockname()[1], str(tmp_path / "mail.pem"))
    write_certificate(Path(kept.ca))
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(kept.ca)

    def check(server: Any, session: Any, envelope: Any, mechanism: str, data: Any) -> AuthResult:
        return AuthResult(success=data == LoginPassword(b"me", b"word"), handled=False)

    controller = Controller(
        kept, hostname="127.0.0.1", port=kept.port, tls_context=context, require_starttls=True,
        authenticator=check, auth_required=True,
    )  # fmt: skip
    controller.start()
    yield kept
    controller.stop()


def write_certificate(path: Path) -> None:
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "localhost")])
    now = datetime.now(UTC)
    certificate = (
        x509.CertificateBuilder().subject_name(name).issuer_name(name)
        .public_key(key.public_key()).serial_number(1)
        .not_valid_before(now - timedelta(days=1)).not_valid_after(now + timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost")]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )  # fmt: skip
    form, plain = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    pem = serialization.Encoding.PEM
    path.write_bytes(key.private_bytes(pem, form, plain) + certificate.public_bytes(pem))


def mail_hook(mailbox: Mailbox, **more: Any) -> Email:
    options: dict[str, Any] = {
        "host": "localhost", "port": mailbox.port, "ca": mailbox.ca, "user": "me",
        "password": "word", "sender": "atoll@example.org", "to": ("ops@example.org",),
    }  # fmt: skip
    return Email(**(options | more))


def test_mail_goes_through_starttls_and_login(mailbox: Mailbox) -> None:
    asyncio.run(send(mail_hook(mailbox), message(alarm(), alarm(2, ended=4.0))))
    (envelope,) = mailbox.letters
    assert envelope.rcpt_tos == ["ops@example.org"]
    assert isinstance(envelope.content, bytes)
    letter = message_from_bytes(envelope.content)
    assert letter["Subject"] == "[atoll] warning: straggler: lap3 is slow (and 1 more)"
    text = letter.get_payload(decode=True)
    assert isinstance(text, bytes)
    assert b"WARNING  straggler: lap3 is slow\n  atoll drain lap3" in text.replace(b"\r\n", b"\n")
    assert b"OVER  straggler" in text


def test_mail_with_a_wrong_password_is_not_tried_again(mailbox: Mailbox) -> None:
    with pytest.raises(Hopeless, match="user or password"):
        asyncio.run(send(mail_hook(mailbox, password="no"), message()))
    assert not mailbox.letters


def test_mail_to_a_server_with_another_certificate_is_not_sent(mailbox: Mailbox) -> None:
    with pytest.raises(HubError, match=r"not taken.*CERTIFICATE_VERIFY_FAILED"):
        asyncio.run(send(mail_hook(mailbox, ca=""), message()))
    assert not mailbox.letters


def test_words_of_a_member_cannot_add_headers_to_a_mail() -> None:
    text = subject([alarm(cause="x\r\nBcc: all@example.org").view()])
    hook = Email(host="h", sender="a@b.c", to=("d@e.f",))
    from atoll.hub.hook_senders import letter

    mail = letter(hook, message(alarm(cause="x\r\nBcc: all@example.org")))
    assert mail["Bcc"] is None
    assert "\n" in text or "Bcc" in text
    assert "\n" not in mail["Subject"]


# ------------------------------------------------------------------------------------ the file


def test_file_of_hooks_is_read_with_its_defaults(tmp_path: Path) -> None:
    path = tmp_path / "hooks.toml"
    path.write_text(
        '[[webhook]]\nurl = "https://example.org/h"\nkinds = ["stale"]\npause_s = 5\n'
        '[[command]]\nargv = ["notify-send", "atoll"]\nmin_severity = "critical"\n'
        '[[email]]\nhost = "mail"\nsender = "a@b.c"\nto = ["d@e.f"]\n'
    )
    path.chmod(0o600)
    hooks = load_hooks(path)
    assert hooks == [
        Webhook(url="https://example.org/h", kinds=("stale",), pause_s=5),
        Command(argv=("notify-send", "atoll"), min_severity="critical"),
        Email(host="mail", sender="a@b.c", to=("d@e.f",)),
    ]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("nonsense", "cannot be read"),
        ("[[pigeon]]\n", "pigeon"),
        ('[[webhook]]\nurl = "ftp://x"\n', "url of a webhook"),
        ('[[webhook]]\nurl = "http://x"\nurls = []\n', "urls"),
        ('[[webhook]]\nurl = "http://x"\nkinds = "stale"\n', "wrong type"),
        ('[[webhook]]\nurl = "http://x"\nmin_severity = "loud"\n', "loud"),
        ('[[webhook]]\nurl = "http://x"\nattempts = 0\n', "attempts"),
        ("[[command]]\n", "argv"),
        ('[[email]]\nhost = "h"\n', "a sender"),
        ('[[email]]\nhost="h"\nsender="a"\nto=["b"]\nstarttls=false\npassword="x"\n', "clear"),
        ("webhook = 3\n", "a hook is a table"),
    ],
)
def test_file_that_is_wrong_says_what(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "hooks.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=words):
        load_hooks(path)
    with pytest.raises(ConfigError, match="cannot be read"):
        load_hooks(tmp_path / "missing.toml")


def test_a_hub_tells_its_hooks_of_an_alarm(tmp_path: Path, web: Web) -> None:
    """From a real machine of another version to a real web server, by a real hub."""
    path = tmp_path / "data" / "hooks.toml"
    path.parent.mkdir()
    path.write_text(f'[[webhook]]\nurl = "{web.url}"\nkinds = ["version-mismatch"]\n')
    path.chmod(0o600)
    looking = Looking(every_s=0.1, nodes_every=1, patience=0.02)
    options = HubOptions(
        data=tmp_path / "data", jobs=tmp_path / "jobs", reducers=False, looking=looking
    )
    with HubServer(options) as hub, node(hub, "old-laptop"):
        deadline = time.monotonic() + WAIT_S
        while not web.came:
            assert time.monotonic() < deadline
            time.sleep(0.02)
    (told,) = json.loads(web.came[0][1])["alarms"]
    assert (told["kind"], told["node"]) == ("version-mismatch", "old-laptop")
