"""What an open dashboard costs a hub with 100 nodes and 20 runs: `python -m bench.page`.

    first_paint_kb    received by Chromium with an empty cache until 100 rows of nodes are shown,
                      headers included, as it came over the network: at most 300
    first_paint_ms    from the first request to the first content on the screen, median
    open_ms           from the first request to 100 rows of nodes, median
    job_ms            from the click on a run to its drawn curves, median
    update_hz         ticks per second that the page got
    row_hz            times per second that the rows of nodes in it changed
    hub_core          share of a core that the page costs: the hub's processor time with a page
                      open, less that without, over the time
    pages_core        the same with three pages open, together
    fed_core          what the hub uses without a page: 100 heartbeats every 2 s, points of 100
                      members every second, written durably

The hub, those that feed it and the browser are processes of their own.

`--against FOLDER` opens the page of another checkout in turn with this one's, and gives the figures
of opening of both: on a busy machine only such pairs compare.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import os
import random
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from atoll.errors import AtollError
from atoll.net.handshake import greet, make_hello
from atoll.net.transport import Transport
from atoll.net.websocket import dial
from atoll.wire.limits import HEARTBEAT_S
from atoll.wire.messages import Beat, Metrics, NodeInfo, Point, Register, pack
from bench.kit.hub_process import RunningHub, hub
from bench.kit.report import emit

NODES, JOBS, MEMBERS = 100, 20, 5
WAIT_MS = 120_000
SPEC = '[job]\nname = "run-{}"\nnodes = {}\nmin_nodes = 1\n[train]\nsteps = 100000\n'


# -------------------------------------------------------------------------------- feeding


async def feed(url: str, token: str) -> None:
    """Be 100 machines and 100 members until killed; say when all are there."""
    ready = [asyncio.create_task(be_node(url, token, n)) for n in range(NODES)]
    await asyncio.sleep(2.0)
    jobs = await asyncio.to_thread(submit, url, token)
    for job, slot in itertools.product(jobs, range(MEMBERS)):
        ready.append(asyncio.create_task(be_member(url, token, job, slot)))
        await asyncio.sleep(0.01)  # members of real runs are not in step either
    await asyncio.sleep(2.0)
    print("fed", flush=True)
    await asyncio.gather(*ready)


def submit(url: str, token: str) -> list[str]:
    """Submit the runs and wait until all are placed."""
    headers = {"authorization": f"Bearer {token}"}
    with httpx.Client(base_url=url, headers=headers, trust_env=False, timeout=30) as client:
        for number in range(JOBS):
            client.post("/api/jobs", json={"spec": SPEC.format(number, MEMBERS)}).raise_for_status()
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            rows = client.get("/api/jobs", params={"brief": "1"}).json()
            if all(row["state"] == "running" for row in rows):
                return [str(row["job"]) for row in rows]
            time.sleep(0.2)
    raise SystemExit("the runs were not placed")


async def enter(url: str, token: str, session: str, info: NodeInfo | None = None) -> Transport:
    transport = await dial(url)
    await greet(transport, make_hello(session, token, info=info), id=1)
    return transport


async def be_node(url: str, token: str, number: int) -> None:
    """Tell new figures with every heartbeat, as a machine does."""
    info = NodeInfo(
        f"host-{number}", "Linux 6", "3.11", "0.1.0", cores=8, memory_bytes=16 * 10**9, slots=2
    )
    transport = await enter(url, token, f"node-{number:03}", info)
    listening = asyncio.create_task(listen(transport))
    dice = random.Random(number)
    await asyncio.sleep(dice.random() * HEARTBEAT_S)
    while not listening.done():
        stats = {
            "cpu_percent": dice.uniform(0, 100), "memory_percent": dice.uniform(20, 90),
            "memory_free_bytes": dice.uniform(1e9, 1e10), "load": dice.uniform(0, 8),
            "disk_free_bytes": 2e11, "latency_ms": dice.uniform(1, 80),
            "up_bps": dice.uniform(1e6, 1e9), "down_bps": dice.uniform(1e6, 1e9),
            "gpu_percent": dice.uniform(0, 100), "gpu_memory_used_bytes": 1e10, "reconnects": 0.0,
        }  # fmt: skip
        await transport.send(pack(Beat(stats, time.time())))
        await asyncio.sleep(HEARTBEAT_S)


async def be_member(url: str, token: str, job: str, slot: int) -> None:
    """Tell a point every second, with the names that the trainer has."""
    transport = await enter(url, token, f"{job}/w{slot}")
    listening = asyncio.create_task(listen(transport))
    await transport.send(pack(Register(), id=2))
    for seq in itertools.count(1):
        if listening.done():
            return
        values = {
            "loss": 4.0 / seq**0.2, "grad_norm": 0.5, "tokens_per_s": 2000.0 + slot, "lr": 4e-4,
            "tokens": 2e3 * seq, "wall_s": 1.0 * seq, "compute_s": 0.9 * seq, "sync_s": 0.1 * seq,
            "wait_s": 0.05 * seq, "send_s": 0.05 * seq, "checkpoint_s": 0.0, "pace": 1.0,
            "sent_bytes": 1e5 * seq, "received_bytes": 1e5 * seq,
        }  # fmt: skip
        point = Point(time.time(), seq * 10, seq // 10, values)
        await transport.send(pack(Metrics("i1", seq, [point]), id=seq + 2))
        await asyncio.sleep(1.0)


async def listen(transport: Transport) -> None:
    """Read what the hub says; the end of a connection ends the whole feeding."""
    try:
        while True:
            await transport.receive()
    except AtollError as error:
        print(f"a session ended: {error}", file=sys.stderr)
        os._exit(1)


@contextlib.contextmanager
def fed(target: RunningHub) -> Iterator[None]:
    """Have another process feed the hub."""
    command = [sys.executable, "-m", "bench.page", "--feed", target.url, f"token {target.token}"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as feeder:
        try:
            assert feeder.stdout is not None
            if feeder.stdout.readline().strip() != "fed":
                raise SystemExit("the hub could not be fed")
            yield
            if feeder.poll() is not None:
                raise SystemExit("those that feed the hub ended early: the figures say nothing")
        finally:
            feeder.kill()


# -------------------------------------------------------------------------------- the page


def core_share(target: RunningHub, page: Any, *, seconds: float) -> float:
    """Return how much of a core the hub uses while the browser goes on."""
    cpu_s, began = target.cpu_s(), time.perf_counter()
    page.wait_for_timeout(seconds * 1000)
    return (target.cpu_s() - cpu_s) / (time.perf_counter() - began)


@dataclass(frozen=True, slots=True)
class Opening:
    """How the dashboard opened: milliseconds since the first request, and bytes received."""

    paint_ms: float
    """The first content on the screen."""
    rows_ms: float
    """All rows of nodes are there."""
    nbytes: int
    """Received until then, with headers, compressed as they came."""


def open_page(context: Any, address: str) -> tuple[Any, Opening]:
    """Open the dashboard; return its page and how it opened."""
    page = context.new_page()
    page.set_default_timeout(WAIT_MS)
    received: dict[str, int] = {}  # by request; the stream of events never finishes
    network = context.new_cdp_session(page)

    def add(event: dict[str, Any]) -> None:
        known = received.get(event["requestId"], 0)
        received[event["requestId"]] = known + event["encodedDataLength"]

    def answered(event: dict[str, Any]) -> None:
        add({**event, "encodedDataLength": event["response"]["encodedDataLength"]})

    def finished(event: dict[str, Any]) -> None:
        received[event["requestId"]] = event["encodedDataLength"]  # all of it, headers too

    network.on("Network.responseReceived", answered)
    network.on("Network.dataReceived", add)
    network.on("Network.loadingFinished", finished)
    network.send("Network.enable")
    page.add_init_script(
        "window.ticks = 0; const Source = window.EventSource;"
        "window.EventSource = class extends Source { constructor(...given) { super(...given);"
        " this.addEventListener('message', () => { window.ticks += 1; }); } };"
        f"window.shown = 0; const look = () => {{ document.querySelectorAll('tbody tr').length"
        f" >= {NODES} ? window.shown = performance.now() : setTimeout(look, 10); }};"
        "look();"  # a page behind another one has no animation frames
    )
    page.goto(address)
    page.wait_for_function("() => window.shown > 0")
    paint = "(performance.getEntriesByName('first-contentful-paint')[0]?.startTime ?? 0)"
    return page, Opening(
        page.evaluate(paint), page.evaluate("window.shown"), sum(received.values())
    )


def measure(*, seconds: float, openings: int) -> dict[str, float]:
    """Return every figure."""
    from playwright.sync_api import sync_playwright

    chromium = _chromium()
    with hub() as (target, _), fed(target), sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=chromium, args=["--no-sandbox", "--disable-gpu"]
        )
        opened, jobs_ms = list[Opening](), list[float]()
        for _ in range(openings):
            context = browser.new_context()  # nothing is cached
            # Without a page: its files would be in the cache.
            context.request.get(f"{target.url}/?token={target.token}")
            page, opening = open_page(context, target.url)
            opened.append(opening)
            jobs_ms.append(open_job(page))
            context.close()
        ticks_hz, rows_hz, costs = watch(browser, target, seconds=seconds, rounds=openings)
        browser.close()
    return {
        "first_paint_kb": round(statistics.median(one.nbytes for one in opened) / 1000, 1),
        "first_paint_ms": round(statistics.median(one.paint_ms for one in opened), 1),
        "open_ms": round(statistics.median(one.rows_ms for one in opened), 1),
        "job_ms": round(statistics.median(jobs_ms), 1),
        "update_hz": round(ticks_hz, 2),
        "row_hz": round(rows_hz, 2),
        "hub_core": round(costs[1] - costs[0], 4),
        "pages_core": round(costs[3] - costs[0], 4),
        "fed_core": round(costs[0], 4),
    }


def watch(
    browser: Any, target: RunningHub, *, seconds: float, rounds: int
) -> tuple[float, float, dict[int, float]]:
    """Have no, one and three pages open in turn.

    Returns:
        Ticks and changes of rows per second, and the median share of a core by number of pages.
    """
    shares: dict[int, list[float]] = {0: [], 1: [], 3: []}
    ticks_hz, rows_hz = [], []
    blank = browser.new_page()
    for _ in range(rounds):
        shares[0].append(core_share(target, blank, seconds=seconds))
        context = browser.new_context()
        context.new_page().goto(f"{target.url}/?token={target.token}")
        context.pages[0].close()
        page, _ = open_page(context, target.url)
        page.evaluate(ROWS)
        page.wait_for_timeout(500)
        before, began = page.evaluate("[window.ticks, window.rows]"), time.perf_counter()
        shares[1].append(core_share(target, page, seconds=seconds))
        after, passed = page.evaluate("[window.ticks, window.rows]"), time.perf_counter() - began
        ticks_hz.append((after[0] - before[0]) / passed)
        rows_hz.append((after[1] - before[1]) / passed)
        for _ in range(2):
            open_page(context, target.url)
        shares[3].append(core_share(target, page, seconds=seconds))
        context.close()
    costs = {number: statistics.median(found) for number, found in shares.items()}
    return statistics.median(ticks_hz), statistics.median(rows_hz), costs


ROWS = """
() => {
  window.rows = 0;
  let changed = false;
  new MutationObserver(() => { changed = true; }).observe(document.querySelector('tbody'),
    { subtree: true, childList: true, characterData: true });
  setInterval(() => { if (changed) { window.rows += 1; changed = false; } }, 20);
}
"""


def open_job(page: Any) -> float:
    """Open a run; return the milliseconds until its curves were drawn."""
    job = page.evaluate("fetch('api/jobs?brief=1').then(a => a.json()).then(rows => rows[0].job)")
    found: float = page.evaluate(
        """job => new Promise((resolve) => {
          const began = performance.now();
          location.hash = `#/jobs/${job}`;
          const look = () => { document.querySelector('#loss-chart .curve')
            ? resolve(performance.now() - began) : requestAnimationFrame(look); };
          look();
        })""",
        job,
    )
    return found


def serve() -> None:
    """Be a fed hub until the end of standard input; tell its address and token."""
    with hub() as (target, _), fed(target):
        print(target.url, target.token, flush=True)
        sys.stdin.read()


def compare(other: Path, *, openings: int) -> list[dict[str, Any]]:
    """Return medians of opening this page and that of another checkout, in turns."""
    from playwright.sync_api import sync_playwright

    found: dict[str, list[tuple[Opening, float]]] = {"other": [], "this": []}
    folders = {"other": other.resolve(), "this": Path(__file__).resolve().parents[1]}
    with contextlib.ExitStack() as stack, sync_playwright() as playwright:
        places = {}
        for name, folder in folders.items():
            command = [sys.executable, "-P", str(Path(__file__).resolve()), "--serve"]
            process = subprocess.Popen(
                command, cwd=folder, env=os.environ | {"PYTHONPATH": str(folder)},
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            )  # fmt: skip
            assert process.stdin is not None
            assert process.stdout is not None
            stack.callback(process.wait)
            stack.callback(process.stdin.close)
            places[name] = process.stdout.readline().split()
        browser = playwright.chromium.launch(
            executable_path=_chromium(), args=["--no-sandbox", "--disable-gpu"]
        )
        for number in range(openings):
            for name in sorted(places, reverse=bool(number % 2)):
                url, token = places[name]
                context = browser.new_context()
                context.request.get(f"{url}/?token={token}")
                page, opening = open_page(context, url)
                found[name].append((opening, open_job(page)))
                context.close()
        browser.close()
    return [
        {"figure": figure, **{name: statistics.median(map(take, found[name])) for name in found}}
        for figure, take in FIGURES.items()
    ]


FIGURES: dict[str, Callable[[tuple[Opening, float]], float]] = {
    "first_paint_kb": lambda one: one[0].nbytes / 1000,
    "first_paint_ms": lambda one: one[0].paint_ms,
    "open_ms": lambda one: one[0].rows_ms,
    "job_ms": lambda one: one[1],
}


def _chromium() -> str:
    found = next(filter(None, map(shutil.which, ("chromium", "google-chrome"))), None)
    if found is None:
        raise SystemExit("bench.page needs a Chromium")
    return found


def main() -> None:
    """Measure, or be those that feed the hub."""
    parser = argparse.ArgumentParser(prog="python -m bench.page", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="less of everything")
    parser.add_argument("--against", type=Path, metavar="FOLDER", help="another checkout")
    parser.add_argument("--serve", action="store_true", help="internal")
    parser.add_argument("--feed", nargs=2, metavar=("URL", "TOKEN"), help="internal")
    given = parser.parse_args()
    if given.feed:
        url, token = given.feed  # a word in front: a token may begin with a dash
        asyncio.run(feed(url, token.partition(" ")[2]))
        return
    if given.serve:
        serve()
        return
    seconds, openings = (5.0, 3) if given.quick else (10.0, 7)
    if given.against:
        rows = compare(given.against, openings=openings)
        emit({str(row["figure"]): row for row in rows}, rows)
        return
    found = measure(seconds=seconds, openings=openings)
    emit(found, [{"figure": name, "value": value} for name, value in found.items()])


if __name__ == "__main__":
    main()
