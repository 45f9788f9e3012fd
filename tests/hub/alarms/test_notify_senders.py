"""Webhooks, commands and mails against a real server, process and mail server."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import ssl
import subprocess
import sys
import time
from collections.abc import Iterator
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

from atoll.errors import HubError
from atoll.hub.alarms.notify import Notifier
from atoll.hub.alarms.notify_config import Command, Email, Webhook
from atoll.hub.alarms.notify_senders import (
    SIGNATURE,
    PermanentFailure,
    format_message,
    send,
    subject,
)
from bench.kit.ports import free_port
from tests.hub.alarms.notify_targets import WAIT_S, Web, alarm, message, run_hooks, until
from tests.patience import PROMPT_S


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

    async def work(hooks: Notifier) -> None:
        await hooks.tell(alarm())
        await until(lambda: len(web.came) == 3)

    assert not run_hooks([Webhook(url=web.url)], work).texts


@pytest.mark.parametrize(
    ("status", "kind"), [(404, PermanentFailure), (302, PermanentFailure), (500, HubError)]
)
def test_webhook_that_is_refused_says_how(web: Web, status: int, kind: type[HubError]) -> None:
    web.statuses = [status]
    with pytest.raises(kind, match=str(status)):
        asyncio.run(send(Webhook(url=web.url), message()))


def test_webhook_that_hangs_or_is_not_there_is_given_up_in_time(web: Web) -> None:
    web.wait_s = 600.0
    began = time.monotonic()
    with pytest.raises(HubError, match="could not be reached"):
        asyncio.run(send(Webhook(url=web.url, timeout_s=0.2), message()))
    assert time.monotonic() - began < PROMPT_S
    with pytest.raises(HubError, match="could not be reached"):
        asyncio.run(send(Webhook(url="http://127.0.0.1:9/"), message()))


def python(code: str, *, timeout_s: float = WAIT_S) -> Command:
    return Command(argv=(sys.executable, "-c", code), timeout_s=timeout_s)


def test_command_gets_the_alarms_on_its_standard_input(tmp_path: Path) -> None:
    out = tmp_path / "out"
    code = f"import sys; open({str(out)!r}, 'w').write(sys.stdin.read())"
    asyncio.run(send(python(code), message(alarm(), alarm(2))))
    assert [a["id"] for a in json.loads(out.read_text())["alarms"]] == [1, 2]


def test_failing_hanging_or_missing_command_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(HubError, match="status 3 sorry"):
        asyncio.run(
            send(python("import sys; sys.exit(print('sorry', file=sys.stderr) or 3)"), message())
        )
    pid = tmp_path / "pid"
    child = (
        "import os, subprocess, sys, time; p = subprocess.Popen([sys.executable, '-c', "
        f"'import time; time.sleep(600)']); open({str(pid) + '.new'!r}, 'w').write(str(p.pid)); "
        f"os.rename({str(pid) + '.new'!r}, {str(pid)!r}); time.sleep(600)"
    )

    class Begun(subprocess.Popen[bytes]):
        """Its time counts from when it has started its own, which may take a busy machine long."""

        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            deadline = time.monotonic() + WAIT_S
            while not pid.exists():
                assert time.monotonic() < deadline
                time.sleep(0.01)

    with monkeypatch.context() as patch:
        patch.setattr(subprocess, "Popen", Begun)
        with pytest.raises(HubError, match="too long"):
            asyncio.run(send(python(child, timeout_s=0.2), message()))
    left = int(pid.read_text())
    assert is_gone(left)
    with pytest.raises(PermanentFailure, match="cannot be started"):
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
    kept = Mailbox(free_port(), str(tmp_path / "mail.pem"))
    write_certificate(Path(kept.ca))
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(kept.ca)

    def check(server: Any, session: Any, envelope: Any, mechanism: str, data: Any) -> AuthResult:
        return AuthResult(success=data == LoginPassword(b"me", b"word"), handled=False)

    controller = Controller(
        kept, hostname="127.0.0.1", port=kept.port, tls_context=context, require_starttls=True,
        authenticator=check, auth_required=True, ready_timeout=WAIT_S,
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
        "timeout_s": WAIT_S,
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
    with pytest.raises(PermanentFailure, match="user or password"):
        asyncio.run(send(mail_hook(mailbox, password="no"), message()))
    assert not mailbox.letters


def test_mail_to_a_server_with_another_certificate_is_not_sent(mailbox: Mailbox) -> None:
    with pytest.raises(HubError, match=r"not accepted.*CERTIFICATE_VERIFY_FAILED"):
        asyncio.run(send(mail_hook(mailbox, ca=""), message()))
    assert not mailbox.letters


def test_words_of_a_member_cannot_add_headers_to_a_mail() -> None:
    text = subject([alarm(cause="x\r\nBcc: all@example.org").view()])
    hook = Email(host="h", sender="a@b.c", to=("d@e.f",))

    mail = format_message(hook, message(alarm(cause="x\r\nBcc: all@example.org")))
    assert mail["Bcc"] is None
    assert "\n" in text or "Bcc" in text
    assert "\n" not in mail["Subject"]


# ------------------------------------------------------------------------------------ the file
