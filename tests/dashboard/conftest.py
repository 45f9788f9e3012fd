"""A browser, a real hub, and pages that remember whom they asked and what went wrong."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal

import httpx
import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright

from atoll.hub.app import HubOptions
from atoll.hub.server import HubServer
from tests.dashboard.scene import Scene
from tests.patience import PATIENCE_S

CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
ARTIFACTS = Path(__file__).resolve().parents[2] / "test-artifacts" / "dashboard"
WAIT_MS = int(1000 * PATIENCE_S)

Scheme = Literal["light", "dark"]

REMEMBER = """
window.told = [];
new MutationObserver((changes) => {
  for (const { target, addedNodes } of changes) {
    if (target.id === 'toasts') {
      told.push(...[...addedNodes].filter((one) => one.checkVisibility())
        .map((one) => `${one.className}: ${one.textContent}`));
    } else if (target.matches?.('.command button')) {
      told.push(target.closest('.command').textContent);
    }
  }
}).observe(document, { childList: true, subtree: true });
"""
"""Keeps what the page shows for seconds only: a test may look later."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip everything that asks for a browser where there is none."""
    if CHROMIUM is not None:
        return
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents and "browser" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.skip(reason="no Chromium is installed"))


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Give a browser to one file: while it is open, this thread has an event loop that runs."""
    expect.set_options(timeout=WAIT_MS)
    with sync_playwright() as playwright:
        opened = playwright.chromium.launch(
            executable_path=CHROMIUM,
            args=["--no-sandbox", "--disable-gpu", "--disable-background-networking"],
        )
        yield opened
        opened.close()


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[HubServer]:
    options = HubOptions(
        data=tmp_path / "data", jobs=tmp_path / "jobs", reducers=False, reconnect_grace_s=1.0
    )
    with HubServer(options) as server:
        yield server


@pytest.fixture
def scene(hub: HubServer) -> Iterator[Scene]:
    """Four machines, of which three are there, and jobs in several states."""
    with Scene(hub) as made:
        yield made


class Watched:
    """A page that remembers whom it asked and what went wrong."""

    def __init__(self, page: Page, hub: HubServer, *, token: str = "") -> None:
        self.page = page
        self.hub = hub
        self.problems: list[str] = []
        self.hosts: set[str] = set()
        page.set_default_timeout(WAIT_MS)
        page.on("console", self._told)
        page.on("pageerror", lambda error: self.problems.append(str(error)))
        page.on("request", lambda request: self.hosts.add(httpx.URL(request.url).netloc.decode()))
        page.add_init_script(REMEMBER)
        page.goto(f"{hub.url}/?token={token or hub.operator_token}")
        expect(page.locator("#connection")).to_have_text("live")

    def go(self, place: str) -> Page:
        """Open a view by its address."""
        self.page.evaluate("place => { location.hash = place }", f"#/{place}")
        return self.page

    def told(self, pattern: str) -> None:
        """Wait until a passing message with these words was shown, and take it."""
        self.page.wait_for_function(
            "(pattern) => {"
            " const at = told.findIndex((one) => RegExp(pattern).test(one));"
            " return at >= 0 && told.splice(at, 1); }",
            arg=pattern,
        )

    def keep(self, name: str) -> None:
        """Keep a picture of the whole page for people who asked: `ATOLL_PICTURES=1 pytest ...`."""
        if not os.environ.get("ATOLL_PICTURES"):
            return
        ARTIFACTS.mkdir(parents=True, exist_ok=True)
        self.page.screenshot(path=ARTIFACTS / f"{name}.png", full_page=True)

    def _told(self, message: object) -> None:
        if getattr(message, "type", "") in ("error", "warning"):
            self.problems.append(str(getattr(message, "text", "")))


Watch = Callable[..., contextlib.AbstractContextManager[Watched]]


@pytest.fixture
def watched(browser: Browser, hub: HubServer) -> Watch:
    """Give a way to open pages of any width and colour, for anybody's token."""

    @contextlib.contextmanager
    def open_page(
        *, width: int = 1360, height: int = 900, scheme: Scheme = "light", token: str = ""
    ) -> Iterator[Watched]:
        context = browser.new_context(
            viewport={"width": width, "height": height}, color_scheme=scheme
        )
        try:
            yield Watched(context.new_page(), hub, token=token)
        finally:
            context.close()

    return open_page
