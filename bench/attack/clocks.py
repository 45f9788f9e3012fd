"""The hub's wall clock jumps, by hours and days, while a job trains."""

from __future__ import annotations

import struct
import subprocess
import sys
import time
from pathlib import Path

from atoll.net.endpoint import parse_ticket
from bench.attack.attacks import NotTried, Suite, hold
from bench.attack.session import until
from bench.attack.site import HONEST, Site, trainer_job
from bench.kit.cluster import Cluster

suite = Suite()

CLOCKS = "a clock that jumps ends no session and no job, and no ticket lives longer"

SOURCE = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <time.h>
static volatile double *shift;
__attribute__((constructor)) static void begin(void) {
    int file = open(getenv("CLOCK_SHIFT"), O_RDONLY);
    if (file >= 0) shift = mmap(0, sizeof(double), PROT_READ, MAP_SHARED, file, 0);
}
int clock_gettime(clockid_t which, struct timespec *found) {
    static int (*real)(clockid_t, struct timespec *);
    if (!real) real = dlsym(RTLD_NEXT, "clock_gettime");
    int result = real(which, found);
    if (!result && which == CLOCK_REALTIME && shift) found->tv_sec += (time_t)*shift;
    return result;
}
time_t time(time_t *found) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (found) *found = now.tv_sec;
    return now.tv_sec;
}
"""
"""A library that is loaded before the C library, and moves its wall clock by seconds in a file."""

JUMPS_S = (7_200.0, -86_400.0, 40 * 86_400.0, 0.0)


@suite.attack(CLOCKS, quick=False)
def let_the_hubs_clock_jump(site: Site) -> str:
    folder = site.folder / "clock"
    folder.mkdir()
    library, shift = _library(folder), folder / "shift"
    shift.write_bytes(struct.pack("=d", 0.0))
    with Cluster(folder / "cluster", hub_options=("--tls", "on")) as cluster:
        cluster.hub_environment = {"LD_PRELOAD": str(library), "CLOCK_SHIFT": str(shift)}
        cluster.start_hub()
        there = Site(cluster, folder / "people")
        for name in HONEST[:2]:
            cluster.start_node(name)
        cluster.wait_for_nodes(2)
        there.job = cluster.client.submit(
            trainer_job(there, "timeless", on=[*HONEST], steps=10_000_000, nodes="2")
        )
        until(lambda: there.committed() > 1, "the job commits rounds")
        ticket = parse_ticket(cluster.client.create_ticket(role="viewer", valid_s=3_600.0))
        for jump_s in JUMPS_S:
            with shift.open("r+b") as file:
                file.write(struct.pack("=d", jump_s))
            apart_s = cluster.client.hub()["time"] - time.time() - jump_s
            hold(abs(apart_s) < 3_600, f"the hub's clock did not jump: {apart_s:.0f} s apart")
            there.await_rounds(3)
            lost = [n["node"] for n in cluster.client.nodes() if n["state"] != "online"]
            hold(not lost, f"after a jump of {jump_s:+.0f} s {lost} are lost")
            with there.client() as client, there.web() as web:
                client.health()
                body = {"secret": ticket.secret, "name": "late"}
                status = web.post("/api/login", json=body).status_code
                expired = jump_s > 3_600
                hold(expired == (status != 201), f"a ticket of an hour, {jump_s:+.0f} s: {status}")
        states = {event["kind"] for event in cluster.client.events(there.job)["events"]}
        hold("member-lost" not in states, "a member was lost")
    return f"{len(JUMPS_S)} jumps from -1 to +40 days: no member lost, rounds go on, tickets expire"


def _library(folder: Path) -> Path:
    """Return the library."""
    if sys.platform != "linux":
        raise NotTried("only Linux lets a library stand before the clock")
    source, library = folder / "clock.c", folder / "clock.so"
    source.write_text(SOURCE, encoding="utf-8", newline="\n")
    command = ["cc", "-shared", "-fPIC", "-O1", "-o", str(library), str(source), "-ldl"]
    try:
        subprocess.run(command, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise NotTried(f"no C compiler makes the library: {error}") from error
    return library
