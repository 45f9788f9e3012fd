"""Atoll beside others: the smallest form with real processes, and what becomes of their notes."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch

from bench.peers import __main__, rivals
from bench.peers.hosts import LINKS, ThisMachine, parsed
from bench.peers.on_atoll import FP32
from bench.peers.rivals import Rival
from bench.peers.running import Outcome, stall, stood
from bench.peers.setting import Batches, Setting, flat, held_out_loss
from bench.peers.systems import ALONE, GLOO, RIVALS, TORCHFT, Programs
from bench.peers.table import FIGURES, Plan, Row, Stand, compare, measure, measure_link, stand
from bench.recovery.notes import until
from tests.patience import PATIENCE_S

SMALL = Setting(
    members=2, layers=1, width=32, context=16, batch=1, steps=6, every=3, text_bytes=(3000, 2000),
    held_out_windows=8,
)  # fmt: skip


@contextmanager
def here(hosts: ThisMachine) -> Iterator[Stand]:
    listening = ("--host", "127.0.0.1", "--port", "0")
    with stand(hosts, SMALL.members, listening=listening) as made:
        yield made


def by_formula(folder: Path) -> float:
    """Train members one after the other: theta = start - lr (mean + mu v), v = mu v + mean."""
    SMALL.write(folder)
    models = [SMALL.make_model() for _ in range(SMALL.members)]
    inner = [torch.optim.AdamW(model.parameters(), lr=SMALL.lr) for model in models]
    batches = [Batches(SMALL, folder, slot) for slot in range(SMALL.members)]
    start, velocity = flat(models[0]).astype(np.float64), 0.0
    for step in range(1, SMALL.steps + 1):
        for model, optimizer, stream in zip(models, inner, batches, strict=True):
            optimizer.zero_grad()
            model.loss(*stream.next()).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        if step % SMALL.every == 0:
            mean = np.mean([start - flat(model) for model in models], axis=0)
            velocity = SMALL.outer_momentum * velocity + mean
            start = start - SMALL.outer_lr * (mean + SMALL.outer_momentum * velocity)
            for model in models:
                vector = torch.from_numpy(start.astype(np.float32))
                torch.nn.utils.vector_to_parameters(vector, model.parameters())
    return held_out_loss(SMALL, folder, start.astype(np.float32))


def test_plain_gloo_takes_the_outer_steps_of_diloco(tmp_path: Path) -> None:
    with here(ThisMachine()) as place:
        (row,) = measure_link(Plan(SMALL, (GLOO,), ("unlimited",)), "unlimited", place, {})
    assert row["note"] == ""
    assert row["identical"]
    assert row["seconds"] > 0
    assert row["loss"] == pytest.approx(by_formula(tmp_path), abs=2e-4)


@pytest.mark.long("tests/bench/test_peers.py::test_plain_gloo_takes_the_outer_steps_of_diloco")
def test_atoll_ends_with_what_plain_gloo_ends_with() -> None:
    plan = Plan(SMALL, (ALONE, GLOO, FP32), ("unlimited",))
    with here(ThisMachine()) as place:
        first, gloo, atoll, second = rows = list(measure_link(plan, "unlimited", place, {}))
    compare(rows)
    assert [row["note"] for row in rows] == [""] * 4
    assert [row["identical"] for row in rows] == [False, True, True, False]
    assert atoll["loss"] == pytest.approx(gloo["loss"], abs=2e-4)
    assert first["loss"] == second["loss"] != gloo["loss"]  # a run repeats itself
    both = (first["utilisation"] ** -1 + second["utilisation"] ** -1) / 2
    assert both == pytest.approx(1.0, abs=0.05)


def test_a_missing_rival_has_a_row_that_says_why() -> None:
    missing = {TORCHFT: rivals.find("no_such_rival", None)}
    plan = Plan(SMALL, (TORCHFT,), ("unlimited",))
    with here(ThisMachine()) as place:
        (row,) = measure_link(plan, "unlimited", place, missing)
    assert row["seconds"] is None
    assert row["note"] == "no_such_rival is not installed: give --rivals a folder for it"


def test_what_can_be_imported_here_is_not_installed(tmp_path: Path) -> None:
    assert rivals.find("json", tmp_path).python == sys.executable
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("package", RIVALS.values())
def test_every_rival_has_a_pinned_version(package: str) -> None:
    lines = rivals.requirements(package).read_text(encoding="utf-8").splitlines()
    assert lines[0].partition("==")[0] == package
    assert all("==" in line and "/" not in line for line in lines)


class Broken(ThisMachine):
    """A machine on which no program of Python starts."""

    def environment(self) -> dict[str, str]:
        """Return an environment with a standard library that does not exist."""
        return super().environment() | {"PYTHONHOME": "/nowhere"}


def test_members_that_die_leave_a_note_with_their_last_words() -> None:
    with here(Broken()) as place:
        (row,) = measure_link(Plan(SMALL, (GLOO,), ("unlimited",)), "unlimited", place, {})
    assert row["seconds"] is None
    assert row["note"].startswith("the members ended before: all members connected (member0: ")
    assert "; member1: " in row["note"]


def test_what_a_member_has_started_ends_with_it(tmp_path: Path) -> None:
    made = Programs(ThisMachine(), tmp_path)
    forever = "import signal; signal.pause()"
    command = f"[sys.executable, '-c', {forever!r}]"
    starts = f"import subprocess, sys; print(subprocess.Popen({command}).pid)"
    member = made.start(1, [sys.executable, "-c", starts], "member0")
    made.members.append(member)
    member.wait(PATIENCE_S)
    left = psutil.Process(int((tmp_path / "member0.log").read_text(encoding="utf-8")))
    made.stop()

    def gone() -> bool:
        return not left.is_running() or left.status() == psutil.STATUS_ZOMBIE

    until(lambda: gone() or None, "the end of what a member has started", timeout_s=PATIENCE_S)


def test_a_hub_that_does_not_start_costs_its_own_rows_only() -> None:
    with stand(ThisMachine(), SMALL.members, listening=("--port", "none")) as place:
        plan = Plan(SMALL, (FP32, GLOO), ("unlimited",))
        failed, gloo = measure_link(plan, "unlimited", place, {})
    assert failed["note"].startswith("the hub did not start")
    assert gloo["seconds"] > 0


def test_a_stall_is_what_goes_beyond_a_normal_round() -> None:
    # H = 3: steps of 1 s, rounds of 9 s (connections), 2 s, and 5 s after the kill.
    survivor = [1.0, 2.0, 11.0, 12.0, 13.0, 15.0, 16.0, 17.0, 22.0]
    other = [1.0, 2.0, 11.0, 12.0, 13.0, 15.0, 16.0, 17.0, 19.0]
    assert stall(Outcome(steps=[survivor, other], killed_at=16.5), every=3) == pytest.approx(3.0)
    assert stall(Outcome(steps=[other], killed_at=16.5), every=3) == pytest.approx(0.0)
    assert stood(survivor) == pytest.approx(8.0 + 4.0)


def test_utilisation_compares_rows_of_one_link() -> None:
    def row(system: str, link: str, seconds: float | None) -> Row:
        return {"system": system, "link": link, "seconds": seconds, "utilisation": None}

    rows = [
        row(ALONE, "slow", 30.0), row(GLOO, "slow", 60.0), row(TORCHFT, "slow", None),
        row(ALONE, "slow", 42.0), row(ALONE, "fast", 10.0), row(GLOO, "fast", 20.0),
    ]  # fmt: skip
    compare(rows)
    assert [row["utilisation"] for row in rows] == [1.2, 0.6, None, 0.857, 1.0, 0.5]


def test_links_are_read_and_mistakes_are_named() -> None:
    assert [parsed(link) for link in LINKS] == [("20mbit", "80ms"), ("100mbit", "80ms"), ("", "")]
    with pytest.raises(ValueError, match=r"'fast' is no link: e\.g\. 20mbit/80ms"):
        parsed("fast")


def test_help_explains_every_figure_of_a_row() -> None:
    explained = re.findall(r"(?m)^    (\w+) {2,}", __main__.__doc__ or "")
    assert ("system", "link", *explained) == FIGURES


def test_a_row_has_every_figure_and_shows_none_as_empty() -> None:
    row = measure(Plan(SMALL, (), ()), TORCHFT, "", Stand(ThisMachine(), 2), Rival("", reason="-"))
    assert tuple(row) == FIGURES
    assert __main__.printed(row)["loss"] == ""
