"""Every page, for every kind of job in every state, at two sizes and in two themes.

Nothing overlaps, nothing is cut off or wider than the window, the console stays empty, and axe
finds no barrier. One browser and one hub serve all; pictures are kept for people.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, expect

from atoll.hub.app import HubOptions
from atoll.hub.server import HubServer
from atoll.net.http.client import HubClient
from atoll.wire.messages import Finished, ProcessState
from atoll.wire.states import ProcessPhase
from tests.dashboard.conftest import Watched
from tests.dashboard.five_tasks import TASKS, Hand
from tests.dashboard.kinds import modular, swarm
from tests.dashboard.learning import Learning
from tests.dashboard.scene import Scene
from tests.tiers import sampled

GUIDE = Path(__file__).resolve().parents[2] / "docs" / "guide" / "dashboard.md"
SIZES = ((1440, 900), (390, 844))
GROUND = {"light": "rgb(244, 246, 247)", "dark": "rgb(15, 19, 22)"}
TRACEBACK = ["Traceback (most recent call last):", "ZeroDivisionError: division by zero"]
COMMAND = '[job]\nname = "{}"\nnodes = 1\ncommand = ["python3", "work.py"]\n'
SCRIPT = '[job]\nname = "script"\nnodes = 1\nscript = "train.py"\n'

OVERLAPS = """
() => {
  const inside = document.querySelectorAll('main h2, main h3, main p, main .tabs a, main button,'
    + ' main dt, main dd .value, main td, main figcaption, main .pill, main label,'
    + ' main .plot text');
  const seen = [...inside].filter((one) => one.textContent.trim() && one.checkVisibility())
    .map((one) => ({ one, box: one.getBoundingClientRect() }))
    .filter(({ one, box }) => box.width > 1 && box.height > 1 && !one.closest('thead'));
  const found = [];
  for (let a = 0; a < seen.length; a += 1) {
    for (let b = a + 1; b < seen.length; b += 1) {
      const first = seen[a], second = seen[b];
      if (first.one.contains(second.one) || second.one.contains(first.one)) continue;
      const [one, other] = [first.box, second.box];
      const wide = Math.min(one.right, other.right) - Math.max(one.left, other.left);
      const high = Math.min(one.bottom, other.bottom) - Math.max(one.top, other.top);
      const scrolled = (one) => one.closest('.scroll, .events, .peers, .modules, .choices');
      if (wide > 3 && high > 3 && scrolled(first.one) === scrolled(second.one)) {
        found.push([first, second].map((some) => some.one.textContent.trim().slice(0, 40)));
      }
    }
  }
  return found.slice(0, 5);
}
"""


class Seeded:
    """A hub with a job of every kind and state, and the addresses of all pages."""

    def __init__(self, hub: HubServer, scene: Scene) -> None:
        self.hub, self.scene = hub, scene
        self.running = scene.submit("shakespeare", batch="sweep")
        scene.train(self.running, steps=150, rounds=12)
        self.waiting = scene.submit("needs-forty", nodes=40, least=40)
        self.done = scene.submit("finished", nodes=1, batch="sweep")
        (member,) = scene.train(self.done, steps=400, rounds=0)
        member.request(Finished(ok=True, result={"sample": "To be, or not to be"}))
        self.failed = self._program(SCRIPT, 1)
        self.command = self._program(COMMAND.format("command"), None)
        self.ended = self._program(COMMAND.format("ended"), 0)
        learning = Learning(scene)
        learning.measure(20_000)
        self.policies = learning.job
        self.swarm, _ = swarm(scene)
        self.paths, _, _ = modular(scene)
        scene.http.post("/api/queues/put", json={"queue": "work", "key": "a", "payload": "aGk="})

    def _program(self, spec: str, code: int | None) -> str:
        """Submit a program; let it print, and end unless `code` is None."""
        scene = self.scene
        made = scene.http.post("/api/jobs", json={"spec": spec, "files": {"train.py": "1 / 0"}})
        job = str(made.json()["job"])
        member = scene.placed(job)[0]
        node = scene.nodes[member["node"]]
        node.request(ProcessState(job, "w0", ProcessPhase.RUNNING))
        scene.say(job, "one line", "x" * 3000, node=member["node"])
        if code is not None:
            error = {
                "kind": "ScriptError", "what": f"python3 ended with exit status {code}",
                "given": "w0", "remedy": "see its last lines: atoll logs",
            }  # fmt: skip
            node.request(
                ProcessState(
                    job, "w0", ProcessPhase.EXITED, exit_code=code,
                    error=error if code else None, tail=TRACEBACK if code else [],
                )
            )  # fmt: skip
        return job

    def pages(self) -> dict[str, str]:
        """Return the address of each page by a name for its picture."""
        one = f"jobs/{self.running}"
        kinds = {
            "waiting": self.waiting, "done": self.done, "failed": self.failed,
            "command": self.command, "ended": self.ended, "policies": self.policies,
            "swarm": self.swarm, "paths": self.paths,
        }  # fmt: skip
        return {
            "cluster": "fleet", "node": "fleet/maria-laptop", "jobs": "jobs", "job": one,
            **{f"job-{name}": f"jobs/{job}" for name, job in kinds.items()},
            "timeline": f"{one}/timeline", "members": f"{one}/members", "output": f"{one}/output",
            "files": f"{one}/files", "unknown": "jobs/nobody",
            "plan": "plan", "compare": f"compare?jobs={self.running},{self.done}",
            "queues": "queues", "queue": "queues/work", "alarms": "events",
            "activity": "events/happened", "limits": "events/limits", "audit": "events/audit",
        }  # fmt: skip


@pytest.fixture(scope="module")
def seeded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Seeded]:
    folder: Path = tmp_path_factory.mktemp("seeded")
    options = HubOptions(data=folder / "data", jobs=folder / "jobs", reducers=False)
    with HubServer(options) as hub, Scene(hub, slots=8) as scene:
        yield Seeded(hub, scene)


@pytest.fixture(scope="module")
def seen(browser: Browser, seeded: Seeded) -> Iterator[Watched]:
    context = browser.new_context(viewport={"width": 1440, "height": 900})
    yield Watched(context.new_page(), seeded.hub)
    context.close()


THEMES = ("light", "dark")
ALL = [(scheme, SIZES) for scheme in THEMES]


def crosswise(number: int) -> Sequence[tuple[str, Sequence[tuple[int, int]]]]:
    """Return a theme for the larger size and one for the smaller, by turns."""
    return [(THEMES[number % 2], SIZES[:1]), (THEMES[(number + 1) % 2], SIZES[1:])]


def look(
    seen: Watched,
    name: str,
    barriers: list[str],
    looks: Sequence[tuple[str, Sequence[tuple[int, int]]]] = ALL,
) -> None:
    """Look at a page in these themes and sizes."""
    page = seen.page
    for scheme, sizes in looks:
        page.emulate_media(color_scheme="light" if scheme == "light" else "dark")
        for width, height in sizes:
            page.set_viewport_size({"width": width, "height": height})
            page.evaluate("() => new Promise(requestAnimationFrame)")
            where = f"{name}, {scheme}, {width}"
            assert page.evaluate("document.documentElement.scrollWidth") <= width, where
            assert page.evaluate(OVERLAPS) == [], where
            ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
            assert ground == GROUND[scheme]
            seen.keep(f"{name}-{scheme}-{width}")
        if sizes[-1] != SIZES[-1]:
            continue
        found = Axe().run(page).response["violations"]  # at the smaller size
        barriers += [
            f"{name}, {scheme}: {v['id']}: {v['help']}: {v['nodes'][0]['html'][:200]}"
            for v in found
            if v["impact"] in ("serious", "critical")
        ]


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "every",
    sampled(
        [False, True],
        lambda every: not every,
        "tests/dashboard/test_pages.py::test_every_page_fits_in_both_sizes_and_themes",
    ),
)
def test_every_page_fits_in_both_sizes_and_themes(
    seeded: Seeded, seen: Watched, every: bool
) -> None:
    barriers: list[str] = []
    for number, (name, place) in enumerate(seeded.pages().items()):
        seen.go(place)
        expect(seen.page.locator("main h2:visible").first).to_be_visible()
        if name == "job":
            expect(seen.page.locator("#loss-chart .curve.bold")).to_be_attached()
        look(seen, name, barriers, ALL if every else crosswise(number))
        if name == "unknown":  # what there is of it is asked for, and is not there
            seen.problems = [problem for problem in seen.problems if "404" not in problem]
        assert seen.problems == [], name
    assert barriers == []


def test_an_empty_hub_onboards(browser: Browser, tmp_path: Path) -> None:
    options = HubOptions(data=tmp_path / "data", jobs=tmp_path / "jobs", reducers=False)
    barriers: list[str] = []
    with HubServer(options) as hub:
        context = browser.new_context()
        seen = Watched(context.new_page(), hub)
        page = seen.page
        expect(page.locator(".arrived")).to_have_text("waiting for the first laptop …")
        expect(page.locator(".add-machine > .note")).to_contain_text("cannot reach it")
        expect(page.locator("main")).to_contain_text("All clear")
        expect(page.get_by_role("link", name="Cluster", exact=True)).to_be_visible()
        look(seen, "empty-cluster", barriers)
        seen.go("jobs")
        expect(page.locator(".first-job")).to_contain_text("atoll run demo")
        seen.go("compare")
        expect(page.get_by_role("link", name="Start a job")).to_be_visible()
        look(seen, "empty-compare", barriers)
        context.close()
    assert barriers == []
    assert seen.problems == [], seen.problems


def test_pages_tell_by_kind_of_job_what_matters(seeded: Seeded, seen: Watched) -> None:
    page = seen.page
    page.set_viewport_size({"width": 1440, "height": 900})
    seen.go(f"jobs/{seeded.running}")
    said = page.locator("#job-sentence")
    expect(said).to_contain_text("GPT, diloco, 2 nodes. ")
    expect(said).to_contain_text("slowest kitchen-1;")
    expect(said).to_contain_text("done about ")
    seen.go(f"jobs/{seeded.ended}")
    expect(page.locator("#log")).to_contain_text("one line")
    expect(page.locator("tbody tr").first).to_contain_text("done0")
    assert page.locator(".chart:visible, progress:visible, .tiles:visible").count() == 0
    seen.go(f"jobs/{seeded.failed}")
    failure = page.locator("#failure")
    expect(failure).to_contain_text(TRACEBACK[-1])
    expect(failure).to_contain_text(f"atoll logs {seeded.failed}")
    seen.go(f"jobs/{seeded.waiting}")
    expect(page.locator(".reason")).to_contain_text("Waiting: needs 40 nodes")
    assert page.locator(".chart:visible").count() == 0
    seen.go(f"jobs/{seeded.done}")
    expect(page.locator(".sample")).to_have_text("To be, or not to be")
    expect(page.get_by_role("button", name="Run again")).to_be_visible()
    seen.go("jobs/nobody")
    expect(page.locator(".reason")).to_contain_text("There is no job named nobody.")


TUNED = """
[job]
name = "tuned"
[model]
source = "/models/none"
[tune]
data = ["chats.jsonl"]
"""


def test_a_tuned_job_shows_its_data(seeded: Seeded, seen: Watched) -> None:
    job = str(seeded.scene.http.post("/api/jobs", json={"spec": TUNED}).json()["job"])
    page = seen.go(f"jobs/{job}")
    expect(page.locator("#job-title")).to_contain_text(job)
    seen.problems.clear()  # of the page before, an unknown job's
    expect(page.locator("#examples")).to_be_hidden()
    preview = {
        "sentences": ["60 examples of 61 records", "1 left out: equal to an earlier one"],
        "headings": [["Chosen", "Rejected"]],
        "examples": [[[["count 3 apples ", False], ["three", True]], [["count 3 apples ", False],
                     ["<b>four</b>", True]]]],
    }  # fmt: skip
    with HubClient(seeded.hub.url, seeded.hub.operator_token) as client:
        client.put_file(job, "data.json", json.dumps(preview).encode())
    card = page.locator("#examples")
    expect(card).to_contain_text("1 left out: equal to an earlier one")
    card.locator("summary").click()
    expect(card.locator("h3")).to_have_text(["Chosen", "Rejected"])
    expect(card.locator("u")).to_have_text(["three", "<b>four</b>"])
    barriers: list[str] = []
    look(seen, "tuned", barriers)
    assert barriers == []
    assert seen.problems == []
    seeded.scene.http.post(f"/api/jobs/{job}/stop", json={})


def test_five_tasks_take_the_clicks_that_the_guide_says(seeded: Seeded, seen: Watched) -> None:
    seen.page.set_viewport_size({"width": 1440, "height": 900})
    guide = GUIDE.read_text(encoding="utf-8")
    seen.problems.clear()  # of the page before, an unknown job's
    for name, do in TASKS.items():
        told = re.search(rf"^\| {name} \| [^|]+ \| (\d+) clicks \|", guide, re.MULTILINE)
        assert told, name
        hand = Hand(seen)
        do(hand, seeded)
        assert hand.clicks == int(told[1]), name
    assert seen.problems == [], seen.problems


def test_a_programs_failure_is_no_alarm_of_its_machine(seeded: Seeded) -> None:
    alarm = seeded.scene.wait_for_alarm("job-failed")
    assert (alarm["severity"], alarm["node"]) == ("warning", "")
    assert f"atoll logs {seeded.failed};" in alarm["remedy"]


def test_a_phone_shows_every_view_in_the_bar(seeded: Seeded, seen: Watched) -> None:
    page = seen.go("fleet")
    page.set_viewport_size({"width": 390, "height": 844})
    expect(page.locator("#views a").last).to_contain_text("Activity")
    wide = page.evaluate("(() => { const bar = document.querySelector('#views');"
                         " return bar.scrollWidth - bar.clientWidth; })()")  # fmt: skip
    assert wide <= 0
    page.set_viewport_size({"width": 1440, "height": 900})


def test_full_use_of_a_machine_is_not_red(seeded: Seeded, seen: Watched) -> None:
    page = seen.go("fleet")
    row = page.locator("tbody tr", has_text="attic-gpu")
    expect(row).to_contain_text("96 %")
    assert row.locator(".fill.bad").count() == 0


def test_charts_zoom_together_and_name_all_series(seeded: Seeded, seen: Watched) -> None:
    page = seen.page
    page.set_viewport_size({"width": 1440, "height": 900})
    seen.go(f"jobs/{seeded.running}")
    seen.problems.clear()  # of the page before, an unknown job's
    loss, speed = page.locator("#loss-chart"), page.locator("#speed-chart")
    expect(loss.locator(".curve.faint")).to_have_count(2)
    expect(loss.locator("text.title")).to_have_text("optimizer step")
    loss.scroll_into_view_if_needed()
    box = loss.bounding_box()
    assert box is not None
    middle = box["y"] + box["height"] / 2
    page.mouse.move(box["x"] + box["width"] / 2, middle)
    tip = loss.locator(".tip")
    for name in ("held-out", "mean", "attic-gpu", "kitchen-1"):
        expect(tip).to_contain_text(name)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] - 40, middle, steps=3)
    page.mouse.up()
    expect(speed.locator("text", has_text="150")).to_have_count(0)  # linked: the end is cut off
    page.get_by_role("button", name="Reset zoom").click()
    page.locator(".log").check()
    page.locator(".smooth").select_option("0.95")
    expect(loss.locator(".curve.bold")).to_be_attached()
    assert seen.problems == [], seen.problems


def test_a_hub_that_is_down_covers_the_page(browser: Browser, tmp_path: Path) -> None:
    options = HubOptions(data=tmp_path / "data", jobs=tmp_path / "jobs", reducers=False)
    with HubServer(options) as hub:
        context = browser.new_context()
        seen = Watched(context.new_page(), hub)
        expect(seen.page.locator("#down")).to_be_hidden()
    down = seen.page.locator("#down")
    expect(down).to_be_visible()
    expect(down).to_contain_text("The hub does not answer")
    covered = down.bounding_box()
    assert covered is not None
    assert (covered["width"], covered["height"]) == (1280, 720)  # all of the window
    barriers: list[str] = []
    look(seen, "hub-down", barriers)
    assert barriers == []
    context.close()
