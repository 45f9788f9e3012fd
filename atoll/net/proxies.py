"""Proxies to a hub: their URLs, and errors that name the failed hop."""

from __future__ import annotations

import importlib.util
import socket
from dataclasses import dataclass
from urllib.parse import urlsplit

from atoll import config
from atoll.errors import ConfigError, HubUnreachable


@dataclass(frozen=True, slots=True)
class HubAddress:
    """Host, port and path of a hub."""

    host: str
    port: int
    secure: bool
    prefix: str = ""
    """Path, e.g. `/atoll` behind a reverse proxy; empty or without a trailing slash."""

    @property
    def url(self) -> str:
        """The hub's URL, http(s)://HOST:PORT[/PREFIX]."""
        scheme = "https" if self.secure else "http"
        return f"{scheme}://{at_address(self.host, self.port)}{self.prefix}"

    @property
    def websocket(self) -> str:
        """The URL of its WebSocket."""
        scheme = "wss" if self.secure else "ws"
        return f"{scheme}://{at_address(self.host, self.port)}{self.prefix}/ws"


def hub_address(url: str) -> HubAddress:
    """Parse the URL of a hub.

    Raises:
        ConfigError: it is not http(s)://HOST:PORT[/PREFIX].
    """
    form = "http://HOST:PORT or https://HOST:PORT/PREFIX"
    wrong = ConfigError("this is not the URL of a hub", given=url, expected=form)
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        raise wrong from None
    secure = parts.scheme in ("https", "wss")
    if parts.scheme not in ("http", "https", "ws", "wss") or not parts.hostname:
        raise wrong
    if parts.query or parts.fragment:
        raise wrong
    default = 443 if secure else 80
    return HubAddress(parts.hostname, port or default, secure, parts.path.rstrip("/"))


def at_address(host: str, port: int) -> str:
    """Return HOST:PORT, with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def unreachable(url: str, error: BaseException) -> HubUnreachable:
    """Return the error for a connection that failed, with host, port and reason."""
    target = hub_address(url)
    host, port = target.host, target.port
    reason, remedy = _diagnosis(error, host=host, port=port)
    return HubUnreachable(
        f"no hub answers at {at_address(host, port)}",
        given=reason,
        expected=f"a hub that listens on port {port} of {host}",
        remedy=remedy,
    )


_OTHER_AUTHORITY = ("local issuer certificate", "self-signed", "self signed")
"""What OpenSSL says about a certificate that another authority has signed."""


def _diagnosis(error: BaseException, *, host: str, port: int) -> tuple[str, str]:
    text = str(error)
    if isinstance(error, ConnectionRefusedError) or "refused" in text.lower():
        return "connection refused", f"start `atoll hub --port {port}` there, or correct the port"
    if isinstance(error, TimeoutError) or "timed out" in text.lower():
        return (
            "timed out",
            f"check the address, and that a firewall lets TCP port {port} of {host} through",
        )
    if isinstance(error, socket.gaierror) or "getaddrinfo" in text or "resolution" in text:
        return f"the name {host} cannot be resolved", "use the machine's IP address instead"
    if any(words in text.lower() for words in _OTHER_AUTHORITY):
        return (
            "its certificate was not signed by the authority that this machine has pinned",
            "if the hub's keys were rotated while this machine was off, use a fresh ticket; "
            "otherwise the connection may be intercepted",
        )
    return text or type(error).__name__, "check the address and the network"


SCHEMES = ("http", "https", "socks5", "socks5h")

DIRECT = "direct"
"""Instead of a URL: no proxy, regardless of the environment."""

FORM = "http://[USER:PASSWORD@]HOST:PORT or socks5://[USER:PASSWORD@]HOST:PORT"


def check_proxy(url: str) -> str:
    """Return the URL of a proxy as given; empty: none.

    Raises:
        ConfigError: it is not the URL of a proxy, or a package is missing.
    """
    if not url or url == DIRECT:
        return url
    wrong = ConfigError("this is not the URL of a proxy", given=proxy_shown(url), expected=FORM)
    try:
        parts = urlsplit(url)
        named = bool(parts.hostname) and (parts.port is None or parts.port > 0)
    except ValueError:
        raise wrong from None
    if not named or parts.scheme not in SCHEMES:
        raise wrong
    missing = [name for name in ("python_socks", "socksio") if not importlib.util.find_spec(name)]
    if parts.scheme.startswith("socks") and missing:
        raise ConfigError(
            "a SOCKS proxy needs a package that is not installed",
            given=proxy_shown(url),
            expected=" and ".join(missing),
            remedy="pip install 'atoll[proxy]', or use an HTTP proxy",
        )
    return url


def proxy_of(given: str, *, hub: str, kept: str = "") -> str:
    """Return the proxy for a hub's URL, or "". Raises as :func:`check_proxy`.

    The explicit choice (a URL, `direct`, or empty) overrides the environment, which overrides the
    one `kept` when this machine joined.
    """
    if given == DIRECT:
        return ""
    return check_proxy(given or config.proxy_for(hub) or kept)


def proxy_shown(url: str) -> str:
    """Return the URL of a proxy without its password."""
    before, sign, host = url.rpartition("@")
    if not sign:
        return url
    scheme, separator, user = before.partition("://")
    return f"{scheme}{separator}{user.partition(':')[0]}:***@{host}"


def proxy_address(url: str) -> str:
    """Return HOST:PORT of a proxy."""
    parts = urlsplit(url)
    default = {"http": 80, "https": 443}.get(parts.scheme, 1080)
    return at_address(parts.hostname or "", parts.port or default)


def for_websocket(url: str) -> str | None:
    """Return a proxy's URL for the WebSocket library, so that the proxy resolves names."""
    scheme, _, rest = url.partition("://")
    return f"socks5h://{rest}" if scheme == "socks5" else url or None


