"""The picture of the page in the README, from a real run: `python -m bench.page_picture FILE.jpg`.

Starts a hub and four nodes on this machine, trains the demo, and takes the picture of the job's
page in Chromium once 60 % of the steps are done.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
import time
from pathlib import Path

from atoll.cli.jobs.embedded import Embedded
from atoll.cli.jobs.interrupts import Interrupts
from atoll.cli.jobs.jobfile import demo_text
from atoll.net.http.client import HubClient

WIDTH, HEIGHT = 1280, 800
MOMENT = 0.6
"""Share of the steps that is done in the picture."""
QUALITY = 72
"""Of the JPEG: text stays legible, and the file is below 150 kB."""
LONGEST_S = 1500.0


def await_moment(client: HubClient, job: str, interrupts: Interrupts) -> None:
    """Wait until so much of the job is done; say how far it is."""
    deadline, shown = time.monotonic() + LONGEST_S, -1
    while (done := client.job(job)["progress"]["fraction"]) < MOMENT:
        if int(10 * done) != shown:
            shown = int(10 * done)
            print(f"{job}: {done:.0%}", flush=True)
        if interrupts.sleep(1.0) or time.monotonic() > deadline:
            raise SystemExit("no picture was taken")


def take(address: str, job: str, target: Path) -> None:
    """Write the picture of a job's page."""
    from playwright.sync_api import sync_playwright

    chromium = next(filter(None, map(shutil.which, ("chromium", "google-chrome"))), None)
    if chromium is None:
        raise SystemExit("the picture needs Chromium")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": WIDTH, "height": HEIGHT})
        page.goto(address)
        page.goto(f"{address.partition('?')[0]}#/jobs/{job}")
        page.wait_for_timeout(8000)  # curves are drawn
        page.screenshot(path=target, type="jpeg", quality=QUALITY)
        browser.close()


def main() -> None:
    """Train, and take the picture."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("target", type=Path, nargs="?", default=Path("docs/guide/page.jpg"))
    target = parser.parse_args().target.resolve()
    with (
        tempfile.TemporaryDirectory(prefix="atoll-picture-") as scratch,
        Interrupts() as interrupts,
    ):
        folder = Path(scratch)
        embedded = Embedded(folder=folder / "hub", jobs=folder / "runs", nodes=4)
        try:
            ready = embedded.start(interrupts)
            with ready.hub.client() as client:
                job = client.submit(demo_text())
                await_moment(client, job, interrupts)
                take(ready.dashboard, job, target)
        finally:
            embedded.close()
    print(f"wrote {target}: {target.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    main()
