"""An empty page says what to type next, shows the code to its owner, and tells who arrives."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, expect
from websockets.sync.client import connect

from atoll.errors import AuthError, WrongCode
from atoll.hub.server import HubServer
from atoll.node.identity.discovery import hub_at
from atoll.node.identity.join import enter_cluster
from atoll.node.identity.pairing import pair
from atoll.wire.limits import PROTOCOL
from atoll.wire.messages import Hello, pack
from tests.dashboard.conftest import Scheme, Watched
from tests.security.conftest import INFO, login, operator, serving

SYSTEMS = {
    "Linux": ("python3 -m pip install", "atoll join"),
    "macOS": ("python3 -m pip install", "atoll join"),
    "Windows": ("py -m pip install", "py -m atoll.cli join"),
}


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[HubServer]:
    """A hub with TLS and no machine."""
    with serving(tmp_path, tls="on") as server:
        yield server


@contextlib.contextmanager
def opened(
    browser: Browser,
    hub: HubServer,
    *,
    width: int = 1360,
    scheme: Scheme = "light",
    token: str = "",
) -> Iterator[Watched]:
    context = browser.new_context(
        viewport={"width": width, "height": 860}, color_scheme=scheme, ignore_https_errors=True
    )
    try:
        yield Watched(context.new_page(), hub, token=token)
    finally:
        context.close()


@contextlib.contextmanager
def arrived(hub: HubServer, code: str, home: Path) -> Iterator[None]:
    """Pair by the code and connect, as `atoll join` does."""
    ticket = pair(hub_at(f"127.0.0.1:{hub.port}"), code)
    me = enter_cluster(ticket, home=home, name="sofa", info=INFO)
    context = me.endpoint.context(secure=True)
    with connect(f"wss://127.0.0.1:{hub.port}/ws", ssl=context, compression=None) as link:
        link.send(pack(Hello(PROTOCOL, "test", me.node, me.token, "i1", INFO), id=1))
        yield


@pytest.mark.parametrize(("width", "scheme"), [(1360, "light"), (390, "dark")])
@pytest.mark.every(2)
def test_an_empty_page_leads_to_the_next_machine(
    browser: Browser, hub: HubServer, tmp_path: Path, width: int, scheme: Scheme
) -> None:
    with opened(browser, hub, width=width, scheme=scheme) as seen:
        page = seen.page
        card = page.locator(".add-machine")
        expect(card.locator(".code")).to_have_text(re.compile(r"^\d{3}-\d{3}$"))
        expect(card.get_by_role("tab", selected=True)).to_have_text("Linux")
        for name, (install, join) in SYSTEMS.items():
            card.get_by_role("tab", name=name).click()
            lines = card.locator(".command code")
            expect(lines.nth(0)).to_have_text(f'{install} "atoll[train]"')
            expect(lines.nth(1)).to_have_text(join)
            expect(lines.nth(2)).to_have_text(f'uvx --from "atoll[train]" atoll join {hub.ticket}')
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        seen.keep(f"add-machine-{scheme}-{width}")
        if width > 400:
            found = Axe().run(page).response["violations"]
            assert [v["id"] for v in found if v["impact"] in ("serious", "critical")] == []
        code = card.locator(".code").inner_text()
        expect(card.locator(".arrived")).to_have_text("waiting for the first laptop …")
        with arrived(hub, code, tmp_path / "sofa"):
            expect(card.locator(".arrived.lit")).to_have_text("online sofa is here.")
            expect(page.locator("tbody tr")).to_contain_text("sofa")
            expect(card.locator(".code")).not_to_have_text(code)
            seen.keep(f"add-machine-arrived-{scheme}-{width}")
        assert seen.problems == []


def test_wrong_codes_stop_pairing_until_the_owner_acts(browser: Browser, hub: HubServer) -> None:
    with opened(browser, hub) as seen:
        page = seen.page
        code = page.locator(".code").inner_text()
        wrong = code[:-1] + str((int(code[-1]) + 1) % 10)
        for _ in range(3):
            with pytest.raises(WrongCode):
                pair(hub_at(f"127.0.0.1:{hub.port}"), wrong)
        expect(page.locator(".pairing .note")).to_contain_text("Three wrong codes")
        with pytest.raises(AuthError):
            pair(hub_at(f"127.0.0.1:{hub.port}"), code)
        page.get_by_role("button", name="New code").click()
        expect(page.locator(".code")).to_have_text(re.compile(r"^\d{3}-\d{3}$"))
        assert page.locator(".code").inner_text() != code


def test_only_the_owner_sees_code_and_ticket(browser: Browser, hub: HubServer) -> None:
    with operator(hub) as client:
        code = str(client.pairing()["code"])
    with opened(browser, hub, token=login(hub, "viewer")) as seen:
        page = seen.page
        expect(page.locator(".fleet .empty")).to_have_text("No machine yet.")
        assert page.locator(".add-machine").count() == 0
        assert code not in page.content()
        assert "atoll join" not in page.content()
        assert page.evaluate("fetch('api/pairing').then(({ status }) => status)") == 403


@pytest.mark.long(
    "tests/dashboard/test_add_machine.py::test_an_empty_page_leads_to_the_next_machine"
)
def test_button_shows_the_same_in_a_dialog(tmp_path: Path, browser: Browser) -> None:
    """Without TLS there is no code, and the ticket takes its place."""
    with serving(tmp_path) as plain, opened(browser, plain) as seen:
        page = seen.page
        page.goto(f"{plain.url}/#/jobs")
        page.get_by_role("button", name="Add a machine").click()
        dialog = page.get_by_role("dialog")
        expect(dialog.locator(".command code").nth(1)).to_have_text(f"atoll join {plain.ticket}")
        expect(dialog.locator(".code")).to_have_count(0)
        expect(dialog.locator(".note")).to_contain_text("127.0.0.1, so other machines cannot")
        page.keyboard.press("Escape")
        expect(dialog).to_be_hidden()
        assert seen.problems == []
