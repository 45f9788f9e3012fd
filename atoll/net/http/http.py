"""HTTP calls to the hub: converts connection failures and error bodies into exceptions."""

from __future__ import annotations

import contextlib
import os
import socket
import ssl
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx

from atoll import __version__
from atoll.errors import AtollError, AuthError, HubError, HubUnreachable, from_dict
from atoll.net import pinned
from atoll.net.endpoint import PLAIN, HubEndpoint
from atoll.net.proxies import (
    at_address,
    hub_address,
    not_reached_by,
    not_through,
    refused_by,
    unreachable,
)
from atoll.net.throttle import ThrottledHttp, throttle_of
from atoll.system import UNSENT_OPTION
from atoll.wire.limits import UNSENT_BYTES

SHORT_QUEUE = [(socket.IPPROTO_TCP, UNSENT_OPTION, UNSENT_BYTES)] if UNSENT_OPTION else []
"""The kernel keeps little of an upload that it has not sent; see `UNSENT_BYTES`."""


class HttpSession:
    """Calls the hub's REST interface with one token."""

    def __init__(
        self, url: str, token: str, *, endpoint: HubEndpoint = PLAIN, timeout_s: float
    ) -> None:
        """Prepare a session; connections open with the first request.

        Raises:
            ConfigError: the URL is not http(s)://HOST:PORT[/PREFIX], or a certificate is missing.
        """
        target = hub_address(url)
        self.url = target.url
        self._proxy = endpoint.proxy
        self._endpoint, self._secure = endpoint, target.secure
        self._named = ""
        """Authorities that the hub named last."""
        self._at = at_address(target.host, target.port)
        headers = {"User-Agent": f"atoll/{__version__}"}
        if token:
            headers["Authorization"] = f"Bearer {token}"
        self._headers, self._timeout_s = headers, timeout_s
        self._former: list[httpx.Client] = []
        """Clients with certificates that were replaced; answers may still be read from them."""
        self._stamp = self._read_stamp()
        self._client = self._open()

    def _open(self) -> httpx.Client:
        return httpx.Client(
            base_url=self.url,
            headers=self._headers,
            timeout=self._timeout_s,
            transport=_transport(self._endpoint, secure=self._secure),
        )

    def close(self) -> None:
        """Close the connections."""
        for client in [*self._former, self._client]:
            client.close()

    def _read_stamp(self) -> tuple[int, ...]:
        """Return when the files of this endpoint were written; they are renewed in place."""
        files = (self._endpoint.ca, self._endpoint.certificate) if self._secure else ()
        found = []
        for name in filter(None, files):
            with contextlib.suppress(OSError):
                found.append(os.stat(name).st_mtime_ns)
        return tuple(found)

    def _fresh(self) -> httpx.Client:
        """Return a client with the certificates that are valid now."""
        stamp = self._read_stamp()
        if stamp != self._stamp:
            self._stamp = stamp
            self._former.append(self._client)
            self._client = self._open()
        return self._client

    def _follow(self, named: str) -> None:
        """Pin the authorities that the hub lists; see `atoll.net.pinned`."""
        if not (self._endpoint.ca and self._secure and self._endpoint.verified):
            return
        if named != self._named:
            self._named = named
            pinned.follow(Path(self._endpoint.ca), named, fetch=self._authority)

    def _authority(self, fingerprint: str) -> str:
        try:
            answer = self._client.get("/ca.pem", params={"fingerprint": fingerprint})
        except httpx.TransportError:  # the next answer names it again
            self._named = ""
            return ""
        return answer.text if answer.is_success else ""

    def json(self, method: str, path: str, **options: Any) -> Any:
        """Return the decoded JSON body; otherwise as `call`."""
        response = self.call(method, path, **options)
        try:
            return response.json()
        except ValueError:
            raise self._without_words(response) from None

    def call(self, method: str, path: str, **options: Any) -> httpx.Response:
        """Return a successful response with its body.

        `options` are those of `httpx.Client.stream`, and `absent`, see `stream`.

        Raises:
            HubUnreachable: no answer, or not from a hub.
            AtollError: the hub's error.
        """
        with self.stream(method, path, **options) as response:
            response.read()
            return response

    @contextlib.contextmanager
    def stream(
        self, method: str, path: str, *, absent: AtollError | None = None, **options: Any
    ) -> Iterator[httpx.Response]:
        """Yield a successful response with unread body; raises as `call` does.

        `absent` is raised for status 404 instead of the hub's error.
        """
        try:
            with self._fresh().stream(method, path, **options) as response:
                self._follow(response.headers.get(pinned.HEADER, ""))
                if response.status_code == 404 and absent is not None:
                    raise absent
                if not response.is_success:
                    raise self._error(response)
                yield response
        except httpx.TransportError as error:
            raise self._unreachable(error) from error

    def _unreachable(self, error: httpx.TransportError) -> AtollError:
        by_tls = isinstance(error, httpx.ConnectError) and "ssl" in str(error).lower()
        by_proxy = isinstance(error, httpx.ProxyError | httpx.ConnectError | httpx.ConnectTimeout)
        if self._proxy and by_proxy and not by_tls:
            return not_through(self._proxy, self._at, error)
        timed_out = isinstance(error, httpx.TimeoutException)
        return unreachable(self.url, TimeoutError() if timed_out else error)

    def _error(self, response: httpx.Response) -> AtollError:
        response.read()
        try:
            fields = response.json()["error"]
            return from_dict({str(key): str(value) for key, value in fields.items()})
        except (ValueError, KeyError, TypeError, AttributeError):
            return self._without_words(response)

    def _without_words(self, response: httpx.Response) -> AtollError:
        """Return the error for a response without an error body: HEAD, or not a hub."""
        status, path = response.status_code, response.request.url.path
        if self._proxy and status == 407:
            return refused_by(self._proxy, given=f"HTTP status {status}")
        if self._proxy and status in (403, 502, 503, 504):
            return not_reached_by(self._proxy, self._at, given=f"HTTP status {status}")
        if response.request.method == "HEAD" and status in (401, 403):
            return AuthError("the hub refuses this token", given=path)
        if status >= 500:
            return HubError("the hub failed", given=f"HTTP status {status} from {self.url}")
        return HubUnreachable(
            f"what answers at {self.url} is not a hub, or one of another version",
            given=f"HTTP status {status} at {path}",
            remedy="check host and port: `atoll hub` prints them when it starts",
        )


def _transport(endpoint: HubEndpoint, *, secure: bool) -> httpx.BaseTransport:
    """Return the httpx transport; the environment was already read with the endpoint."""
    # Without TLS an empty context: httpx would load every authority, which takes 20 ms.
    context = endpoint.context(secure=secure) or ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    inner = httpx.HTTPTransport(
        verify=context,
        proxy=endpoint.proxy or None,
        trust_env=False,
        socket_options=SHORT_QUEUE,
    )
    throttle = throttle_of(endpoint)
    limited = throttle.up is not None or throttle.down is not None
    return ThrottledHttp(inner, throttle) if limited else inner
