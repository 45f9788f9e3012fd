"""Delivers one message about alarms, in one attempt: by HTTP, program or mail."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import smtplib
import ssl
import subprocess
import time
from collections.abc import Mapping, Sequence
from email.message import EmailMessage
from typing import Any

from atoll.errors import HubError
from atoll.hub.alarms.notify_config import Command, Email, NotifyTarget, Webhook
from atoll.system import apart, kill_group

SIGNATURE = "X-Atoll-Signature"
_LINES_IN_MAIL = 200


class PermanentFailure(HubError):
    """The delivery failed and a retry would fail too."""


async def send(hook: NotifyTarget, message: Mapping[str, Any]) -> None:
    """Deliver a message once; raises PermanentFailure, or HubError if a retry may succeed."""
    if isinstance(hook, Webhook):
        await _post(hook, message)
    elif isinstance(hook, Command):
        await asyncio.to_thread(_run, hook, message)
    elif isinstance(hook, Email):
        await asyncio.to_thread(_mail, hook, message)


def signature(secret: str, body: bytes, *, time_s: int) -> str:
    """Return the value of the signature header: time and HMAC-SHA256 over ``TIME.BODY``."""
    digest = hmac.new(secret.encode(), b"%d." % time_s + body, hashlib.sha256).hexdigest()
    return f"t={time_s},v1={digest}"


async def _post(hook: Webhook, message: Mapping[str, Any]) -> None:
    import httpx  # imported lazily, because it takes memory that most hubs do not need

    body = json.dumps(message).encode()
    headers = {"content-type": "application/json", "user-agent": "atoll"}
    if hook.secret:
        headers[SIGNATURE] = signature(hook.secret, body, time_s=int(time.time()))
    try:
        async with asyncio.timeout(hook.timeout_s), httpx.AsyncClient() as client:
            answer = await client.post(hook.url, content=body, headers=headers)
    except (httpx.HTTPError, TimeoutError) as error:
        raise HubError(
            "it could not be reached", given=f"{type(error).__name__}: {error}"
        ) from None
    if answer.status_code >= 300:
        kind = (
            PermanentFailure if answer.status_code < 500 and answer.status_code != 429 else HubError
        )
        raise kind("it did not accept the message", given=f"status {answer.status_code}")


def _run(hook: Command, message: Mapping[str, Any]) -> None:
    """Run the program; on timeout, kill its process group."""
    try:
        process = subprocess.Popen(
            hook.argv, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
            **apart(),
        )  # fmt: skip
    except OSError as error:
        raise PermanentFailure("the program cannot be started", given=str(error)) from error
    try:
        _, said = process.communicate(json.dumps(message).encode(), timeout=hook.timeout_s)
    except subprocess.TimeoutExpired:
        raise HubError("it took too long", given=f"{hook.timeout_s:g} s") from None
    finally:
        _end(process)
        if process.stderr is not None:
            process.stderr.close()
    if process.returncode:
        last = said.decode(errors="replace").strip().splitlines()[-1:]
        raise HubError("it failed", given=f"status {process.returncode} {' '.join(last)[:200]}")


def _end(process: subprocess.Popen[bytes]) -> None:
    kill_group(process.pid)
    process.kill()
    process.wait()


def _mail(hook: Email, message: Mapping[str, Any]) -> None:
    mail = format_message(hook, message)
    try:
        with smtplib.SMTP(hook.host, hook.port, timeout=hook.timeout_s) as server:
            if hook.starttls:
                server.starttls(context=ssl.create_default_context(cafile=hook.ca or None))
            if hook.user:
                server.login(hook.user, hook.password)
            server.send_message(mail)
    except smtplib.SMTPAuthenticationError as error:
        raise PermanentFailure("user or password is wrong", given=str(error.smtp_code)) from error
    except (OSError, smtplib.SMTPException) as error:
        raise HubError(
            "the mail was not accepted", given=f"{type(error).__name__}: {error}"
        ) from error


def format_message(hook: Email, message: Mapping[str, Any]) -> EmailMessage:
    """Return the mail for a message."""
    alarms: Sequence[Mapping[str, Any]] = message["alarms"]
    mail = EmailMessage()
    mail["From"], mail["To"] = hook.sender, ", ".join(hook.to)
    mail["Subject"] = " ".join(subject(alarms).split())[:150]
    lines = [line(alarm) for alarm in alarms[:_LINES_IN_MAIL]]
    left_out = len(alarms) - len(lines) + int(message["left_out"])
    if left_out:
        lines.append(f"... and {left_out} more")
    lines.append(f"\nhub: {message['hub']}\nall of them: atoll alarms --all")
    mail.set_content("\n\n".join(lines) + "\n")
    return mail


def subject(alarms: Sequence[Mapping[str, Any]]) -> str:
    """Return the subject of a mail."""
    first = alarms[0]
    state = "over" if first["ended"] else first["severity"]
    more = f" (and {len(alarms) - 1} more)" if len(alarms) > 1 else ""
    return f"[atoll] {state}: {first['kind']}: {first['cause']}{more}"


def line(alarm: Mapping[str, Any]) -> str:
    """Return the lines of a mail about one alarm."""
    if alarm["ended"]:
        return f"OVER  {alarm['kind']}: {alarm['cause']}"
    return (
        f"{str(alarm['severity']).upper()}  {alarm['kind']}: {alarm['cause']}\n  {alarm['remedy']}"
    )