def not_through(proxy: str, hub: str, error: BaseException) -> HubUnreachable:
    """Return the error for a hub (HOST:PORT) that was not reached through a proxy.

    It names the failed hop: the proxy does not answer, rejects this machine or does not reach the
    hub, or the hub does not answer behind it.
    """
    import httpx  # here, because the supervisor of an island needs neither library
    from websockets.exceptions import InvalidProxyMessage, InvalidProxyStatus, ProxyError

    text = _whole_text(error)
    if isinstance(error, TimeoutError | httpx.TimeoutException):
        return HubUnreachable(
            f"no hub answers at {hub} through the proxy at {proxy_address(proxy)}",
            given="timed out",
            expected="a proxy that answers, and a hub behind it",
            remedy="check that both run, and that no firewall drops connections",
        )
    if isinstance(error, InvalidProxyMessage) or not isinstance(
        error, InvalidProxyStatus | httpx.ProxyError | ProxyError
    ):
        return _no_proxy(proxy, hub, text)
    lower = text.lower()
    if "407" in text or any(word in lower for word in ("authentication", "password", "methods")):
        return refused_by(proxy, given=text)
    return not_reached_by(proxy, hub, given=text)


def refused_by(proxy: str, *, given: str) -> HubUnreachable:
    """Return the error for a proxy that rejects this machine."""
    return HubUnreachable(
        f"the proxy at {proxy_address(proxy)} refuses to serve this machine",
        given=given,
        expected="a proxy that accepts this user",
        remedy="give user and password: --via-proxy http://USER:PASSWORD@HOST:PORT",
    )


def not_reached_by(proxy: str, hub: str, *, given: str) -> HubUnreachable:
    """Return the error for a proxy that does not reach the hub."""
    return HubUnreachable(
        f"the proxy at {proxy_address(proxy)} does not reach the hub at {hub}",
        given=given,
        expected="a hub that this proxy can reach, and is allowed to",
        remedy="check that the hub runs, and that the proxy allows CONNECT to its port",
    )


def _no_proxy(proxy: str, hub: str, text: str) -> HubUnreachable:
    return HubUnreachable(
        f"no proxy answers at {proxy_address(proxy)}",
        given=text,
        expected=f"a proxy on the way to {hub}",
        remedy="correct --via-proxy (or HTTP_PROXY, HTTPS_PROXY, ALL_PROXY), or set NO_PROXY to "
        "reach the hub directly",
    )


def _whole_text(error: BaseException) -> str:
    texts = [str(error) or type(error).__name__]
    if error.__cause__ is not None and str(error.__cause__) not in (*texts, ""):
        texts.append(str(error.__cause__))
    return ": ".join(texts)
